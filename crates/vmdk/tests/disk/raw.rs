//! Disks with a raw base: other programs open such a disk by the path of its head, and guest data at the beginning of
//! the base never decides its format.

use crate::world::{Random, local, options, read, scratch};
use chain::Chain;
use layer::descriptor::Adapter;
use layer::image::{ImageKind, OpenOptions, Place, open_chain};
use std::path::Path;
use std::sync::Arc;
use vmdk::{DeltaFormat, Disk, NewDisk, NewSnapshot};
use work::NoProgress;

const CAPACITY: usize = 1 << 20;

fn raw_disk(folder: &Path) -> Arc<Disk> {
    let new = NewDisk {
        name: "vm".to_owned(),
        capacity: CAPACITY as u64,
        kind: ImageKind::Raw,
        delta: Some(DeltaFormat::SeSparse),
        adapter: Adapter::LsiLogic,
    };
    Disk::create(local(folder), &new, &options(1), &NoProgress).unwrap()
}

/// The content as another program reads it, if that program finds the disk by its folder and not by lamina's record.
fn by_path(disk: &Disk, folder: &Path) -> Vec<u8> {
    disk.chain().unwrap().flush().unwrap();
    let record = disk.record();
    let head = &record.nodes.iter().find(|node| node.id == record.head).unwrap().descriptor;
    let opened = open_chain(Place::local(&folder.join(head), &[]).unwrap(), &OpenOptions::default()).unwrap();
    let reading = chain::Options { read_only: true, ..chain::Options::default() };
    read(&Chain::open("by path", opened.layers(), reading).unwrap())
}

fn scribble(disk: &Disk, content: &mut [u8], random: &mut Random) {
    let chain = disk.chain().unwrap();
    for _ in 0..5 {
        let start = 4096 + random.below(CAPACITY as u64 - 24_096) as usize;
        random.fill(&mut content[start..start + 20_000]);
        chain.write(start as u64, &content[start..start + 20_000]).unwrap();
    }
}

#[test]
fn a_chain_on_a_raw_base_opens_by_its_path_after_merges() {
    let folder = scratch();
    let disk = raw_disk(folder.path());
    let (mut content, mut random) = (vec![0; CAPACITY], Random::new(3));
    for name in ["a", "b", "c"] {
        scribble(&disk, &mut content, &mut random);
        disk.snapshot(&NewSnapshot::named(name)).unwrap();
        assert!(by_path(&disk, folder.path()) == content, "{name}");
    }
    scribble(&disk, &mut content, &mut random);
    for name in ["a", "c"] {
        disk.delete_snapshot(name, None, &NoProgress).unwrap();
        assert!(by_path(&disk, folder.path()) == content, "without {name}");
    }
    let before = read(&disk.snapshot_chain("b").unwrap());
    disk.revert("b").unwrap();
    assert!(by_path(&disk, folder.path()) == before);
}

#[test]
fn guest_data_that_resembles_a_descriptor_is_not_parsed() {
    let folder = scratch();
    let disk = raw_disk(folder.path());
    std::fs::write(folder.path().join("other.bin"), b"another's").unwrap();
    let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                createType=\"streamOptimized\"\nRW 2048 VMFS \"other.bin\"\n";
    let (mut content, mut random) = (vec![0; CAPACITY], Random::new(5));
    content[..text.len()].copy_from_slice(text.as_bytes());
    disk.chain().unwrap().write(0, text.as_bytes()).unwrap();
    for name in ["a", "b"] {
        scribble(&disk, &mut content, &mut random);
        disk.snapshot(&NewSnapshot::named(name)).unwrap();
    }
    assert!(by_path(&disk, folder.path()) == content);
    assert!(disk.info().unwrap().files.iter().all(|file| !file.path.ends_with("other.bin")));
    disk.delete_snapshot("a", None, &NoProgress).unwrap();
    disk.delete_snapshot("b", None, &NoProgress).unwrap();
    disk.consolidate(&NoProgress).unwrap();
    assert_eq!(disk.info().unwrap().levels, 1, "the delta can be merged into its raw base");
    assert!(read(&disk.chain().unwrap()) == content);
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(folder.path()), &options(2)).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
    disk.delete().unwrap();
    assert_eq!(std::fs::read(folder.path().join("other.bin")).unwrap(), b"another's");
}
