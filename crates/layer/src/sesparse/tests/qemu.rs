//! What we write, as QEMU reads it: an SEsparse delta over a flat base, byte for byte.

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
        let stamp = if random.one_in(3) { 0 } else { random.next() };
        let data = stamped(count, stamp);
        match stamp {
            0 => layer.zero(at..at + count * GRAIN, random.one_in(2)).unwrap(),
            _ => layer.write(at, &[&data]).unwrap(),
        }
        expected[at as usize..at as usize + data.len()].copy_from_slice(&data);
        if step == 120 {
            layer.wipe(true, full_pace()).unwrap();
            layer.shrink(full_pace()).unwrap();
        }
    }
    if !capacity.is_multiple_of(GRAIN) {
        let start = capacity / GRAIN * GRAIN;
        let data = stamped(1, random.next());
        layer.write(start, &[&data[..(capacity - start) as usize]]).unwrap();
        expected[start as usize..].copy_from_slice(&data[..(capacity - start) as usize]);
    }
    // As after a crash, and closed.
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
    // Every extent of ours, as QEMU maps it.
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
fn qemu_reads_what_we_write() {
    for (seed, capacity) in [(1, 100 * MIB), (2, 64 * MIB), (3, 33 * MIB + 65_536)] {
        history(seed, capacity, IoMode::Buffered);
    }
    history(4, 48 * MIB, IoMode::Direct);
}

#[test]
fn qemu_reads_a_disk_beyond_two_tebibytes() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let capacity = 5 << 40;
    descriptors(folder.path(), capacity / 512);
    directory.create("vm-flat.vmdk", IoMode::Buffered).unwrap().set_len(capacity).unwrap();
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let layer = SeSparse::create(file, NAME, capacity, writing()).unwrap();
    let last = capacity - 4 * GRAIN;
    layer.write(last, &[&stamped(4, 0x1111_1111_1111_1111)]).unwrap();
    layer.close().unwrap();
    let output = Command::new("qemu-io")
        .args([
            "-r",
            "-f",
            "vmdk",
            "-c",
            &format!("read -P 0x11 {last} 16k"),
            "-c",
            "read -P 0 3T 64k",
            "vm-000001.vmdk",
        ])
        .current_dir(folder.path())
        .output()
        .expect("qemu-io is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("verification failed"), "{text}");
}
