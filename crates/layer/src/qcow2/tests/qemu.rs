//! Every kind of image that qemu-img and qemu-io can make is read back.

use super::*;

const MIB: usize = 1 << 20;

/// Makes random writes, zeroes and discards through QEMU, and makes the same changes in the model.
fn history(folder: &Folder, seed: u64, target: &[&str], model: &mut [u8]) {
    let mut random = Random::new(seed);
    let mut commands: Vec<String> = Vec::new();
    for step in 0..60 {
        let unit = 512;
        let start = random.below((model.len() / unit) as u64) as usize * unit;
        let most = if random.percent(20) { 3 * MIB } else { 200_000 };
        let length = (1 + random.below((most / unit) as u64) as usize) * unit;
        let end = (start + length).min(model.len());
        let byte = 1 + (seed * 60 + step) as u8 % 255;
        let (verb, value) = match random.below(10) {
            0..6 => (format!("write -P {byte}"), byte),
            6..8 => ("write -z".to_owned(), 0),
            _ => ("write -z -u".to_owned(), 0),
        };
        commands.push(format!("{verb} {start} {}", end - start));
        model[start..end].fill(value);
    }
    let mut arguments: Vec<&str> = Vec::new();
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.extend(target);
    let output = folder.run("qemu-io", &arguments);
    assert!(!output.contains("fail"), "{output}");
}

#[test]
fn uncompressed_images_with_every_option() {
    let shapes = [
        "compat=0.10",
        "compat=1.1",
        "cluster_size=512",
        "cluster_size=2M",
        "cluster_size=4k,lazy_refcounts=on",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
        "extended_l2=on,cluster_size=2M",
        // With one bit per reference count QEMU can make no snapshot; the test makes none for options at this index.
        "preallocation=full,refcount_bits=1",
        "preallocation=metadata",
    ];
    for (seed, shape) in shapes.into_iter().enumerate() {
        let folder = Folder::new();
        let capacity = 20 * MIB + 512 * seed;
        folder.run("qemu-img", &["create", "-f", "qcow2", "-o", shape, "disk.qcow2", &capacity.to_string()]);
        let mut model = vec![0; capacity];
        history(&folder, seed as u64, &["-f", "qcow2", "disk.qcow2"], &mut model);
        // An internal snapshot is ignored; data written after it is read.
        if seed % 2 == 1 {
            folder.run("qemu-img", &["snapshot", "-c", "before", "disk.qcow2"]);
            history(&folder, seed as u64 + 100, &["-f", "qcow2", "disk.qcow2"], &mut model);
        }
        let layer = Qcow2::open(folder.file("disk.qcow2"), None, "disk.qcow2").unwrap();
        assert_eq!(layer.capacity(), capacity as u64);
        assert!(read_all(&layer, None) == model, "{shape}");
        let usage = layer.usage().unwrap();
        assert!(usage.mapped > 0 && usage.allocated > 0, "{shape}: {usage:?}");
        let mut random = Random::new(7);
        for _ in 0..200 {
            let start = random.below(capacity as u64 / SECTOR) * SECTOR;
            let end = (start + (1 + random.below(900)) * SECTOR).min(capacity as u64);
            assert!(read(&layer, start..end, None).unwrap() == model[start as usize..end as usize], "{shape}");
        }
    }
}

#[test]
fn compressed_clusters() {
    for method in ["zlib", "zstd"] {
        for cluster in ["64k", "2M", "512"] {
            let folder = Folder::new();
            let mut model = vec![0; 9 * MIB];
            for at in 0..40 {
                let bytes = crate::proving::compressible(at as u64, 150_000);
                model[at * 230_000..at * 230_000 + bytes.len()].copy_from_slice(&bytes);
            }
            folder.write("in.raw", &model);
            let options = format!("compression_type={method},cluster_size={cluster}");
            let convert = ["convert", "-c", "-O", "qcow2", "-o", &options, "in.raw", "disk.qcow2"];
            folder.run("qemu-img", &convert);
            let layer = Qcow2::open(folder.file("disk.qcow2"), None, "disk.qcow2").unwrap();
            let mut extents = Vec::new();
            layer.map(0..layer.capacity(), 10_000, &mut extents).unwrap();
            assert!(extents.iter().any(|extent| extent.content == crate::Content::Encoded), "{options}");
            assert!(read_all(&layer, None) == model, "{options}");
            if cluster == "64k" {
                history(&folder, 5, &["-f", "qcow2", "disk.qcow2"], &mut model);
                let layer = Qcow2::open(folder.file("disk.qcow2"), None, "disk.qcow2").unwrap();
                assert!(read_all(&layer, None) == model, "{options} after writes");
            }
        }
    }
}

#[test]
fn backing_files_and_their_names() {
    let folder = Folder::new();
    let base = pattern(3, 8 * MIB);
    folder.write("base.raw", &base);
    for (format, shape) in
        [("compat=1.1", "cluster_size=64k"), ("compat=0.10", "cluster_size=64k"), ("compat=1.1", "extended_l2=on")]
    {
        let options = format!("{format},{shape}");
        let create = ["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "-o", &options, "top.qcow2"];
        folder.run("qemu-img", &create);
        let mut model = base.clone();
        history(&folder, 11, &["-f", "qcow2", "top.qcow2"], &mut model);
        let layer = Qcow2::open(folder.file("top.qcow2"), None, "top.qcow2").unwrap();
        let backing = layer.header().backing().unwrap();
        assert_eq!((backing.name.as_str(), backing.format.as_deref()), ("base.raw", Some("raw")));
        assert!(read_all(&layer, Some(&base)) == model, "{options}");
        std::fs::remove_file(folder.path.path().join("top.qcow2")).unwrap();
    }
}

#[test]
fn an_external_data_file() {
    for shape in ["data_file=disk.data", "data_file=disk.data,data_file_raw=on", "data_file=disk.data,extended_l2=on"] {
        let folder = Folder::new();
        folder.run("qemu-img", &["create", "-f", "qcow2", "-o", shape, "disk.qcow2", "6M"]);
        let mut model = vec![0; 6 * MIB];
        history(&folder, 21, &["-f", "qcow2", "disk.qcow2"], &mut model);
        let file = folder.file("disk.qcow2");
        let header = Header::read(file.as_ref()).unwrap();
        assert!(header.external_data() && header.data_file() == Some("disk.data"));
        assert_eq!(Qcow2::open(file, None, "disk.qcow2").err().unwrap().kind(), ErrorKind::Invalid);
        let data = Some(folder.file("disk.data"));
        let layer = Qcow2::open(folder.file("disk.qcow2"), data, "disk.qcow2").unwrap();
        assert!(read_all(&layer, None) == model, "{shape}");
    }
}

#[test]
fn internal_snapshots_are_counted_and_not_read() {
    let folder = Folder::new();
    folder.run("qemu-img", &["create", "-f", "qcow2", "disk.qcow2", "1M"]);
    for (count, byte) in [(0, 1), (1, 2), (2, 3)] {
        folder.run("qemu-io", &["-f", "qcow2", "-c", &format!("write -P {byte} 0 64k"), "disk.qcow2"]);
        let layer = Qcow2::open(folder.file("disk.qcow2"), None, "disk.qcow2").unwrap();
        assert_eq!(layer.header().internal_snapshots(), count);
        assert_eq!(read(&layer, 0..65_536, None).unwrap(), vec![byte; 65_536]);
        folder.run("qemu-img", &["snapshot", "-c", &format!("s{count}"), "disk.qcow2"]);
    }
}

#[test]
fn large_capacities_open_quickly() {
    let folder = Folder::new();
    folder.run("qemu-img", &["create", "-f", "qcow2", "disk.qcow2", "60T"]);
    folder.run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 50T 64k", "disk.qcow2"]);
    let layer = Qcow2::open(folder.file("disk.qcow2"), None, "disk.qcow2").unwrap();
    let mut extents = Vec::new();
    layer.map(0..layer.capacity(), 100, &mut extents).unwrap();
    assert_eq!(extents.len(), 3);
    assert_eq!((extents[1].start, extents[1].length), (50 << 40, 65_536));
    assert_eq!(read(&layer, 50 << 40..(50 << 40) + 65_536, None).unwrap(), vec![7; 65_536]);
}
