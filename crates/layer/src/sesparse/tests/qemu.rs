//! Images written by lamina and read by QEMU: an SEsparse delta over a flat base, byte for byte.

use super::*;
use backend::local::{LocalDirectory, LocalQueues};
use std::path::Path;
use std::process::Command;

fn qemu_img(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("qemu-img").args(arguments).current_dir(folder).output().expect("qemu-img is installed");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "qemu-img {arguments:?}: {text}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn descriptors(folder: &Path, sectors: u64) {
    let base = format!(
        "# Disk DescriptorFile\nversion=1\nCID=0172e8a4\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\n\
         # Extent description\nRW {sectors} VMFS \"vm-flat.vmdk\"\n\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"13\"\n"
    );
    let delta = format!(
        "# Disk DescriptorFile\nversion=1\nCID=8f67ca74\nparentCID=0172e8a4\ncreateType=\"seSparse\"\n\
         parentFileNameHint=\"vm.vmdk\"\n# Extent description\nRW {sectors} SESPARSE \"{NAME}\"\n\n\
         # The Disk Data Base\n#DDB\n\nddb.grain = \"8\"\n"
    );
    std::fs::write(folder.join("vm.vmdk"), base).unwrap();
    std::fs::write(folder.join("vm-000001.vmdk"), delta).unwrap();
}

fn history(seed: u64, capacity: u64, mode: IoMode) {
    let mut random = Random(seed);
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    descriptors(folder.path(), capacity / 512);
    let base = directory.create("vm-flat.vmdk", IoMode::Buffered).unwrap();
    base.set_len(capacity).unwrap();
    let mut expected = vec![0; capacity as usize];
    for _ in 0..20 {
        let at = random.below(capacity / GRAIN - 64) * GRAIN;
        let data = stamped(64, random.next());
        base.write_at(&[&data], at, false).unwrap();
        expected[at as usize..at as usize + data.len()].copy_from_slice(&data);
    }
    let file = directory.create(NAME, mode).unwrap();
    let layer = SeSparse::create(file, NAME, capacity, writing()).unwrap();
    for step in 0..200 {
        let count = 1 + random.below(400);
        let at = random.below((capacity / GRAIN).saturating_sub(count)) * GRAIN;
        let stamp = if random.once_in(3) { 0 } else { random.next() };
        let data = stamped(count, stamp);
        match stamp {
            0 => layer.zero(at..at + count * GRAIN, random.once_in(2)).unwrap(),
            _ => layer.write(at, &[&data]).unwrap(),
        }
        expected[at as usize..at as usize + data.len()].copy_from_slice(&data);
        if step == 120 {
            layer.wipe(true, &NoProgress).unwrap();
            layer.shrink(&NoProgress).unwrap();
        }
    }
    if !capacity.is_multiple_of(GRAIN) {
        let start = capacity / GRAIN * GRAIN;
        let data = stamped(1, random.next());
        layer.write(start, &[&data[..(capacity - start) as usize]]).unwrap();
        expected[start as usize..].copy_from_slice(&data[..(capacity - start) as usize]);
    }
    // QEMU reads the image twice: before it is closed, as after a crash, and after it is closed.
    layer.flush().unwrap();
    for closed in [false, true] {
        if closed {
            layer.close().unwrap();
        }
        std::fs::write(folder.path().join("expected.raw"), &expected).unwrap();
        qemu_img(folder.path(), &["convert", "-O", "raw", "vm-000001.vmdk", "out.raw"]);
        assert!(std::fs::read(folder.path().join("out.raw")).unwrap() == expected, "seed {seed}");
        qemu_img(folder.path(), &["compare", "-F", "raw", "-f", "vmdk", "vm-000001.vmdk", "expected.raw"]);
    }
    // Compares every extent with QEMU's map.
    let mut ours = vec![None; (capacity / GRAIN) as usize];
    for extent in map_all(&layer, 0, capacity / GRAIN * GRAIN).unwrap() {
        let grains = (extent.start / GRAIN) as usize..((extent.start + extent.length) / GRAIN) as usize;
        for (index, grain) in grains.enumerate() {
            ours[grain] = match extent.content {
                Content::Data { offset, .. } => Some(offset + index as u64 * GRAIN),
                Content::Zero => Some(0),
                _ => None,
            };
        }
    }
    let text = qemu_img(folder.path(), &["map", "--output=json", "vm-000001.vmdk"]);
    let mut seen = 0;
    for line in text.lines() {
        let number = |key: &str| {
            let rest = line.split(&format!("\"{key}\": ")).nth(1)?;
            rest.split([',', '}']).next()?.trim().parse::<u64>().ok()
        };
        let (Some(start), Some(length), Some(depth)) = (number("start"), number("length"), number("depth")) else {
            continue;
        };
        let data = line.contains("\"data\": true");
        for grain in start / GRAIN..(start + length) / GRAIN {
            let expected = match ours[grain as usize] {
                None => (1, None),
                Some(0) => (0, None),
                Some(offset) => (0, Some(offset)),
            };
            let found = number("offset").filter(|_| data && depth == 0).map(|offset| offset + grain * GRAIN - start);
            assert_eq!((depth, found), expected, "grain {grain}: {line}");
            seen += 1;
        }
    }
    assert_eq!(seen, capacity / GRAIN);
}

#[test]
fn qemu_reads_data_written_by_lamina() {
    for (seed, capacity) in [(1, 100 * MIB), (2, 64 * MIB), (3, 33 * MIB + 65_536)] {
        history(seed, capacity, IoMode::Buffered);
    }
    history(4, 48 * MIB, IoMode::Direct);
}

/// The content over a base of zeros.
fn bytes(layer: &dyn Layer) -> Vec<u8> {
    let mut bytes = vec![0; layer.capacity() as usize];
    for extent in map_all(layer, 0, layer.capacity()).unwrap() {
        if let Content::Data { file, offset } = extent.content {
            let out = &mut bytes[extent.start as usize..(extent.start + extent.length) as usize];
            layer.file(file).unwrap().read_at(out, offset).unwrap();
        }
    }
    bytes
}

/// QEMU's view of a copy of an image. A power cut or another opening may have preceded.
fn compare_copy(disk: &SimulatedDisk, seed: u64) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let reader = open(&*disk.directory(), IoMode::Buffered, Options::default()).unwrap();
    let expected = bytes(&reader);
    descriptors(folder.path(), reader.capacity() / 512);
    directory.create("vm-flat.vmdk", IoMode::Buffered).unwrap().set_len(reader.capacity()).unwrap();
    let (from, to) = (reader.file(0).unwrap(), directory.create(NAME, IoMode::Buffered).unwrap());
    let length = from.len().unwrap();
    to.set_len(length).unwrap();
    let mut piece = vec![0; MIB as usize];
    for at in (0..length).step_by(MIB as usize) {
        let piece = &mut piece[..MIB.min(length - at) as usize];
        from.read_at(piece, at).unwrap();
        if piece.iter().any(|byte| *byte != 0) {
            to.write_at(&[piece], at, false).unwrap();
        }
    }
    qemu_img(folder.path(), &["convert", "-O", "raw", "vm-000001.vmdk", "out.raw"]);
    assert!(std::fs::read(folder.path().join("out.raw")).unwrap() == expected, "seed {seed}");
    expected
}

/// QEMU reads a crashed image like lamina, before and after it was opened for writing.
#[test]
fn qemu_reads_images_after_a_crash() {
    for seed in 0..12 {
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 50 * MIB, writing());
        let mut random = Random(seed);
        disk.cut_after(disk.operations() + 40 + random.below(160));
        while !disk.is_off() {
            match random.below(20) {
                0 => drop(layer.flush()),
                1 => drop(layer.wipe(true, &NoProgress)),
                2 => drop(layer.shrink(&NoProgress)),
                _ => drop(Operation::draw(&mut random, &[0, 2], 200).apply(&layer)),
            }
        }
        drop(layer);
        let disk = disk.crash();
        let before = compare_copy(&disk, seed);
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        layer.wipe(true, &NoProgress).unwrap();
        layer.shrink(&NoProgress).unwrap();
        layer.flush().unwrap();
        drop(layer);
        assert!(compare_copy(&disk, seed) == before, "seed {seed}");
    }
}
