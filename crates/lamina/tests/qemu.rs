//! QEMU's tools with a real server: copying images in and out, requests of all kinds and alignments, and the bitmaps
//! that QEMU's backup tools use.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use testkit::pattern;
use testkit::process::{Store, tool};

/// Runs commands of qemu-io on an export; fails if a read does not match its pattern.
fn io(store: &Store, export: &str, commands: &[&str]) {
    let uri = store.uri(export);
    let mut arguments = vec!["-f", "raw", "-d", "unmap"];
    if export.contains('@') {
        arguments.push("-r");
    }
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let text = tool("qemu-io", &arguments);
    assert!(!text.contains("failed") && !text.contains("rror"), "{export}: {text}");
}

#[test]
fn images_convert_to_and_from_exports() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let size = (48 << 20) + 512;
    let mut content = pattern::bytes(7, size);
    content[8 << 20..30 << 20].fill(0);
    std::fs::write(path("raw"), &content).unwrap();
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "-c", &path("raw"), &path("qcow2")]);
    store.run(&format!("disk create vm1 {size}")).ok();
    store.run(&format!("disk create vm2 {size}")).ok();
    let mut server = store.serve("");
    let (vm1, vm2) = (store.uri("vm1"), store.uri("vm2"));
    tool("qemu-img", &["convert", "-n", "-W", "-f", "qcow2", "-O", "raw", &path("qcow2"), &vm1]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &path("raw"), &vm1]);
    tool("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &path("qcow2"), &vm1]);
    tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &vm1, &vm2]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &vm1, &vm2]);
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &vm2, &path("back")]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &path("raw"), &path("back")]);

    let info: Value = serde_json::from_str(&tool("qemu-img", &["info", "--output=json", "-f", "raw", &vm1])).unwrap();
    assert_eq!(info["virtual-size"], size);
    let map: Value = serde_json::from_str(&tool("qemu-img", &["map", "--output=json", "-f", "raw", &vm1])).unwrap();
    let zero: u64 =
        map.as_array().unwrap().iter().filter(|e| e["zero"] == true).map(|e| e["length"].as_u64().unwrap()).sum();
    assert_eq!(zero, 22 << 20, "the hole is reported as one extent: {map}");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn qemu_io_requests_of_every_kind_and_alignment() {
    let store = Store::new();
    store.run("disk create thin 64M").ok();
    store.run("disk create thick 64M --provisioning eagerzeroedthick").ok();
    for options in ["", "--io direct --queue threads"] {
        let mut server = store.serve(options);
        for disk in ["thin", "thick"] {
            let commands = [
                "write -z 0 64M",
                "write -P 0x11 0 1M",
                "write -P 0x22 1000 5000",
                "write -P 0x33 512 488",
                "write -f -P 0x44 65535 2",
                "read -P 0x11 0 512",
                "read -P 0x33 512 488",
                "read -P 0x22 1000 5000",
                "read -P 0x11 6000 1000",
                "read -P 0x44 65535 2",
                "write -z 4095 2",
                "read -P 0x22 4094 1",
                "read -P 0 4095 2",
                "read -P 0x22 4097 1",
                "discard 8k 64k",
                "read -P 0 8k 57343",
                "read -P 0x11 72k 4k",
                "write -z -u 128k 10000",
                "read -P 0 128k 10000",
                "read -P 0x11 141072 928",
                "write -z -f 512k 64k",
                "read -P 0 512k 64k",
                "aio_write -P 0x55 2M 1M",
                "aio_write -P 0x66 3M 1M",
                "aio_write -z 4M 64k",
                "aio_write -P 0x77 5M 4k",
                "aio_flush",
                "read -P 0x55 2M 1M",
                "read -P 0x66 3M 1M",
                "read -P 0 4M 64k",
                "read -P 0x77 5M 4k",
                "write -P 0x88 67108352 512",
                "read -P 0x88 67108352 512",
                "writev -P 0x99 6M 512 1024 8192",
                "read -P 0x99 6M 9728",
                "flush",
            ];
            io(&store, disk, &commands);
        }
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}

#[test]
fn incremental_backup_by_dirty_bitmap() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let mut server = store.serve("");
    io(&store, "vm1", &["write -P 1 0 8M", "flush"]);
    store.run("snapshot create vm1@monday").ok();
    io(&store, "vm1", &["write -P 2 1M 64k", "discard 4M 64k", "write -P 3 32M 4k", "flush"]);
    store.run("snapshot create vm1@tuesday").ok();
    let socket = store.socket();
    let image = |export: &str| {
        format!(
            "driver=nbd,export={export},server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:monday",
            socket.display()
        )
    };
    // `qemu-img map` shows dirty extents of a bitmap as extents without data.
    let text = tool("qemu-img", &["map", "--output=json", "--image-opts", &image("vm1")]);
    let map: Value = serde_json::from_str(&text).unwrap();
    let dirty: Vec<(u64, u64)> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["data"] == false)
        .map(|e| (e["start"].as_u64().unwrap(), e["length"].as_u64().unwrap()))
        .collect();
    assert_eq!(dirty, [(1 << 20, 64 << 10), (4 << 20, 64 << 10), (32 << 20, 4 << 10)], "{text}");
    let diff = store.run("snapshot diff vm1@monday vm1@tuesday --json").json();
    let told: Vec<(u64, u64)> = diff["extents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["offset"].as_u64().unwrap(), e["length"].as_u64().unwrap()))
        .collect();
    assert_eq!(told, dirty, "the command line prints the same");
    io(&store, "vm1@monday", &["read -P 1 0 8M", "read -P 0 32M 4k"]);
    io(&store, "vm1@tuesday", &["read -P 2 1M 64k", "read -P 0 4M 64k", "read -P 3 32M 4k"]);
    assert_eq!(server.stop("TERM"), Some(0));
}
