//! A full file system: what needs room is refused, everything else goes on, and it recovers by itself.
//!
//! The datastore lies on a file system of its own that is really full: a tmpfs in a mount namespace that this test
//! makes by running itself under `unshare`, which needs no root where user namespaces are allowed; and, for root, an
//! ext4 on a loop device as well, since reservations and holes differ between the two. Nothing is left mounted: the
//! mounts go with the namespace.

#![allow(clippy::unwrap_used)]

mod nbd;
mod pattern;
mod process;

use nbd::{Client, ENOSPC, Failure};
use pattern::Random;
use process::{Store, tool, until};
use std::path::{Path, PathBuf};
use std::process::Command;

const BLOCK: u64 = 4096;
/// Says to the inner run where its small file system is.
const INSIDE: &str = "LAMINA_TEST_FULL";

/// Runs one test of this file again with `script` before it, in a mount namespace.
fn in_a_namespace(test: &str, unshare: &[&str], script: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let script = format!("set -e; {script}; exec \"$0\" --exact {test} --nocapture");
    let status = Command::new("unshare")
        .args(unshare)
        .args(["sh", "-c", &script])
        .arg(program)
        .env("FOLDER", folder.path())
        .env(INSIDE, folder.path().join("mounted"))
        .status()
        .unwrap_or_else(|e| panic!("unshare: {e}; the tests need it"));
    assert!(status.success(), "the run on a file system of its own failed");
}

/// Runs a test again, by its name, on a tmpfs that is soon full.
fn on_tmpfs(test: &str, fill_up: fn(&Path)) {
    match std::env::var_os(INSIDE) {
        Some(folder) => fill_up(&PathBuf::from(folder)),
        None => in_a_namespace(
            test,
            &["--user", "--map-root-user", "--mount"],
            "mkdir $FOLDER/mounted; mount -t tmpfs -o size=96M none $FOLDER/mounted",
        ),
    }
}

/// The same on an ext4 in a file.
fn on_ext4(test: &str, fill_up: fn(&Path)) {
    match std::env::var_os(INSIDE) {
        Some(folder) => fill_up(&PathBuf::from(folder)),
        // Only root may mount a file system with a medium; what others can do is the test on tmpfs.
        None if tool("id", &["-u"]).trim() != "0" => println!("not root: the run on tmpfs has to do"),
        None => in_a_namespace(
            test,
            &["--mount"],
            "mkdir $FOLDER/mounted; truncate -s 96M $FOLDER/image; mke2fs -q -t ext4 -m 0 $FOLDER/image; \
             mount -o loop $FOLDER/image $FOLDER/mounted",
        ),
    }
}

#[test]
fn full_tmpfs() {
    on_tmpfs("full_tmpfs", fill_up);
}

#[test]
fn full_ext4() {
    on_ext4("full_ext4", fill_up);
}

#[test]
fn full_tmpfs_of_images() {
    on_tmpfs("full_tmpfs_of_images", fill_images_up);
}

#[test]
fn full_ext4_of_images() {
    on_ext4("full_ext4_of_images", fill_images_up);
}

/// What a disk must read as, by block: the seed of its content.
#[derive(Default)]
struct Written(std::collections::BTreeMap<u64, u64>);

impl Written {
    fn put(&mut self, client: &mut Client, block: u64, seed: u64) -> Result<(), Failure> {
        client.write(block * BLOCK, &pattern::bytes(seed, BLOCK as usize))?;
        self.0.insert(block, seed);
        Ok(())
    }

    fn verify(&self, client: &mut Client) {
        for (block, seed) in &self.0 {
            let found = client.read(block * BLOCK, BLOCK as u32).unwrap();
            assert!(found == pattern::bytes(*seed, BLOCK as usize), "block {block}");
        }
    }
}

fn is_full(outcome: Result<(), Failure>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(Failure::Errno(ENOSPC)) => true,
        Err(failure) => panic!("{failure:?}"),
    }
}

/// Writes new blocks until there is no room; how many there was room for.
fn fill(client: &mut Client, written: &mut Written, random: &mut Random) -> u64 {
    let mut count = 0;
    for _ in 0..1 << 16 {
        let block = random.below(client.size / BLOCK);
        let full = match written.0.contains_key(&block) {
            true => continue,
            false => is_full(written.put(client, block, random.next())),
        };
        if full {
            return count;
        }
        count += 1;
        // A burst goes into memory; only what has been flushed was promised room on the medium.
        if count % 512 == 0 && is_full(client.flush()) {
            panic!("acknowledged writes found no room");
        }
    }
    panic!("it never gets full");
}

fn fill_up(folder: &Path) {
    let store = Store::at(folder, "4M");
    let mut random = Random(77);
    store.run("disk create vm1 1G").ok();
    store.run("disk create vm2 1G").ok();
    store.run("disk create thick 16M --provisioning zeroedthick").ok();
    let mut server = store.serve("");
    let mut vm1 = Client::connect(&store.socket(), "vm1").unwrap();
    let mut vm2 = Client::connect(&store.socket(), "vm2").unwrap();
    let (mut written, mut other) = (Written::default(), Written::default());
    for block in 0..2048 {
        other.put(&mut vm2, block, block).unwrap();
    }
    let count = fill(&mut vm1, &mut written, &mut random);
    println!("full after {count} blocks");
    assert!(count > 4096, "{count} blocks fit into 96 MiB");

    // What needs no new room goes on.
    vm1.flush().unwrap();
    written.verify(&mut vm1);
    let known: Vec<u64> = written.0.keys().copied().collect();
    for _ in 0..2000 {
        let block = known[random.below(known.len() as u64) as usize];
        written.put(&mut vm1, block, random.next()).unwrap();
    }
    vm1.flush().unwrap();
    let mut thick = Client::connect(&store.socket(), "thick").unwrap();
    let mut whole = Written::default();
    for block in 0..thick.size / BLOCK {
        whole.put(&mut thick, block, block + 1).unwrap_or_else(|e| panic!("a thick disk has its room: {e:?}"));
    }
    thick.flush().unwrap();
    assert!(is_full(written.put(&mut vm1, 1 << 17, 1)), "it is still full");
    store.run("disk create large 512M --provisioning zeroedthick").fails(5, "large");
    store.run("disk show large").fails(3, "large");
    assert!(store.run("disk list").ok().contains("vm2"));
    store.run("status").ok();

    // Full, and killed: it opens, and everything is there.
    drop((vm1, vm2, thick));
    assert_eq!(server.stop("KILL"), None);
    store.is_clean();
    let mut server = store.serve("");
    let mut vm1 = Client::connect(&store.socket(), "vm1").unwrap();
    let mut vm2 = Client::connect(&store.socket(), "vm2").unwrap();
    let mut thick = Client::connect(&store.socket(), "thick").unwrap();
    written.verify(&mut vm1);
    other.verify(&mut vm2);
    whole.verify(&mut thick);

    // Discards make room, without anybody doing anything else.
    let given: Vec<u64> = written.0.keys().copied().step_by(2).collect();
    for block in &given {
        vm1.trim(block * BLOCK, BLOCK as u32).unwrap();
        written.0.remove(block);
    }
    vm1.flush().unwrap();
    until("discarded room can be written", || {
        let block = (1 << 17) + random.below(1 << 16);
        written.0.contains_key(&block) || !is_full(written.put(&mut vm1, block, block))
    });
    let again = fill(&mut vm1, &mut written, &mut random);
    println!("full again after {again} blocks, {} were discarded", given.len());
    assert!(again > given.len() as u64 / 2, "most of what was discarded can be used again");

    // So do deletions.
    drop(vm2);
    store.run("disk delete vm2").ok();
    until("room of a deleted disk can be written", || {
        let block = (1 << 17) + (1 << 16) + random.below(1 << 15);
        written.0.contains_key(&block) || !is_full(written.put(&mut vm1, block, block))
    });
    vm1.flush().unwrap();
    written.verify(&mut vm1);
    whole.verify(&mut thick);
    drop((vm1, thick));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    let mut server = store.serve("");
    written.verify(&mut Client::connect(&store.socket(), "vm1").unwrap());
    assert_eq!(server.stop("TERM"), Some(0));
}

/// Takes what is left of a file system, to the last block.
fn fill_rest(folder: &Path, name: &str) {
    let mut rest = std::fs::File::create(folder.join(name)).unwrap();
    for length in [1 << 20, 4096, 1] {
        while std::io::Write::write_all(&mut rest, &vec![1; length]).is_ok() && rest.sync_all().is_ok() {}
    }
}

fn fill_images_up(folder: &Path) {
    let store = Store::at(folder, "4M");
    store.run("disk create vm1 256M --format vmdk").ok();
    store.run("disk create native 16M").ok();
    for name in ["other", "cold", "last"] {
        store.run(&format!("disk create {name} 8M --format eagerzeroedthick")).ok();
        store.run(&format!("snapshot create {name}@s")).ok();
    }
    store.run("clone last@s copy").ok();
    let mut server = store.serve("");
    let mut vm1 = Client::connect(&store.socket(), "vm1").unwrap();
    let mut written = Written::default();
    for block in 0..512 {
        written.put(&mut vm1, block, block + 1).unwrap();
    }
    vm1.flush().unwrap();
    store.run("snapshot create vm1@s").ok();
    // What was refused may be there or not: only blocks that hold nothing yet.
    let mut next = 512;
    let mut more = |vm1: &mut Client, written: &mut Written| {
        next += 3;
        is_full(written.put(vm1, next, next))
    };
    while !more(&mut vm1, &mut written) {}
    fill_rest(folder, "rest-1");

    // What needs room is refused and leaves nothing behind; what gives it back is done.
    written.verify(&mut vm1);
    let images = store.path().join("images");
    store.run("clone vm1@s full --full").fails(5, "full");
    assert!(!images.join("full").exists());
    store.run("disk list").ok();
    for name in ["copy", "native"] {
        store.run(&format!("disk delete {name}")).ok();
        fill_rest(folder, &format!("rest-{name}"));
    }
    store.run("snapshot delete other@s").ok();
    fill_rest(folder, "rest-2");
    store.run("disk delete other").ok();
    assert!(!images.join("other").exists());
    until("room of a deleted disk can be written", || !more(&mut vm1, &mut written));
    vm1.flush().unwrap();
    written.verify(&mut vm1);
    drop(vm1);

    // Without a server, and after a kill, too.
    assert_eq!(server.stop("KILL"), None);
    fill_rest(folder, "rest-3");
    store.run("disk delete cold").ok();
    fill_rest(folder, "rest-4");
    store.run("disk delete last").ok();
    assert!(!images.join("cold").exists() && !images.join("last").exists());
    store.is_clean();
    let mut server = store.serve("");
    written.verify(&mut Client::connect(&store.socket(), "vm1").unwrap());
    assert_eq!(server.stop("TERM"), Some(0));
}
