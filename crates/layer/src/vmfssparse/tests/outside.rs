//! Interoperation: QEMU reads what lamina writes, and lamina reads what QEMU writes.

use super::*;
use crate::model::Random;
use backend::Directory;
use backend::local::{LocalDirectory, LocalQueues};
use std::path::Path;
use std::process::Command;
use work::NoProgress;

fn run(program: &str, arguments: &[&str], folder: &Path) -> String {
    let output = Command::new(program).args(arguments).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

fn delta_descriptor(sectors: u64, number: u32, id: u32, parent: &str, parent_id: u32) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID={id:08x}\nparentCID={parent_id:08x}\n\
         isNativeSnapshot=\"no\"\ncreateType=\"vmfsSparse\"\nparentFileNameHint=\"{parent}\"\n# Extent description\n\
         RW {sectors} VMFSSPARSE \"vm-{number:06}-delta.vmdk\"\n\n# The Disk Data Base \n#DDB\n\n"
    )
}

fn base_descriptor(sectors: u64) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=00000001\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\n\
         # Extent description\nRW {sectors} VMFS \"vm-flat.vmdk\"\n\n# The Disk Data Base \n#DDB\n\n\
         ddb.adapterType = \"lsilogic\"\nddb.virtualHWVersion = \"8\"\n"
    )
}

/// QEMU reads the content of the model from a chain of redo logs over a flat base.
#[test]
fn qemu_reads_chains_with_the_same_content() {
    for (sectors, levels) in [(8195, 2), (3 * 4096, 1), (15_000, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let mut random = Random::new(sectors);
        let mut disk = vec![0u8; sectors as usize * 512];
        for byte in disk.iter_mut().step_by(97) {
            *byte = random.next() as u8;
        }
        std::fs::write(folder.path().join("vm-flat.vmdk"), &disk).unwrap();
        std::fs::write(folder.path().join("vm.vmdk"), base_descriptor(sectors)).unwrap();
        let mut parent = "vm.vmdk".to_owned();
        for level in 1..=levels {
            let file = directory.create(&format!("vm-{level:06}-delta.vmdk"), IoMode::Buffered).unwrap();
            create(Arc::clone(&file), "delta", &CreateOptions::new(sectors * SECTOR)).unwrap();
            let layer = VmfsSparse::open(file, &OpenOptions::writing("delta")).unwrap();
            for _ in 0..200 {
                let lba = random.below(sectors);
                let count = (1 + random.below(70)).min(sectors - lba);
                let range = (lba * SECTOR) as usize..((lba + count) * SECTOR) as usize;
                if random.below(5) == 0 {
                    layer.zero(range.start as u64..range.end as u64, false).unwrap();
                    disk[range].fill(0);
                } else {
                    let bytes: Vec<u8> = (0..range.len()).map(|_| random.next() as u8).collect();
                    layer.write(range.start as u64, &[&bytes]).unwrap();
                    disk[range].copy_from_slice(&bytes);
                }
            }
            let tail = sectors - (sectors / 2)..sectors;
            if level == 2 {
                // Long zeros over the parent, stored as a hole of the file.
                layer.zero(tail.start * SECTOR..tail.end * SECTOR, false).unwrap();
                disk[(tail.start * SECTOR) as usize..].fill(0);
            }
            layer.shrink(&NoProgress).unwrap();
            layer.close().unwrap();
            let name = format!("vm-{level:06}.vmdk");
            let text = delta_descriptor(sectors, level, level + 1, &parent, level);
            std::fs::write(folder.path().join(&name), text).unwrap();
            parent = name;
        }
        run("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", &parent, "out.raw"], folder.path());
        let out = std::fs::read(folder.path().join("out.raw")).unwrap();
        assert!(out == disk, "{sectors} sectors, {levels} levels");
        run("qemu-img", &["check", "-f", "vmdk", &parent], folder.path());
    }
}

/// QEMU appends grains to existing tables without updating the header.
#[test]
fn lamina_reads_an_image_written_by_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let sectors = 3 * 4096;
    std::fs::write(folder.path().join("vm-flat.vmdk"), vec![0x11; sectors as usize * 512]).unwrap();
    std::fs::write(folder.path().join("vm.vmdk"), base_descriptor(sectors)).unwrap();
    std::fs::write(folder.path().join("vm-000001.vmdk"), delta_descriptor(sectors, 1, 2, "vm.vmdk", 1)).unwrap();
    let file = directory.create("vm-000001-delta.vmdk", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "delta", &CreateOptions::new(sectors * SECTOR)).unwrap();
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("delta")).unwrap();
    for table in 0..3u64 {
        layer.write(table * 4096 * SECTOR, &[&[0x22; 4096]]).unwrap();
    }
    layer.close().unwrap();
    run("qemu-io", &["-f", "vmdk", "-c", "write -P 0x33 64k 192k", "vm-000001.vmdk"], folder.path());
    // QEMU gave the descriptor a new CID, which does not matter here: the test opens only the extent.
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("delta")).unwrap();
    assert_eq!(layer.header().free_sector() * SECTOR, 8 * SECTOR + 3 * (16384 + 4096));
    let mut extents = Vec::new();
    layer.map(65536..65536 * 4, usize::MAX, &mut extents).unwrap();
    for extent in &extents {
        let Content::Data { offset, .. } = extent.content else { panic!("{extent:?}") };
        let mut bytes = vec![0; extent.length as usize];
        layer.file.read_at(&mut bytes, offset).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0x33));
    }
    layer.write(1 << 20, &[&[0x44; 65536]]).unwrap();
    layer.close().unwrap();
    assert_eq!(layer.check().unwrap().problems, Vec::<String>::new());
    for pattern in ["read -P 0x22 0 4k", "read -P 0x11 4k 60k", "read -P 0x33 64k 192k", "read -P 0x44 1M 64k"] {
        let said = run("qemu-io", &["-r", "-f", "vmdk", "-c", pattern, "vm-000001.vmdk"], folder.path());
        assert!(!said.contains("verification failed"), "{pattern}: {said}");
    }
}
