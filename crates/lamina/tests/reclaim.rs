//! `lamina disk reclaim` through the program: disks with file systems that their own tools made, used and check.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use testkit::Random;
use testkit::nbd::Client;
use testkit::process::{Store, tool};

const MIB: u64 = 1 << 20;
/// Places and lengths of the partitions, in bytes.
const EXT: (u64, u64) = (MIB, 96 * MIB);
const SWAP: (u64, u64) = (97 * MIB, 8 * MIB);
const XFS: (u64, u64) = (105 * MIB, 320 * MIB);
const CAPACITY: u64 = 448 * MIB;

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Files of random content; those with an even number are deleted later.
fn tree(folder: &Path) -> String {
    let tree = folder.join("tree");
    std::fs::create_dir(&tree).unwrap();
    let mut random = Random::new(5);
    for number in 0..16 {
        std::fs::write(tree.join(format!("f{number}")), random.bytes(MIB as usize)).unwrap();
    }
    text(&tree)
}

/// Copies an image into another one, without its zeros.
fn put(whole: &File, image: &Path, at: u64) {
    let bytes = std::fs::read(image).unwrap();
    for (index, chunk) in bytes.chunks(65_536).enumerate() {
        if chunk.iter().any(|byte| *byte != 0) {
            whole.write_all_at(chunk, at + index as u64 * 65_536).unwrap();
        }
    }
}

/// A disk with an MBR and partitions of ext4, swap space and XFS.
fn disk(folder: &Path) -> String {
    let tree = tree(folder);
    let ext = folder.join("ext");
    tool("mke2fs", &["-q", "-F", "-t", "ext4", "-d", &tree, &text(&ext), "96M"]);
    for number in (0..16).step_by(2) {
        tool("debugfs", &["-w", "-R", &format!("rm f{number}"), &text(&ext)]);
    }
    let xfs = folder.join("xfs");
    File::create(&xfs).unwrap().set_len(XFS.1).unwrap();
    let mut files = String::from("/dev/null\n0 0\nd--755 0 0\n");
    (0..16).for_each(|number| files.push_str(&format!("f{number} ---644 0 0 {tree}/f{number}\n")));
    files.push_str("$\n");
    let prototype = folder.join("prototype");
    std::fs::write(&prototype, files).unwrap();
    tool("mkfs.xfs", &["-q", "-f", "-p", &text(&prototype), &text(&xfs)]);

    let image = folder.join("disk");
    let whole = File::create(&image).unwrap();
    whole.set_len(CAPACITY).unwrap();
    let mut mbr = vec![0; 512];
    mbr[510..].copy_from_slice(&[0x55, 0xAA]);
    for (index, (start, length)) in [EXT, SWAP, XFS].into_iter().enumerate() {
        let at = 446 + index * 16;
        mbr[at + 4] = 0x83;
        mbr[at + 8..at + 12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        mbr[at + 12..at + 16].copy_from_slice(&((length / 512) as u32).to_le_bytes());
    }
    whole.write_all_at(&mbr, 0).unwrap();
    put(&whole, &ext, EXT.0);
    put(&whole, &xfs, XFS.0);
    let mut swap = vec![7; SWAP.1 as usize];
    swap[4086..4096].copy_from_slice(b"SWAPSPACE2");
    swap[MIB as usize..2 * MIB as usize].fill(0);
    whole.write_all_at(&swap, SWAP.0).unwrap();
    text(&image)
}

/// Writes a disk by a client, with its zeros as data in the partitions, so that free space is mapped.
fn fill(store: &Store, name: &str, image: &str) {
    let mut client = Client::connect(&store.socket(), name).unwrap();
    let file = File::open(image).unwrap();
    let mut piece = vec![0; MIB as usize];
    for at in (0..CAPACITY).step_by(MIB as usize) {
        file.read_exact_at(&mut piece, at).unwrap();
        client.write(at, &piece).unwrap();
    }
    client.flush().unwrap();
}

fn read_back(store: &Store, name: &str, image: &Path) {
    let mut client = Client::connect(&store.socket(), name).unwrap();
    let file = File::create(image).unwrap();
    for at in (0..CAPACITY).step_by(MIB as usize) {
        file.write_all_at(&client.read(at, MIB as u32).unwrap(), at).unwrap();
    }
}

fn part(image: &Path, (start, length): (u64, u64), to: &Path) -> String {
    let mut bytes = vec![0; length as usize];
    File::open(image).unwrap().read_exact_at(&mut bytes, start).unwrap();
    std::fs::write(to, bytes).unwrap();
    text(to)
}

fn contents(report: &Value) -> Vec<(u64, String, String)> {
    let parts = report["parts"].as_array().unwrap().iter().filter(|part| !part["partition"].is_null());
    parts
        .map(|part| {
            let word = |name: &str| part[name].as_str().unwrap_or_default().to_owned();
            (part["partition"].as_u64().unwrap(), word("content"), word("method"))
        })
        .collect()
}

#[test]
fn what_the_guest_does_not_use_is_given_back_and_its_files_stay() {
    let folder = tempfile::tempdir().unwrap();
    let image = disk(folder.path());
    let store = Store::new();
    store.run(&format!("disk create vm {CAPACITY}")).ok();
    let mut server = store.serve("");
    fill(&store, "vm", &image);
    let blocks = || store.run("disk show vm --json").json()["blocks_allocated"].as_u64().unwrap() * 4096;

    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    client.read(0, 512).unwrap();
    store.run("disk reclaim vm").fails(4, "in use by");
    store.run("disk reclaim vm --dry-run").fails(4, "in use by");
    drop(client);
    let before = blocks();
    let would = store.run("disk reclaim vm --dry-run --json").json();
    assert_eq!(blocks(), before);
    assert_eq!(would["dry_run"], true);
    let expected = [(1, "ext4", "free_map"), (2, "swap space", "zeros"), (3, "xfs", "free_map")];
    let expected = expected.map(|(number, content, method)| (number, content.to_owned(), method.to_owned()));
    assert_eq!(contents(&would), expected);
    let of = |report: &Value, number: u64, member: &str| {
        let parts = report["parts"].as_array().unwrap();
        parts.iter().find(|part| part["partition"] == number).unwrap()[member].as_u64().unwrap()
    };
    // All of the disk is mapped, so whatever is free can be given back, but for parts of blocks at its ends.
    let free = of(&would, 1, "free");
    assert!(free > 40 * MIB && of(&would, 1, "reclaimed").abs_diff(free) < MIB, "{would}");
    assert!(of(&would, 3, "free") > 200 * MIB);
    assert_eq!(of(&would, 2, "reclaimed"), MIB);
    store.run("disk create flat 1M --provisioning zeroedthick").ok();
    let all = store.run("disk reclaim --all --dry-run --json").json();
    let [flat, vm] = &all["disks"].as_array().unwrap()[..] else { panic!("{all}") };
    assert!(flat["error"].as_str().unwrap().contains("is thick") && flat["report"].is_null(), "{all}");
    assert!(vm["error"].is_null() && vm["report"] == would, "{all}");
    let client = Client::connect(&store.socket(), "vm").unwrap();
    let shown = store.run("disk reclaim --all --dry-run").ok();
    assert!(shown.contains("vm: not examined: ") && shown.contains("flat: not examined: "), "{shown}");
    drop(client);
    store.run("disk reclaim --all").fails(2, "--dry-run");
    let shown = store.run("disk reclaim vm --dry-run").ok();
    assert!(shown.contains("swap space") && shown.contains("nothing was changed"), "{shown}");

    store.run("snapshot create vm@before").ok();
    let did = store.run("disk reclaim vm --json").json();
    assert_eq!(did["reclaimed"], would["reclaimed"]);
    assert_eq!(did["snapshots"], 1);
    assert_eq!(blocks(), before - did["reclaimed"].as_u64().unwrap());
    let again = store.run("disk reclaim vm").ok();
    assert!(again.contains("gave back 0 B") && again.contains("1 snapshot"), "{again}");

    let back = folder.path().join("back");
    read_back(&store, "vm", &back);
    let ext = part(&back, EXT, &folder.path().join("ext-back"));
    tool("e2fsck", &["-fn", &ext]);
    let xfs = part(&back, XFS, &folder.path().join("xfs-back"));
    tool("xfs_repair", &["-n", &xfs]);
    for number in (1..16).step_by(2) {
        let out = folder.path().join("out");
        tool("debugfs", &["-R", &format!("dump f{number} {}", text(&out)), &ext]);
        let expected = std::fs::read(folder.path().join(format!("tree/f{number}"))).unwrap();
        assert!(std::fs::read(&out).unwrap() == expected, "f{number}");
    }
    let swap = |image: &Path| std::fs::read(part(image, SWAP, &folder.path().join("swap"))).unwrap();
    assert!(swap(&back) == swap(Path::new(&image)), "the swap space reads as before");
    read_back(&store, "vm@before", &back);
    assert!(std::fs::read(&back).unwrap() == std::fs::read(&image).unwrap(), "the snapshot is unchanged");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_file_system_in_a_partition_of_another_type_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let image = disk(folder.path());
    // FreeBSD, and the only partition of a dynamic disk of Windows.
    for (index, kind) in [(0, 0xA5), (2, 0x42)] {
        File::options().write(true).open(&image).unwrap().write_all_at(&[kind], 446 + index * 16 + 4).unwrap();
    }
    let store = Store::new();
    store.run(&format!("disk import {image} vm --from raw")).ok();
    let report = store.run("disk reclaim vm --dry-run --json").json();
    let expected = [(1, "ext4", "zeros"), (2, "swap space", "zeros"), (3, "xfs", "zeros")];
    let expected = expected.map(|(number, content, method)| (number, content.to_owned(), method.to_owned()));
    assert_eq!(contents(&report), expected);
    let parts = report["parts"].as_array().unwrap();
    let reason = |number: u64| parts.iter().find(|part| part["partition"] == number).unwrap()["reason"].to_string();
    assert!(reason(1).contains("0xa5") && reason(3).contains("0x42"), "{report}");
    store.is_clean();
}

#[test]
fn a_file_system_that_is_not_clean_is_named_and_only_its_zeros_are_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let tree = tree(folder.path());
    let image = text(&folder.path().join("image"));
    tool("mke2fs", &["-q", "-F", "-t", "ext4", "-d", &tree, &image, "64M"]);
    tool("debugfs", &["-w", "-R", "feature needs_recovery", &image]);
    let store = Store::new();
    // Without a server, the command opens the datastore itself.
    store.run(&format!("disk import {image} vm --from raw")).ok();
    let report = store.run("disk reclaim vm --json").json();
    let part = &report["parts"][0];
    assert_eq!((part["content"].as_str(), part["method"].as_str()), (Some("ext2/3/4"), Some("zeros")), "{report}");
    assert!(part["reason"].as_str().unwrap().contains("recovery"), "{report}");
    let shown = store.run("disk reclaim vm").ok();
    assert!(shown.contains("no free map is used: it was not cleanly unmounted"), "{shown}");
    store.run("disk reclaim other").fails(3, "no disk 'other'");
    store.is_clean();
}
