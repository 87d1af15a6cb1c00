//! Another program fills the file system while a datastore is not served. The datastore can nevertheless be served and
//! flushed, and its disks can be discarded and deleted. When space is available again, writes succeed.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use testkit::mounted::{fill_with_names, make_room};
use testkit::nbd::{Client, Command, ENOSPC, Failure};
use testkit::process::{Store, until};
use testkit::{mounted, pattern};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 512;

/// The first server of a datastore starts on a file system that was filled since the datastore was made.
fn served_first(folder: &Path) {
    let store = Store::at(folder, "4M");
    fill_with_names(folder, "rest");
    assert_eq!(store.serve("").stop("TERM"), Some(0));
    fill_with_names(folder, "rest-again");
    assert_eq!(store.serve("").stop("TERM"), Some(0));
}

#[test]
fn a_new_datastore_is_served_on_a_full_xfs() {
    mounted::on_xfs("a_new_datastore_is_served_on_a_full_xfs", served_first);
}

#[test]
fn a_new_datastore_is_served_on_a_full_btrfs() {
    mounted::on_btrfs("a_new_datastore_is_served_on_a_full_btrfs", served_first);
}

#[test]
fn filled_ext4() {
    mounted::on_ext4("filled_ext4", filled);
}

#[test]
fn filled_xfs() {
    mounted::on_xfs("filled_xfs", filled);
}

#[test]
fn filled_btrfs() {
    mounted::on_btrfs("filled_btrfs", filled);
}

#[test]
fn filled_mixed_btrfs() {
    mounted::on_mixed_btrfs("filled_mixed_btrfs", filled);
}

#[test]
fn filled_quota_of_btrfs() {
    mounted::on_btrfs_quota("filled_quota_of_btrfs", filled);
}

#[test]
fn filled_tmpfs() {
    mounted::on_tmpfs("filled_tmpfs", 96, filled);
}

/// On a file system with blocks of 1 KiB, data written through the page cache has holes within blocks of 4 KiB. With
/// direct I/O these blocks are written completely.
#[test]
fn overwrites_of_parts_of_blocks() {
    mounted::on_ext4("overwrites_of_parts_of_blocks", |folder| {
        let store = Store::at(folder, "4M");
        let formats = [("thin", "vmdk"), ("cowd", "vmfssparse"), ("se", "sesparse"), ("hosted", "monolithicsparse")];
        for (name, format) in formats {
            store.run(&format!("disk create {name} 16M --format {format}")).ok();
        }
        const SECTOR: u64 = 512;
        let written = [1, 2, 7, 11, 8 * 7 + 3, 8 * 2000 + 5];
        let write = |name: &str, round: u64| {
            let mut client = Client::connect(&store.socket(), name).unwrap();
            for sector in written {
                let content = pattern::bytes(sector + round, SECTOR as usize);
                client.write(sector * SECTOR, &content).unwrap_or_else(|e| panic!("{name}: sector {sector}: {e:?}"));
            }
            client.flush().unwrap();
        };
        let read = |name: &str, round: u64| {
            let mut client = Client::connect(&store.socket(), name).unwrap();
            let found = client.read(0, (8 * 2001 * SECTOR) as u32).unwrap();
            for (sector, found) in (0..).zip(found.chunks_exact(SECTOR as usize)) {
                let content = match written.contains(&sector) {
                    true => pattern::bytes(sector + round, SECTOR as usize),
                    false => vec![0; SECTOR as usize],
                };
                assert!(found == content, "{name}: sector {sector}");
            }
        };
        let mut server = store.serve("");
        formats.iter().for_each(|(name, _)| write(name, 0));
        assert_eq!(server.stop("TERM"), Some(0));
        fill_with_names(folder, "rest-1");
        let mut server = store.serve("--io direct");
        fill_with_names(folder, "rest-2");
        formats.iter().for_each(|(name, _)| write(name, 1 << 20));
        formats.iter().for_each(|(name, _)| read(name, 1 << 20));
        assert_eq!(server.stop("KILL"), None);
        let mut server = store.serve("");
        formats.iter().for_each(|(name, _)| read(name, 1 << 20));
        assert_eq!(server.stop("TERM"), Some(0));
    });
}

#[test]
fn zeros_over_written_blocks_on_xfs() {
    mounted::on_xfs("zeros_over_written_blocks_on_xfs", zeros_over_written_blocks);
}

#[test]
fn zeros_over_written_blocks_on_ext4() {
    mounted::on_ext4("zeros_over_written_blocks_on_ext4", zeros_over_written_blocks);
}

/// A server that starts on a full file system can overwrite data with zeros, in every writable format.
fn zeros_over_written_blocks(folder: &Path) {
    let formats = ["thin", "vmfssparse", "sesparse", "vsansparse", "monolithicsparse"];
    let store = Store::at(folder, "4M");
    store.run("disk create native 16M").ok();
    for format in formats {
        store.run(&format!("disk create {format} 16M --format {format}")).ok();
    }
    let all = || formats.into_iter().chain(["native"]);
    let written = [3, 4, 5, 700, 701, 2048];
    let mut server = store.serve("");
    for name in all() {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        written.into_iter().for_each(|block| client.write(block * BLOCK, &content(block, 0)).unwrap());
        client.flush().unwrap();
    }
    assert_eq!(server.stop("TERM"), Some(0));
    fill_with_names(folder, "rest");
    let mut server = store.serve("");
    fill_with_names(folder, "rest-again");
    for name in all() {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        for (first, blocks) in [(3, 2), (700, 2), (2048, 1)] {
            let (offset, length) = (first * BLOCK, (blocks * BLOCK) as u32);
            let zero = Command::Zero { offset, length, fua: false };
            let done = client.submit(zero).and_then(|_| client.complete()).unwrap().1;
            assert!(done.is_ok(), "{name}: zeros over block {first}: {done:?}");
            assert!(client.read(offset, length).unwrap().iter().all(|byte| *byte == 0), "{name}: block {first}");
        }
        client.flush().unwrap();
        assert!(client.read(5 * BLOCK, BLOCK as u32).unwrap() == content(5, 0), "{name}");
    }
    assert_eq!(server.stop("TERM"), Some(0));
    make_room(folder, "rest");
    store.is_clean();
}

fn content(block: u64, round: u64) -> Vec<u8> {
    pattern::bytes(block * 8 + round, BLOCK as usize)
}

fn filled(folder: &Path) {
    let store = Store::at(folder, "4M");
    let disks = ["native", "images"];
    store.run("disk create native 64M").ok();
    store.run("disk create images 64M --format vmdk").ok();
    // The folders of these disks have so many names that XFS needs another block for the next name, and a deletion
    // creates a name.
    let tight = ["x", "xx", "xxx"];
    for name in tight {
        store.run(&format!("disk create {name} 8M --format vmfssparse")).ok();
        store.run(&format!("snapshot create {name}@a")).ok();
        store.run(&format!("snapshot create {name}@b")).ok();
    }
    for name in ["native", "images"] {
        store.run(&format!("disk create spare-{name} 8M{}", if name == "images" { " --format vmdk" } else { "" })).ok();
    }
    let mut server = store.serve("");
    for name in disks.into_iter().chain(["spare-native", "spare-images"]) {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        (0..BLOCKS).for_each(|block| client.write(block * BLOCK, &content(block, 0)).unwrap());
        client.flush().unwrap();
    }
    assert_eq!(server.stop("TERM"), Some(0));
    for (round, signal) in (1..).zip(["TERM", "KILL", "TERM"]) {
        fill_with_names(folder, &format!("rest-{round}"));
        // The datastore can be served, and requests that need no space succeed.
        let mut server = store.serve("");
        for name in disks {
            let mut client = Client::connect(&store.socket(), name).unwrap();
            for block in 0..BLOCKS {
                assert!(
                    client.read(block * BLOCK, BLOCK as u32).unwrap() == content(block, round - 1),
                    "{name} {block}"
                );
                client.write(block * BLOCK, &content(block, round)).unwrap_or_else(|e| panic!("{name}: {e:?}"));
            }
            client.flush().unwrap();
            client.trim((BLOCKS + 64) * BLOCK, BLOCK as u32).unwrap();
        }
        store.run("status").ok();
        server.stop(signal);
    }
    // Deletions succeed too, with and without a server.
    store.run("disk delete spare-native").ok();
    fill_with_names(folder, "rest-4");
    let mut server = store.serve("");
    store.run("disk delete spare-images").ok();
    for name in tight {
        fill_with_names(folder, &format!("rest-4-{name}"));
        store.run(&format!("disk delete {name}")).ok();
    }
    for name in disks {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        for block in 0..BLOCKS {
            assert!(client.read(block * BLOCK, BLOCK as u32).unwrap() == content(block, 3), "{name} {block}");
        }
    }
    // When space is available again, all requests succeed.
    make_room(folder, "rest-");
    for name in disks {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        until("there is space again", || match client.write(3000 * BLOCK, &content(1, 1)) {
            Ok(()) => true,
            Err(Failure::Errno(ENOSPC)) => false,
            Err(failure) => panic!("{failure:?}"),
        });
        client.flush().unwrap();
    }
    if mounted::is_btrfs(folder) {
        let kept = store.path().join("reserve");
        until("what is kept back is there again", || std::fs::read_dir(&kept).unwrap().count() == 32);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
