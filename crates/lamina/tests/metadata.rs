//! Damaged metadata: in every metadata file of a closed datastore and of a killed one, bits are flipped, pages zeroed
//! or swapped, files truncated. Not all damage can be repaired, but no wrong data may be returned: each sector has its
//! flushed content or gives an error, also after further writes and after `check --repair`.
//!
//! Damage to the last batch of the journal is indistinguishable from an interrupted write, so the test checks only data
//! flushed before that batch.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use testkit::Random;
use testkit::nbd::{Client, EIO, Failure};
use testkit::pattern::SECTOR;
use testkit::process::{Done, Serving, Store, lamina, run};
use testkit::{pattern, process};

const FILES: [&str; 9] =
    ["superblock", "journal", "checkpoint", "map", "map.table", "map.summary", "data.table", "data.summary", "catalog"];
const PAGE: u64 = 4096;
const CAPACITY: u64 = 12 << 20;
const READ: usize = 64 << 10;

/// Expected content of each export.
type Contents = BTreeMap<String, Vec<u8>>;

/// Three disks and a snapshot. In the end the server is closed or killed.
fn build(killed: bool) -> (Store, Contents) {
    let store = Store::at(&std::env::temp_dir(), "4M");
    for disk in ["vm1", "vm2", "scratch"] {
        store.run(&format!("disk create {disk} {CAPACITY}")).ok();
    }
    let mut contents = Contents::new();
    let mut random = Random(4242);
    let mut server = store.serve("");
    let mut clients = ["vm1", "vm2"].map(|disk| Client::connect(&store.socket(), disk).unwrap());
    let mut images = [vec![0; CAPACITY as usize], vec![0; CAPACITY as usize]];
    // More writes than the journal ring can contain, so that the ring has wrapped around.
    for round in 0..1200 {
        for (client, image) in clients.iter_mut().zip(&mut images) {
            let length = if round % 16 == 0 { 64 << 10 } else { SECTOR << random.below(5) };
            let offset = random.below((CAPACITY as usize - length) as u64 / 512) as usize * 512;
            let data = pattern::bytes(random.next(), length);
            client.write(offset as u64, &data).unwrap();
            image[offset..offset + length].copy_from_slice(&data);
            if round % 8 == 0 {
                client.flush().unwrap();
            }
        }
        if round == 600 {
            store.run("snapshot create vm1@middle vm2@middle").ok();
            contents.insert("vm1@middle".into(), images[0].clone());
            contents.insert("vm2@middle".into(), images[1].clone());
            store.run("clone vm1@middle twin").ok();
            contents.insert("twin".into(), images[0].clone());
        }
    }
    clients.iter_mut().for_each(|client| client.flush().unwrap());
    let [vm1, vm2] = images;
    contents.insert("vm1".into(), vm1);
    contents.insert("vm2".into(), vm2);
    // Damage in the last batches of the journal cannot be detected, so these batches contain only writes to another
    // disk.
    let mut scratch = Client::connect(&store.socket(), "scratch").unwrap();
    for _ in 0..3 {
        scratch.write(0, &[1; 4096]).unwrap();
        scratch.flush().unwrap();
    }
    assert_eq!(server.stop(if killed { "KILL" } else { "TERM" }), if killed { None } else { Some(0) });
    (store, contents)
}

fn copy_of(store: &Store, folder: &Path) -> PathBuf {
    let copy = folder.join("copy");
    let (from, to) = (store.path().display().to_string(), copy.display().to_string());
    process::tool("cp", &["-r", "--sparse=always", &from, &to]);
    for socket in ["nbd.sock", "control.sock"] {
        let _ = std::fs::remove_file(copy.join(socket));
    }
    copy
}

/// Damages a file in a random way; returns a description.
fn damage(path: &Path, random: &mut Random) -> String {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    let pages = (length / PAGE).max(1);
    let mut page = [0; PAGE as usize];
    // Most pages of most files are empty, so the function searches for a page that is used.
    let mut used = 0;
    for _ in 0..256 {
        used = random.below(pages);
        let count = file.read_at(&mut page, used * PAGE).unwrap();
        if page[..count].iter().any(|&byte| byte != 0) {
            break;
        }
    }
    match random.below(8) {
        0 => {
            let length = random.below(length + 1);
            file.set_len(length).unwrap();
            format!("cut to {length} bytes")
        }
        1 => {
            file.set_len(0).unwrap();
            "cut to nothing".into()
        }
        2 => {
            file.write_all_at(&[0; PAGE as usize], used * PAGE).unwrap();
            format!("page {used} zeroed")
        }
        3 => {
            let to = random.below(pages);
            file.write_all_at(&page, to * PAGE).unwrap();
            format!("page {used} written over page {to}")
        }
        4 => {
            file.write_all_at(&pattern::bytes(random.next(), PAGE as usize), used * PAGE).unwrap();
            format!("page {used} overwritten with noise")
        }
        _ => {
            let bits: Vec<u64> = (0..=random.below(3)).map(|_| random.below(PAGE * 8)).collect();
            bits.iter().for_each(|bit| page[(bit / 8) as usize] ^= 1 << (bit % 8));
            file.write_all_at(&page, used * PAGE).unwrap();
            format!("bits {bits:?} of page {used} flipped")
        }
    }
}

/// Serves a damaged datastore, if it can be opened.
fn try_serve(path: &Path, log: &Path) -> Option<Serving> {
    let mut command = lamina();
    command.arg("serve").arg(path).stdout(Stdio::null());
    let probe = run(&format!("status -D {}", path.display()));
    assert!(!probe.stderr.contains("panicked"), "{probe:?}");
    std::fs::write(log, &probe.stderr).unwrap();
    (probe.code == 0).then(|| Serving::start(command))
}

/// Checks that each sector has its content or gives an error. Returns the number of sectors with errors.
fn verify(socket: &Path, contents: &Contents, what: &str) -> usize {
    let mut errors = 0;
    for (export, image) in contents {
        // A disk that cannot be opened counts as errors for all its sectors.
        let Ok(mut client) = Client::connect(socket, export) else {
            errors += image.len() / SECTOR;
            continue;
        };
        for offset in (0..image.len()).step_by(READ) {
            match client.read(offset as u64, READ as u32) {
                Ok(found) => assert!(found == image[offset..offset + READ], "{what}: {export} near {offset} is wrong"),
                Err(Failure::Errno(_)) => {
                    for at in (offset..offset + READ).step_by(4096) {
                        match client.read(at as u64, 4096) {
                            Ok(found) => assert!(found == image[at..at + 4096], "{what}: {export} at {at} is wrong"),
                            Err(Failure::Errno(EIO)) => errors += 8,
                            Err(failure) => panic!("{what}: {export} at {at}: {failure:?}"),
                        }
                    }
                }
                Err(failure) => panic!("{what}: {export} at {offset}: {failure:?}"),
            }
        }
    }
    errors
}

/// Writes new data to the scratch disk. The writes must not affect the other disks, even if damaged metadata says that
/// blocks of these disks are free.
fn write_scratch(socket: &Path) {
    let Ok(mut client) = Client::connect(socket, "scratch") else { return };
    for at in 0..64 {
        match client.write((at * 64) << 10, &[at as u8; 64 << 10]) {
            Ok(()) | Err(Failure::Errno(_)) => {}
            Err(failure) => panic!("{failure:?}"),
        }
    }
    let _ = client.flush();
}

/// Damages each metadata file of a datastore that was closed or killed in eight ways.
fn damaged_metadata_is_not_used(killed: bool) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let (mut cases, mut opened, mut noticed, mut repaired) = (0, 0, 0, 0);
    let (store, contents) = build(killed);
    for file in FILES {
        for seed in 0..8 {
            let mut random = Random(seed * 31 + file.len() as u64);
            let copy = copy_of(&store, folder.path());
            let what = format!("{file}, {}: {}", if killed { "killed" } else { "closed" }, {
                damage(&copy.join(file), &mut random)
            });
            let mut errors = 0;
            for _ in 0..2 {
                if let Some(mut server) = try_serve(&copy, &log) {
                    opened += 1;
                    let socket = copy.join("nbd.sock");
                    errors += verify(&socket, &contents, &what);
                    write_scratch(&socket);
                    errors += verify(&socket, &contents, &format!("{what}; then written to"));
                    // If the server cannot write back its metadata, it must report this failure when it stops.
                    let end = server.stop("TERM");
                    assert!(matches!(end, Some(0 | 1 | 6)), "{what}: {end:?}");
                    errors += usize::from(end != Some(0));
                } else {
                    let said = std::fs::read_to_string(&log).unwrap();
                    // The log may also have messages from before.
                    assert!(said.lines().last().unwrap_or_default().starts_with("lamina: "), "{what}: {said}");
                    errors += 1;
                }
                let check: Done = run(&format!("check --repair -D {}", copy.display()));
                assert!(matches!(check.code, 0 | 1 | 6), "{what}: {check:?}");
                assert!(!check.stderr.contains("panicked"), "{what}: {check:?}");
                repaired += usize::from(check.stdout.contains("repaired: "));
            }
            cases += 1;
            noticed += usize::from(errors > 0);
            std::fs::remove_dir_all(&copy).unwrap();
        }
    }
    println!("{cases} damages, opened {opened} times of {}, {noticed} noticed, {repaired} repairs", 2 * cases);
    assert!(noticed > cases / 4 && opened > cases / 4, "all damages have no effect, or all prevent the opening");
}

#[test]
fn damaged_metadata_of_a_closed_datastore_is_detected_and_not_used() {
    damaged_metadata_is_not_used(false);
}

#[test]
fn damaged_metadata_of_a_killed_datastore_is_detected_and_not_used() {
    damaged_metadata_is_not_used(true);
}

/// A simple bitwise CRC32C.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

#[test]
fn another_format_version_is_refused_and_named() {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    let path = store.path().join("superblock");
    let original = std::fs::read(&path).unwrap();
    let mut changed = original.clone();
    for copy in changed.chunks_exact_mut(4096).filter(|copy| copy[..8] == *b"LAMINADS") {
        copy[8..12].copy_from_slice(&77u32.to_le_bytes());
        copy[12..16].fill(0);
        let sum = crc32c(copy);
        copy[12..16].copy_from_slice(&sum.to_le_bytes());
    }
    std::fs::write(&path, &changed).unwrap();
    for verb in ["status", "check --repair", "disk list", "serve", "disk create vm2 1M"] {
        store.run(verb).fails(1, "version 77");
    }
    assert!(std::fs::read(&path).unwrap() == changed, "nothing was written to a datastore of an unknown version");
    std::fs::write(&path, &original).unwrap();
    store.is_clean();
}

#[test]
fn one_valid_copy_of_the_superblock_is_enough() {
    for killed in [false, true] {
        let (store, contents) = build(killed);
        let folder = tempfile::tempdir().unwrap();
        for copy_number in 0..2 {
            let copy = copy_of(&store, folder.path());
            let file = File::options().write(true).open(copy.join("superblock")).unwrap();
            file.write_all_at(&[0xff; 512], copy_number * PAGE).unwrap();
            // The older copy may refer to a part of the journal that was overwritten since. Then the store must not use
            // the copy.
            match try_serve(&copy, &folder.path().join("log")) {
                Some(mut server) => {
                    let errors = verify(&copy.join("nbd.sock"), &contents, &format!("copy {copy_number} lost"));
                    assert_eq!((errors, server.stop("TERM")), (0, Some(0)));
                }
                None => {
                    let done = run(&format!("status -D {}", copy.display()));
                    // The log reports the damaged copy first, then the error.
                    assert_eq!((done.code, done.stdout.as_str()), (6, ""), "{done:?}");
                    let error = done.stderr.lines().last();
                    assert!(error.is_some_and(|line| line.starts_with("lamina: ")), "{done:?}");
                }
            }
            std::fs::remove_dir_all(&copy).unwrap();
        }
    }
}

#[test]
fn a_page_of_zeros_under_data_is_one_line_and_a_repair_counts_what_stays_unreadable() {
    let store = Store::new();
    store.run("disk create vm1 8M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    client.write(0, &pattern::bytes(7, 6 << 20)).unwrap();
    client.flush().unwrap();
    drop(client);
    store.run("snapshot create vm1@monday").ok();
    assert_eq!(server.stop("TERM"), Some(0));
    let zero = |name: &str, page: u64| {
        let file = File::options().write(true).open(store.path().join(name)).unwrap();
        file.write_all_at(&[0; PAGE as usize], page * PAGE).unwrap();
    };
    zero("data.table", 1);
    // The images of the last checkpoint may have the page.
    zero("checkpoint", 0);
    let found = store.run("check");
    let lines: Vec<&str> = found.stdout.lines().collect();
    let [page, _, count] = lines[..] else { panic!("{found:?}") };
    assert!(page.starts_with("page 1 of data.table is damaged.") && page.contains("disk 'vm1' bytes"), "{page}");
    assert!(page.contains("snapshot 'vm1@monday' bytes"), "{page}");
    assert_eq!((found.code, count), (6, "1 problem, 0 repaired"));
    let repaired = store.run("check --repair");
    let lines: Vec<&str> = repaired.stdout.lines().collect();
    let [page, blocks, _, count] = lines[..] else { panic!("{repaired:?}") };
    assert!(page.ends_with("; repaired: recounted from the trees"), "{page}");
    assert_eq!(
        blocks,
        "the checksums of 508 data blocks between 508 and 1015 are lost, and nothing proves the content of these \
         blocks, so reads of them fail: blocks of 4 KiB: 508 of disk 'vm1', 508 of snapshot 'vm1@monday'; write them \
         again, or restore them from a backup"
    );
    assert_eq!((repaired.code, count), (6, "2 problems, 1 repaired"));
}
