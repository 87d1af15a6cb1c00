//! libnbd's tools with a real server: information about exports, and exact and sparse copies in both directions.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Store, tool};

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&tool("nbdinfo", arguments)).unwrap()
}

/// The map of an export as (offset, length, description).
fn map(option: &str, uri: &str) -> Vec<(u64, u64, String)> {
    let extents = json(&[option, "--json", uri]);
    let number = |value: &Value| value.as_u64().unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let extents = extents.as_array().unwrap().iter();
    extents.map(|e| (number(&e["offset"]), number(&e["length"]), text(&e["description"]))).collect()
}

/// An image of `size` bytes with data at a few offsets.
fn image(path: &Path, seed: u64, size: u64) {
    let file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    let mut random = testkit::Random(seed);
    for _ in 0..24 {
        let length = (512 << random.below(11)).min(size);
        let offset = random.below((size - length) / 512 + 1) * 512;
        file.write_all_at(&pattern::bytes(random.next(), length as usize), offset).unwrap();
    }
}

#[test]
fn nbdinfo_lists_the_exports() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    store.run("disk create vm2 1G").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    client.write(1 << 20, &[1; 64 << 10]).unwrap();
    store.run("snapshot create vm1@a").ok();
    client.write(2 << 20, &[2; 4 << 10]).unwrap();
    client.trim(1 << 20, 32 << 10).unwrap();

    let info = json(&["--json", &store.uri("vm1")]);
    let export = &info["exports"][0];
    assert_eq!((&export["export-name"], &export["export-size"]), (&"vm1".into(), &(64 << 20).into()));
    for (property, expected) in [
        ("is_read_only", false),
        ("can_cache", true),
        ("can_fast_zero", true),
        ("can_flush", true),
        ("can_fua", true),
        ("can_multi_conn", true),
        ("can_trim", true),
        ("can_zero", true),
        ("can_df", true),
    ] {
        assert_eq!(export[property], expected, "{property}: {export}");
    }
    assert_eq!((&info["protocol"], &info["structured"]), (&"newstyle-fixed".into(), &true.into()));
    assert_eq!((&export["block_size_minimum"], &export["block_size_preferred"]), (&1.into(), &4096.into()));
    let contexts: Vec<&str> = export["contexts"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    for context in ["base:allocation", "lamina:dirty:a", "qemu:dirty-bitmap:a"] {
        assert!(contexts.contains(&context), "{context} in {contexts:?}");
    }
    let snapshot = json(&["--json", &store.uri("vm1@a")]);
    assert_eq!(snapshot["exports"][0]["is_read_only"], true);
    assert_eq!(tool("nbdinfo", &["--size", &store.uri("vm2")]).trim(), (1 << 30).to_string());

    let listed = json(&["--list", "--json", &store.uri("")]);
    let exports = listed["exports"].as_array().unwrap();
    let names: Vec<&str> = exports.iter().map(|e| e["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["vm1", "vm1@a", "vm2"]);

    let hole = |offset: u64, length: u64| (offset, length, "hole,zero".to_string());
    let data = |offset: u64, length: u64| (offset, length, "data".to_string());
    let (k, m) = (1 << 10, 1 << 20);
    assert_eq!(
        map("--map", &store.uri("vm1")),
        [hole(0, m + 32 * k), data(m + 32 * k, 32 * k), hole(m + 64 * k, m - 64 * k), data(2 * m, 4 * k), {
            hole(2 * m + 4 * k, 62 * m - 4 * k)
        }]
    );
    assert_eq!(map("--map", &store.uri("vm1@a")), [hole(0, m), data(m, 64 * k), hole(m + 64 * k, 63 * m - 64 * k)]);
    for context in ["lamina:dirty:a", "qemu:dirty-bitmap:a"] {
        let extents = json(&[&format!("--map={context}"), "--json", &store.uri("vm1")]);
        let extents = extents.as_array().unwrap().iter();
        let dirty: Vec<(u64, u64)> = extents
            .filter(|e| e["type"] == 1)
            .map(|e| (e["offset"].as_u64().unwrap(), e["length"].as_u64().unwrap()))
            .collect();
        assert_eq!(dirty, [(m, 32 * k), (2 * m, 4 * k)], "{context}");
    }
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
}

#[test]
fn nbdcopy_copies_data_exactly_and_keeps_holes() {
    for (seed, size) in [(1, 64 << 20), (2, (1 << 20) + 512), (3, 512), (4, 40 << 20)] {
        let store = Store::new();
        let folder = tempfile::tempdir().unwrap();
        let [original, back] = ["original", "back"].map(|name| folder.path().join(name));
        image(&original, seed, size);
        store.run(&format!("disk create vm1 {size}")).ok();
        store.run(&format!("disk create vm2 {size}")).ok();
        let mut server = store.serve(if seed % 2 == 0 { "--io direct --read-cache 8M" } else { "" });
        let [original_text, back_text] = [original.to_str().unwrap(), back.to_str().unwrap()];
        // The copy uses several connections at once, because the server advertises CAN_MULTI_CONN.
        tool("nbdcopy", &["--connections=4", "--flush", original_text, &store.uri("vm1")]);
        tool("nbdcopy", &["--flush", &store.uri("vm1"), &store.uri("vm2")]);
        assert_eq!(server.stop("TERM"), Some(0));
        let mut server = store.serve("");
        tool("nbdcopy", &["--connections=4", &store.uri("vm2"), back_text]);
        assert!(std::fs::read(&original).unwrap() == std::fs::read(&back).unwrap(), "{size} bytes differ");
        let allocated = |path: &Path| std::fs::metadata(path).unwrap().blocks() * 512;
        assert!(allocated(&back) <= allocated(&original) + (1 << 20), "the copy is sparse");
        let used = store.run("disk show vm2 --json").json()["blocks_allocated"].as_u64().unwrap();
        assert!(used * 4096 <= allocated(&original) + (64 << 10), "{used} blocks: holes were not written");
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}

/// A file system with this source tree is copied to a disk and back: e2fsck finds no problem, debugfs finds every file.
#[test]
fn a_file_system_on_a_disk_is_consistent() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources = sources.to_str().unwrap();
    tool("mke2fs", &["-q", "-t", "ext4", "-d", sources, &path("made"), "64M"]);
    store.run("disk create vm1 64M").ok();
    let mut server = store.serve("");
    tool("nbdcopy", &["--flush", &path("made"), &store.uri("vm1")]);
    store.run("snapshot create vm1@golden").ok();
    store.run("clone vm1@golden twin").ok();
    // The disk is changed; the snapshot and its clone must not change.
    Client::connect(&store.socket(), "vm1").unwrap().write(0, &[0xff; 1 << 20]).unwrap();
    for name in ["vm1@golden", "twin"] {
        tool("nbdcopy", &[&store.uri(name), &path(name)]);
        tool("e2fsck", &["-fn", &path(name)]);
        tool("debugfs", &["-R", &format!("rdump / {}", path("")), &path(name)]);
        tool("cmp", &[&path("main.rs"), &format!("{sources}/main.rs")]);
        tool("cmp", &[&path("made"), &path(name)]);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
