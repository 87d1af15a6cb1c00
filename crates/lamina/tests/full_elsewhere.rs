//! Another program fills the file system while a datastore is at rest: it is served, flushed, discarded and deleted
//! from all the same, and goes on by itself when there is room again.

#![allow(clippy::unwrap_used)]

mod mounted;
mod nbd;
mod pattern;
mod process;

use mounted::{fill_with_names, make_room};
use nbd::{Client, ENOSPC, Failure};
use process::{Store, until};
use std::path::Path;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 512;

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
fn filled_tmpfs() {
    mounted::on_tmpfs("filled_tmpfs", 96, filled);
}

fn content(block: u64, round: u64) -> Vec<u8> {
    pattern::bytes(block * 8 + round, BLOCK as usize)
}

fn filled(folder: &Path) {
    let store = Store::at(folder, "4M");
    let disks = ["native", "images"];
    store.run("disk create native 64M").ok();
    store.run("disk create images 64M --format vmdk").ok();
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
        // It is served, and what needs no room goes on.
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
    // Deletions too, by a server and without one.
    store.run("disk delete spare-native").ok();
    fill_with_names(folder, "rest-4");
    let mut server = store.serve("");
    store.run("disk delete spare-images").ok();
    for name in disks {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        for block in 0..BLOCKS {
            assert!(client.read(block * BLOCK, BLOCK as u32).unwrap() == content(block, 3), "{name} {block}");
        }
    }
    // With room again everything goes on.
    make_room(folder, "rest-");
    for name in disks {
        let mut client = Client::connect(&store.socket(), name).unwrap();
        until("there is room again", || match client.write(3000 * BLOCK, &content(1, 1)) {
            Ok(()) => true,
            Err(Failure::Errno(ENOSPC)) => false,
            Err(failure) => panic!("{failure:?}"),
        });
        client.flush().unwrap();
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
