//! Images exchanged with qemu-img and qemu-io in both directions, for every subformat made of sparse extents.

use super::*;
use crate::proving::{Folder, pattern};

const MIB: u64 = 1 << 20;

/// The smallest descriptor that QEMU accepts.
fn descriptor(create_type: &str, sectors: &[(u64, &str)]) -> Vec<u8> {
    let lines: String = sectors.iter().map(|(count, name)| format!("RW {count} SPARSE \"{name}\"\n")).collect();
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"{create_type}\"\n\n\
         # Extent description\n{lines}\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
         ddb.geometry.cylinders = \"20\"\nddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
         ddb.adapterType = \"ide\"\n"
    )
    .into_bytes()
}

/// Writes a random history through a layer, and returns the content.
fn fill(layer: &dyn Layer, seed: u64, mut model: Vec<u8>) -> Vec<u8> {
    let mut random = Random::new(seed);
    let grain = layer.grain();
    let count = layer.capacity().div_ceil(grain);
    for step in 0..60 {
        let first = random.below(count);
        let end = ((first + 1 + random.below(20)) * grain).min(layer.capacity());
        let span = (first * grain) as usize..end as usize;
        match random.below(8) {
            0 => {
                layer.zero(first * grain..end, random.percent(50)).unwrap();
                model[span].fill(0);
            }
            1 => layer.flush().unwrap(),
            _ => {
                let bytes = pattern(seed * 100 + step, span.len());
                layer.write(first * grain, &[&bytes]).unwrap();
                model[span].copy_from_slice(&bytes);
            }
        }
    }
    model
}

/// The content of the image as QEMU reads it.
fn converted(folder: &Folder, name: &str) -> Vec<u8> {
    folder.run("qemu-img", &["check", "-f", "vmdk", name]);
    folder.run("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", name, "out.raw"]);
    folder.read("out.raw")
}

#[test]
fn qemu_reads_extents_written_by_lamina() {
    for (seed, zero_grains, capacity) in [(1, false, 80 * MIB), (2, true, 33 * MIB), (3, false, 3 * MIB + 200 * SECTOR)]
    {
        let folder = Folder::new();
        let file = folder.create("disk.vmdk");
        let text = descriptor("monolithicSparse", &[(capacity / SECTOR, "disk.vmdk")]);
        let options = CreateOptions { capacity, descriptor: Some(&text), zero_grains };
        create(file.as_ref(), "disk.vmdk", &options).unwrap();
        let layer = open(&file, true, false).unwrap();
        let model = fill(&layer, seed, vec![0; capacity as usize]);
        layer.close().unwrap();
        assert!(converted(&folder, "disk.vmdk") == model, "seed {seed}");
        // QEMU writes more data into the image, and lamina reads all of it.
        let mut model = model;
        folder.run(
            "qemu-io",
            &["-f", "vmdk", "-c", "write -P 0x5a 64k 3072", "-c", "write -P 0xa5 2M 256k", "disk.vmdk"],
        );
        model[65536..65536 + 3072].fill(0x5a);
        model[2 * MIB as usize..][..256 << 10].fill(0xa5);
        let layer = open(&file, true, false).unwrap();
        assert!(read_all(&layer, None) == model, "seed {seed}");
        let check = layer.check().unwrap();
        assert!(check.is_sound() && check.dead == 0, "{check:?}");
        let model = fill(&layer, seed + 10, model);
        layer.close().unwrap();
        assert!(converted(&folder, "disk.vmdk") == model, "seed {seed}");
    }
}

#[test]
fn lamina_reads_extents_written_by_qemu() {
    for subformat in ["monolithicSparse", "twoGbMaxExtentSparse"] {
        for zeroed in ["off", "on"] {
            let folder = Folder::new();
            let mut model = vec![0; 40 * MIB as usize];
            for (at, start) in [0, 131_072, 5_000_192, 33 << 20].into_iter().enumerate() {
                let bytes = pattern(at as u64, 300_032);
                model[start..start + bytes.len()].copy_from_slice(&bytes);
            }
            folder.write("in.raw", &model);
            let options = format!("subformat={subformat},zeroed_grain={zeroed}");
            folder.run("qemu-img", &["convert", "-O", "vmdk", "-o", &options, "in.raw", "disk.vmdk"]);
            let name = if subformat == "monolithicSparse" { "disk.vmdk" } else { "disk-s001.vmdk" };
            let file = folder.file(name);
            let layer = open(&file, false, false).unwrap();
            assert!(read_all(&layer, None) == model, "{subformat} {zeroed}");
            assert!(layer.check().unwrap().is_sound());
            drop(layer);
            let layer = open(&file, true, false).unwrap();
            let model = fill(&layer, 5, model);
            layer.close().unwrap();
            assert!(converted(&folder, "disk.vmdk") == model, "{subformat} {zeroed}");
        }
    }
}

#[test]
fn a_delta_over_a_parent_made_by_qemu() {
    let folder = Folder::new();
    let base = pattern(7, 24 * MIB as usize);
    folder.write("in.raw", &base);
    folder.run("qemu-img", &["convert", "-O", "vmdk", "in.raw", "base.vmdk"]);
    for zeroed in ["off", "on"] {
        let options = format!("zeroed_grain={zeroed}");
        let create = ["create", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", "-o", &options, "delta.vmdk"];
        folder.run("qemu-img", &create);
        folder.run("qemu-io", &["-f", "vmdk", "-c", "write -P 0x11 1M 5k", "delta.vmdk"]);
        let mut model = base.clone();
        model[MIB as usize..][..5 << 10].fill(0x11);
        let file = folder.file("delta.vmdk");
        let layer = open(&file, true, true).unwrap();
        assert!(read_all(&layer, Some(&base)) == model);
        let model = fill(&layer, 9, model);
        assert!(read_all(&layer, Some(&base)) == model);
        layer.close().unwrap();
        assert!(converted(&folder, "delta.vmdk") == model, "zeroed_grain={zeroed}");
        std::fs::remove_file(folder.path.path().join("delta.vmdk")).unwrap();
    }
}

#[test]
fn qemu_reads_a_disk_split_into_several_extents() {
    let folder = Folder::new();
    // Odd sizes; VMware's pieces are 2047 MiB and 4064 MiB, which are whole grains, too.
    let sizes = [5 * MIB, 3 * MIB, 2 * MIB + 100 * SECTOR];
    let names = ["disk-s001.vmdk", "disk-s002.vmdk", "disk-s003.vmdk"];
    let lines: Vec<(u64, &str)> = sizes.iter().map(|size| size / SECTOR).zip(names).collect();
    folder.write("disk.vmdk", &descriptor("twoGbMaxExtentSparse", &lines));
    let mut model = Vec::new();
    for (seed, (capacity, name)) in (3..).zip(sizes.into_iter().zip(names)) {
        let file = folder.create(name);
        create(file.as_ref(), name, &CreateOptions { capacity, descriptor: None, zero_grains: false }).unwrap();
        let layer = open(&file, true, false).unwrap();
        assert_eq!(layer.descriptor().unwrap(), None);
        model.extend(fill(&layer, seed, vec![0; capacity as usize]));
        layer.close().unwrap();
    }
    assert!(converted(&folder, "disk.vmdk") == model);
}

#[test]
fn a_descriptor_is_replaced_in_place() {
    let folder = Folder::new();
    let file = folder.create("disk.vmdk");
    let text = descriptor("monolithicSparse", &[(4096, "disk.vmdk")]);
    let options = CreateOptions { capacity: 2 * MIB, descriptor: Some(&text), zero_grains: false };
    create(file.as_ref(), "disk.vmdk", &options).unwrap();
    let layer = open(&file, true, false).unwrap();
    let changed = String::from_utf8(text).unwrap().replace("12345678", "89abcdef").into_bytes();
    layer.set_descriptor(&changed).unwrap();
    assert_eq!(layer.set_descriptor(&[b'#'; 10_241]).unwrap_err().kind(), ErrorKind::Invalid);
    layer.close().unwrap();
    assert_eq!(open(&file, false, false).unwrap().descriptor().unwrap().unwrap(), changed);
    let info = folder.run("qemu-img", &["info", "disk.vmdk"]);
    assert!(info.contains(&format!("cid: {}", 0x89ab_cdefu32)), "{info}");
}
