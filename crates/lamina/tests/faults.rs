//! Faults of storage and operators: a flipped bit in data, a block written to the wrong location, a second owner.
//! Damaged data gives an error, and all other data stays intact.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use testkit::nbd::{Client, EIO, Failure};
use testkit::process::Store;
use testkit::{pattern, process};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

/// A datastore with a disk whose blocks are distinguishable; the server is stopped.
fn store_with_data(options: &str) -> Store {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    let mut server = store.serve(options);
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    for block in 0..BLOCKS {
        client.write(block * BLOCK as u64, &pattern::bytes(block, BLOCK)).unwrap();
    }
    client.flush().unwrap();
    store.run("snapshot create vm1@a").ok();
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store
}

/// Location of a block's content: (data file, byte offset).
fn find(store: &Store, block: u64) -> (PathBuf, u64) {
    let content = pattern::bytes(block, BLOCK);
    for name in process::files(&store.path()).into_iter().filter(|name| name.starts_with("data.0")) {
        let path = store.path().join(name);
        let bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.chunks_exact(BLOCK).position(|chunk| chunk == content) {
            return (path, (at * BLOCK) as u64);
        }
    }
    panic!("block {block} is not on the medium as it was written");
}

fn write_medium(path: &PathBuf, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

/// The kernel sends SIGXFSZ to a process that writes beyond its limit of file sizes.
#[test]
fn a_limit_of_file_sizes_fails_requests_and_ends_no_server() {
    let store = Store::new();
    store.run("disk create vm1 256M").ok();
    let mut server = store.serve("");
    let limit = |bytes: &str| {
        process::tool("prlimit", &["--pid", &server.pid().to_string(), &format!("--fsize={bytes}:")]);
    };
    limit("80000000");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    let refused = (0..250).any(|at| {
        let written = client.write(at << 20, &pattern::bytes(at, 1 << 20)).and_then(|()| client.flush());
        written.is_err()
    });
    assert!(refused, "no request met the limit");
    limit("unlimited");
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.run("check").ok();
}

/// Reads every block separately. Damaged blocks must give errors, and all others their content.
fn verify(store: &Store, export: &str, damaged: &[u64]) {
    let mut client = Client::connect(&store.socket(), export).unwrap();
    for block in 0..BLOCKS {
        match client.read(block * BLOCK as u64, BLOCK as u32) {
            Ok(content) => {
                assert!(!damaged.contains(&block), "{export}: block {block} is damaged and was sent to a client");
                assert!(content == pattern::bytes(block, BLOCK), "{export}: block {block}");
            }
            Err(Failure::Errno(EIO)) => assert!(damaged.contains(&block), "{export}: block {block} is good"),
            Err(failure) => panic!("{export}: block {block}: {failure:?}"),
        }
    }
    // A read that includes a damaged block fails completely, with EIO.
    let all = client.read(0, (BLOCKS as usize * BLOCK) as u32);
    assert_eq!(matches!(all, Err(Failure::Errno(EIO))), !damaged.is_empty());
}

#[test]
fn a_flipped_bit_in_data_makes_one_block_unreadable() {
    for options in ["", "--io direct", "--queue threads"] {
        let store = store_with_data(options);
        let (path, offset) = find(&store, 17);
        let mut content = pattern::bytes(17, BLOCK);
        content[1234] ^= 0x10;
        write_medium(&path, offset, &content);

        let done = store.run("check --data");
        assert_eq!(done.code, 6, "{done:?}");
        assert!(done.stdout.contains("'vm1' at offset 69632"), "the disk and the place are named: {done:?}");
        assert!(done.stdout.contains("'vm1@a' at offset 69632"), "the snapshot is named: {done:?}");
        assert_eq!(store.run("check").code, 0, "metadata is sound");

        let mut server = store.serve(options);
        verify(&store, "vm1", &[17]);
        verify(&store, "vm1@a", &[17]);
        assert!(store.run("status --json").json()["checksum_errors"].as_u64().unwrap() > 0);
        let served = store.run("check --data");
        assert_eq!((served.code, served.stdout.contains("'vm1' at offset 69632")), (6, true), "{served:?}");
        // A damaged block cannot be copied or written in part, because the rest of its content is unknown.
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        assert!(matches!(client.write(17 * BLOCK as u64 + 512, &[1; 512]), Err(Failure::Errno(EIO))));
        let copy = store.run("clone vm1 copy --full");
        assert_eq!(copy.code, 6, "{copy:?}");
        store.run("disk show copy").fails(3, "copy");
        // After the whole block was overwritten, it is valid again.
        client.write(17 * BLOCK as u64, &pattern::bytes(17, BLOCK)).unwrap();
        client.flush().unwrap();
        verify(&store, "vm1", &[]);
        verify(&store, "vm1@a", &[17]);
        drop(client);
        // Deleting the snapshot removes the damaged block.
        store.run("snapshot delete vm1@a").ok();
        store.is_clean();
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}

#[test]
fn exchanged_blocks_are_detected() {
    let store = store_with_data("");
    let (path, offset) = find(&store, 3);
    let (other, other_offset) = find(&store, 40);
    write_medium(&path, offset, &pattern::bytes(40, BLOCK));
    write_medium(&other, other_offset, &pattern::bytes(3, BLOCK));
    // Zeros replace data, as if the file had a hole: these zeros must be detected too.
    let (lost, lost_offset) = find(&store, 50);
    write_medium(&lost, lost_offset, &[0; BLOCK]);
    let _server = store.serve("");
    verify(&store, "vm1", &[3, 40, 50]);
    assert_eq!(store.run("check --data").code, 6);
}

#[test]
fn a_second_owner_is_refused_and_does_no_harm() {
    let store = store_with_data("");
    let mut server = store.serve("");
    for _ in 0..3 {
        store.run("serve").fails(4, "");
        assert!(process::files(&store.path()).contains(&"control.sock".to_string()));
        // The first owner is not affected.
        verify(&store, "vm1", &[]);
    }
    // Another path to the same folder is the same datastore.
    let link = store.path().with_file_name("link");
    std::os::unix::fs::symlink(store.path(), &link).unwrap();
    process::run(&format!("serve {}", link.display())).fails(4, "");
    verify(&store, "vm1", &[]);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
