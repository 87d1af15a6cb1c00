//! `disk optimize` beside clients, between other operations, with a killed server and on a full file system: no content
//! changes, and the figures of `--space` are right.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use testkit::Random;
use testkit::authority::authority;
use testkit::mounted::{leave, make_room, on_tmpfs};
use testkit::nbd::{Client, ENOSPC, Failure};
use testkit::pattern;
use testkit::process::{Store, run, until};

const BLOCK: usize = 4096;
const SIZE: usize = 16 << 20;
const BLOCKS: u64 = (SIZE / BLOCK) as u64;

/// The content of a disk: a seed for each block; 0 for zeros.
#[derive(Clone)]
struct Content(Vec<u64>);

/// A block of which half can be compressed, and one of nine blocks not at all.
fn block(seed: u64) -> Vec<u8> {
    match seed {
        0 => vec![0; BLOCK],
        _ if seed.is_multiple_of(9) => pattern::bytes(seed, BLOCK),
        _ => {
            let mut bytes = pattern::bytes(seed, BLOCK / 2);
            bytes.resize(BLOCK, seed as u8);
            bytes
        }
    }
}

impl Content {
    fn new() -> Self {
        Self(vec![0; BLOCKS as usize])
    }

    fn bytes(&self, blocks: std::ops::Range<u64>) -> Vec<u8> {
        self.0[blocks.start as usize..blocks.end as usize].iter().flat_map(|seed| block(*seed)).collect()
    }

    fn write(&mut self, client: &mut Client, random: &mut Random, blocks: std::ops::Range<u64>) {
        self.try_write(client, random, blocks).unwrap();
    }

    fn try_write(
        &mut self,
        client: &mut Client,
        random: &mut Random,
        blocks: std::ops::Range<u64>,
    ) -> Result<(), Failure> {
        let seeds: Vec<u64> = blocks.clone().map(|_| random.next().max(1)).collect();
        let bytes: Vec<u8> = seeds.iter().flat_map(|seed| block(*seed)).collect();
        client.write(blocks.start * BLOCK as u64, &bytes)?;
        self.0[blocks.start as usize..blocks.end as usize].copy_from_slice(&seeds);
        Ok(())
    }

    fn trim(&mut self, client: &mut Client, blocks: std::ops::Range<u64>) {
        let length = (blocks.end - blocks.start) as usize * BLOCK;
        client.trim(blocks.start * BLOCK as u64, length as u32).unwrap();
        self.0[blocks.start as usize..blocks.end as usize].fill(0);
    }

    /// Compares the content with that of an export of the running server.
    #[track_caller]
    fn is(&self, store: &Store, export: &str) {
        let found = Client::connect(&store.socket(), export).unwrap().read_all().unwrap();
        self.equals(&found, export);
    }

    #[track_caller]
    fn equals(&self, found: &[u8], what: &str) {
        assert!(found.len() >= SIZE, "{what}");
        for (number, (found, seed)) in found.chunks_exact(BLOCK).zip(&self.0).enumerate() {
            assert!(found == block(*seed), "{what}: block {number}");
        }
    }
}

fn number(of: &Value, member: &str) -> u64 {
    of[member].as_u64().unwrap_or_else(|| panic!("{member} of {of}"))
}

/// A random range of a few blocks.
fn range(random: &mut Random) -> std::ops::Range<u64> {
    let start = random.below(BLOCKS - 16);
    let limit = if random.once_in(4) { 16 } else { 2 };
    start..start + 1 + random.below(limit)
}

/// A disk of which most blocks are written.
fn fill(store: &Store, disk: &str, random: &mut Random) -> Content {
    store.run(&format!("disk create {disk} {SIZE}")).ok();
    let mut client = Client::connect(&store.socket(), disk).unwrap();
    let mut content = Content::new();
    (0..BLOCKS - 64).step_by(64).for_each(|at| content.write(&mut client, random, at..at + 64));
    client.flush().unwrap();
    content
}

fn space(store: &Store, disk: &str) -> Value {
    store.run(&format!("disk show {disk} --space --json")).json()["disks"][0].clone()
}

#[test]
fn a_disk_is_compressed_while_a_client_writes_and_reads_it() {
    let store = Store::new();
    let mut server = store.serve("");
    let mut random = Random(1);
    let content = fill(&store, "vm", &mut random);
    let stop = AtomicBool::new(false);
    let content = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let (mut random, mut content) = (Random(2), content.clone());
            let mut client = Client::connect(&store.socket(), "vm").unwrap();
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) || rounds < 500 {
                let changed = range(&mut random);
                if random.once_in(10) {
                    content.trim(&mut client, changed);
                } else {
                    content.write(&mut client, &mut random, changed);
                }
                let read = range(&mut random);
                let length = (read.end - read.start) as usize * BLOCK;
                let found = client.read(read.start * BLOCK as u64, length as u32).unwrap();
                assert!(found == content.bytes(read.clone()), "blocks {read:?}");
                if random.once_in(50) {
                    client.flush().unwrap();
                }
                rounds += 1;
            }
            content
        });
        for (round, compression) in ["lz4", "zstd", "lz4", "zstd:7"].iter().enumerate() {
            store.run(&format!("disk optimize vm --compression {compression}")).ok();
            store.run(&format!("snapshot create vm@s{round}")).ok();
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    content.is(&store, "vm");
    let said = store.run("disk optimize vm").ok();
    let figures = space(&store, "vm");
    assert!(number(&figures, "packed") > number(&figures, "mapped") / 2, "{said}{figures}");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    let _server = store.serve("");
    content.is(&store, "vm");
}

#[test]
fn operations_on_compressed_disks_keep_their_content() {
    let (store, beside) = (Store::new(), tempfile::tempdir().unwrap());
    let mut server = store.serve("");
    let mut random = Random(3);
    let mut vm = fill(&store, "vm", &mut random);
    let optimize = |disk: &str| store.run(&format!("disk optimize {disk} --compression zstd")).ok();
    let said = optimize("vm");
    assert!(said.contains("compressed to"), "{said}");
    let figures = space(&store, "vm");
    let [mapped, stored, packed, packs] = ["mapped", "stored", "packed", "packs"].map(|name| number(&figures, name));
    assert!(packed > mapped / 2 && packs < packed * 3 / 4, "{figures}");
    assert_eq!((mapped, stored), ((SIZE - 64 * BLOCK) as u64, mapped - packed + packs), "{figures}");
    assert_eq!(figures["compression"].as_f64().unwrap(), (packed * 100 / packs) as f64 / 100.0, "{figures}");
    assert!(store.run("disk list --space").ok().contains("COMPRESSED"));
    let reduction = &figures["reduction"];
    let of = |member: &str| number(reduction, member);
    assert_eq!((of("within_disks"), of("mapped") + of("packing_loss") - of("compression")), (0, stored), "{reduction}");
    // All packs are examined. Each loses its index and the rest of its last block.
    assert_eq!((of("packs_examined"), of("packs") * 32 * BLOCK as u64 >= packed), (of("packs"), true), "{reduction}");
    assert!((of("packs") * 16..packs / 10).contains(&of("packing_loss")), "{reduction}");

    // Snapshots, and what has changed since.
    store.run("snapshot create vm@one").ok();
    let one = vm.clone();
    let repository = beside.path().join("backups");
    let repository = repository.to_str().unwrap();
    store.run(&format!("backup create vm@one {repository}")).ok();
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    // Most of each of the first windows is overwritten, so that its pack is packed again once the snapshot is gone.
    (0..1024).step_by(32).for_each(|at| vm.write(&mut client, &mut random, at..at + 20));
    vm.trim(&mut client, 2048..2048 + 100);
    client.flush().unwrap();
    store.run("snapshot create vm@two").ok();
    let two = vm.clone();
    optimize("vm");
    let made = store.run(&format!("backup create vm@two {repository} --json")).json();
    assert_eq!((number(&made, "data"), made["based_on"].as_str()), (32 * 20 * BLOCK as u64, Some("one")), "{made}");
    store.run(&format!("backup restore {repository} restored --backup vm@two")).ok();
    two.is(&store, "restored");

    // Clones share packs.
    store.run("clone vm@one clone").ok();
    let mut clone = one.clone();
    let mut other = Client::connect(&store.socket(), "clone").unwrap();
    (0..1024).step_by(32).for_each(|at| clone.write(&mut other, &mut random, at + 2..at + 30));
    other.flush().unwrap();
    optimize("clone");
    for (content, export) in [(&vm, "vm"), (&one, "vm@one"), (&two, "vm@two"), (&clone, "clone")] {
        content.is(&store, export);
    }
    drop((client, other));
    // Without the snapshot, few blocks of the first packs are in use.
    store.run("disk detach clone").ok();
    store.run("snapshot delete vm@one").ok();
    until("the deleted snapshot is dropped", || {
        let before = number(&space(&store, "vm"), "packs");
        optimize("vm");
        number(&space(&store, "vm"), "packs") < before
    });
    for (content, export) in [(&vm, "vm"), (&two, "vm@two"), (&clone, "clone")] {
        content.is(&store, export);
    }

    store.run(&format!("disk resize vm {}", 2 * SIZE)).ok();
    vm.is(&store, "vm");
    store.run("snapshot revert vm@two").ok();
    two.is(&store, "vm");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    for (content, disk) in [(&two, "vm"), (&clone, "clone")] {
        let file = beside.path().join(format!("{disk}.raw"));
        let done = run(&format!("salvage {} --disk {disk} --to {}", store.path().display(), file.display()));
        assert_eq!(done.code, 0, "{done:?}");
        content.equals(&std::fs::read(&file).unwrap(), disk);
    }
}

#[test]
fn a_compressed_disk_is_sent_and_then_its_changes() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let keys = beside.path().join("keys");
    authority(&keys);
    let file = |name: &str| keys.join(name).display().to_string();
    let ca = file("ca-cert.pem");
    let pair = |of: &str| {
        let [certificate, key] = ["cert", "key"].map(|kind| file(&format!("{of}-{kind}.pem")));
        format!("--tls-cert {certificate} --tls-key {key}")
    };
    let receiving = there.serve(&format!(
        "--json --receive 127.0.0.1:0 --receive-from localhost {} --tls-client-ca {ca}",
        pair("server")
    ));
    let ready: Value = serde_json::from_str(&receiving.ready).unwrap();
    let to = ready["receive"].as_str().unwrap();
    let _server = here.serve("");
    let mut random = Random(6);
    let mut vm = fill(&here, "vm", &mut random);
    here.run("disk optimize vm").ok();
    let send =
        || here.run(&format!("--json disk send vm {to}copy --incremental --tls-ca {ca} {}", pair("client"))).json();
    send();
    vm.is(&there, "copy");
    // Packs change on both sides, and only what was written counts as changed.
    there.run("disk optimize copy --compression zstd").ok();
    let mut client = Client::connect(&here.socket(), "vm").unwrap();
    (0..1024).step_by(32).for_each(|at| vm.write(&mut client, &mut random, at..at + 1));
    client.flush().unwrap();
    here.run("disk optimize vm").ok();
    let sent = send();
    assert_eq!(number(&sent, "incremental"), 1);
    assert!(number(&sent, "data") < SIZE as u64 / 4, "{sent}");
    vm.is(&there, "copy");
}

#[test]
fn a_server_that_is_killed_during_compression_loses_nothing() {
    let store = Store::new();
    let mut random = Random(4);
    let mut server = store.serve("");
    let mut content = fill(&store, "vm", &mut random);
    store.run("snapshot create vm@s").ok();
    let snapshot = content.clone();
    for round in 0..6 {
        let mut client = Client::connect(&store.socket(), "vm").unwrap();
        for _ in 0..200 {
            let changed = range(&mut random);
            content.write(&mut client, &mut random, changed);
        }
        client.flush().unwrap();
        drop(client);
        let mut command = store.command("disk optimize vm");
        let mut optimize = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + 30 * round));
        server.kill();
        let _ = optimize.wait();
        if round % 2 == 0 {
            store.is_clean();
        }
        server = store.serve("");
        content.is(&store, "vm");
        snapshot.is(&store, "vm@s");
    }
    store.run("disk optimize vm").ok();
    content.is(&store, "vm");
    snapshot.is(&store, "vm@s");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn compression_on_a_full_file_system_loses_nothing() {
    on_tmpfs("compression_on_a_full_file_system_loses_nothing", 64, on_full);
}

fn on_full(folder: &Path) {
    let store = Store::at(folder, "4M");
    let mut random = Random(5);
    let mut server = store.serve("");
    let mut vm = fill(&store, "vm", &mut random);
    let mut other = fill(&store, "other", &mut random);
    leave(folder, "rest", 64 << 10);
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    let is_full = |outcome: Result<(), Failure>| match outcome {
        Ok(()) => false,
        Err(Failure::Errno(ENOSPC)) => true,
        Err(failure) => panic!("{failure:?}"),
    };
    store.run("snapshot create vm@s").ok();
    let snapshot = vm.clone();
    // Overwrites of blocks that the snapshot shares use all free blocks. A refused write may have a part of its effect,
    // so each is of one block, which is not compared if it is refused.
    let full = (0..BLOCKS - 64).find(|at| is_full(vm.try_write(&mut client, &mut random, *at..*at + 1))).unwrap();
    client.flush().unwrap();
    drop(client);
    // There may be no space for a pack.
    let done = store.run("disk optimize other");
    assert!(done.code == 0 || done.stderr.contains("is full"), "{done:?}");
    let compare = |vm: &Content, other: &Content| {
        other.is(&store, "other");
        snapshot.is(&store, "vm@s");
        let mut client = Client::connect(&store.socket(), "vm").unwrap();
        let found = client.read_all().unwrap();
        for at in (0..BLOCKS).filter(|at| *at != full) {
            assert!(found[at as usize * BLOCK..][..BLOCK] == vm.bytes(at..at + 1), "block {at}");
        }
    };
    compare(&vm, &other);
    // With space for a few packs, the pass gains more.
    make_room(folder, "rest");
    leave(folder, "rest", 4 << 20);
    store.run("disk optimize other").ok();
    store.run("disk optimize vm").ok();
    compare(&vm, &other);
    // The compressed data gives space for writes.
    let mut client = Client::connect(&store.socket(), "other").unwrap();
    (0..512).for_each(|at| other.write(&mut client, &mut random, at..at + 1));
    client.flush().unwrap();
    drop(client);
    compare(&vm, &other);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
