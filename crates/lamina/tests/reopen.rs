//! A disk in a VMware format stops after a failed flush, reports the failure, and continues after `lamina disk reopen`
//! with its client connected. Other disks are not affected.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use testkit::nbd::{Client, EIO, Failure};
use testkit::process::{Store, tool, until};
use testkit::{mounted, pattern};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 600;
/// A block far from the blocks whose content the failed flush makes uncertain.
const FAR: u64 = 2048;

fn content(block: u64, round: u64) -> Vec<u8> {
    pattern::bytes(block * 8 + round, BLOCK as usize)
}

#[test]
fn a_stopped_disk_is_reopened_under_its_client() {
    mounted::on_failing_writes("a_stopped_disk_is_reopened_under_its_client", stops_and_goes_on);
}

fn stops_and_goes_on(medium: &Path, trigger: &Path) {
    for format in ["vmdk", "sesparse"] {
        let store = Store::new();
        let images = store.path().join("images");
        let beneath = medium.join(format);
        std::fs::create_dir(&images).unwrap();
        std::fs::create_dir(&beneath).unwrap();
        tool("mount", &["--bind", beneath.to_str().unwrap(), images.to_str().unwrap()]);
        goes_on(&store, format, trigger);
        // The kernel may still be closing the files of the killed server.
        until("the images are unmounted", || {
            Command::new("umount").arg(&images).output().is_ok_and(|output| output.status.success())
        });
    }
}

fn goes_on(store: &Store, format: &str, trigger: &Path) {
    store.run(&format!("disk create vm 32M --format {format}")).ok();
    store.run("disk create beside 32M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    let mut beside = Client::connect(&store.socket(), "beside").unwrap();
    for block in (0..BLOCKS).chain(FAR..FAR + 8) {
        client.write(block * BLOCK, &content(block, 0)).unwrap();
    }
    client.flush().unwrap();
    // A disk that has not stopped is left unchanged.
    assert_eq!(store.run("disk reopen vm").ok(), "disk vm takes writes\n");
    assert!(!store.run("disk list").ok().contains("STATE"));

    std::fs::write(trigger, b"").unwrap();
    (0..BLOCKS).for_each(|block| client.write(block * BLOCK, &content(block, 1)).unwrap());
    assert!(matches!(client.flush(), Err(Failure::Errno(EIO))));
    assert!(matches!(client.write(0, &content(0, 2)), Err(Failure::Errno(EIO))));
    assert!(matches!(client.read(0, BLOCK as u32), Err(Failure::Errno(EIO))), "the writes may be lost");
    assert!(client.read(FAR * BLOCK, BLOCK as u32).unwrap() == content(FAR, 0));
    // The log reports the failure once, and only for this disk.
    let log = server.log();
    assert_eq!(log.matches("takes no writes until it is opened again").count(), 1, "{log}");
    let shown = store.run("disk show vm --json").json();
    assert!(shown["stopped"].as_str().is_some_and(|why| why.contains("flush")), "{shown}");
    assert!(store.run("disk show vm").ok().contains("'lamina disk reopen vm' opens it again"));
    let listed = store.run("disk list").ok();
    let state = |name: &str| listed.lines().find(|line| line.starts_with(name)).unwrap().ends_with("stopped");
    assert!(state("vm") && !state("beside"), "{listed}");
    beside.write(0, &content(0, 0)).unwrap();
    beside.flush().unwrap();

    // The storage still fails, so the disk stays stopped.
    store.run("disk reopen vm").fails(1, "mend the medium first");
    assert!(matches!(client.write(0, &content(0, 2)), Err(Failure::Errno(EIO))));
    assert!(store.run("disk show vm --json").json()["stopped"].is_string());

    std::fs::remove_file(trigger).unwrap();
    assert_eq!(store.run("disk reopen vm").ok(), "disk vm takes writes\n");
    assert!(store.run("disk show vm --json").json()["stopped"].is_null());
    // Acknowledged writes may be lost, which the next flush reports once.
    assert!(matches!(client.flush(), Err(Failure::Errno(EIO))));
    client.flush().unwrap();
    // Flushed data exists; other data has its old or new content, which stays the same after a restart.
    let mut found = Vec::new();
    for block in 0..BLOCKS {
        let read = client.read(block * BLOCK, BLOCK as u32).unwrap();
        assert!(read == content(block, 0) || read == content(block, 1), "{format}: block {block}");
        found.push(read);
    }
    assert!(client.read((FAR + 3) * BLOCK, BLOCK as u32).unwrap() == content(FAR + 3, 0));
    (0..8).for_each(|block| client.write(block * BLOCK, &content(block, 3)).unwrap());
    client.flush().unwrap();
    drop((client, beside));
    server.kill();
    tool("sh", &["-c", "echo 1 > /proc/sys/vm/drop_caches"]);
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    for block in 0..BLOCKS {
        let expected = if block < 8 { content(block, 3) } else { found[block as usize].clone() };
        assert!(client.read(block * BLOCK, BLOCK as u32).unwrap() == expected, "{format}: block {block} later");
    }
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_disk_that_accepts_writes_is_not_reopened() {
    let store = Store::new();
    store.run("disk create native 8M").ok();
    store.run("disk create images 8M --format sesparse").ok();
    for name in ["native", "images"] {
        assert_eq!(store.run(&format!("disk reopen {name}")).ok(), format!("disk {name} takes writes\n"));
    }
    store.run("disk reopen missing").fails(3, "missing");
}
