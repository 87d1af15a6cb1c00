//! A Linux guest in QEMU on a lamina disk: the guest creates a file system, writes, trims, mounts the file system again
//! and verifies it. It then changes the disk, and other guests find the snapshot and a linked clone unchanged.
//! `scripts/guest` builds the guest; `tests/guest/init` is its part of the test.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use testkit::machines::KERNEL_LINE;
use testkit::process::{Store, tool};

/// Boots a guest on a disk for one phase; returns its console output.
fn boot(store: &Store, guest: &Path, disk: &str, phase: &str) -> String {
    let blockdev = format!(
        "driver=nbd,node-name=disk0,export={disk},server.type=unix,server.path={},discard=unmap,read-only={}",
        store.socket().display(),
        if disk.contains('@') { "on" } else { "off" }
    );
    let [kernel, initrd] = ["vmlinuz", "initrd"].map(|name| guest.join(name).to_str().unwrap().to_string());
    let line = format!("{KERNEL_LINE} phase={phase}");
    // KVM is not used: it is often missing where these tests run, and the guest's speed does not matter.
    let machine =
        ["-accel", "tcg", "-machine", "pc", "-m", "256", "-display", "none", "-serial", "stdio", "-monitor", "none"];
    let disk = ["-no-reboot", "-nodefaults", "-blockdev", &blockdev, "-device", "virtio-blk-pci,drive=disk0"];
    let software = ["-kernel", &kernel, "-initrd", &initrd, "-append", &line];
    let seconds = testkit::machines::PATIENCE.as_secs().to_string();
    let console =
        tool("timeout", &[&[&*seconds, "qemu-system-x86_64"], &machine[..], &disk[..], &software[..]].concat());
    assert!(console.contains("guest: done"), "{phase}: {console}");
    console
}

#[test]
fn a_guest_runs_on_a_disk_and_another_on_its_clone() {
    let guest = testkit::machines::guest();
    let store = Store::new();
    store.run("disk create vm1 256M").ok();
    let mut server = store.serve("");
    let console = boot(&store, guest, "vm1", "make");
    assert!(console.contains("trimmed"), "{console}");
    let used = store.run("disk show vm1 --json").json()["blocks_allocated"].as_u64().unwrap() * 4096;
    assert!(used < 40 << 20, "{used} bytes: the 48 MiB that were deleted are trimmed");

    store.run("snapshot create vm1@made").ok();
    store.run("clone vm1@made vm2").ok();
    boot(&store, guest, "vm1", "change");
    boot(&store, guest, "vm2", "verify");
    boot(&store, guest, "vm1@made", "verify");
    // Finally, e2fsck on the host finds the file systems clean.
    let folder = tempfile::tempdir().unwrap();
    for disk in ["vm1", "vm2", "vm1@made"] {
        let image = folder.path().join(disk);
        tool("nbdcopy", &[&store.uri(disk), image.to_str().unwrap()]);
        tool("e2fsck", &["-fn", image.to_str().unwrap()]);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
