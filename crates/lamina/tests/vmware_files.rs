//! Files of VMware, and similar files, that a program can easily misread: lamina imports them correctly, or refuses
//! them with an error that says what to do.
//!
//! The tests use only the command line, so that they also run on another version of the program: copy the test program
//! to FOLDER/deps, and that version to FOLDER/lamina. Version 0.1.0 fails each of these tests.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use testkit::pattern;
use testkit::process::{self, Done, Store, files, lamina};

const MIB: usize = 1 << 20;

/// Runs `lamina` in a folder.
fn run_in(folder: &Path, arguments: &str) -> Done {
    process::output(lamina().current_dir(folder).args(arguments.split_whitespace())).into()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Changes bytes of a file.
fn change(path: &Path, edit: impl FnOnce(&mut [u8])) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Replaces a text that occurs once in a file.
fn replace(path: &Path, from: &str, to: &str) {
    change(path, |bytes| {
        let all: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).take(2).collect();
        assert_eq!((all.len(), from.len()), (1, to.len()), "'{from}' in {}", path.display());
        bytes[all[0]..all[0] + to.len()].copy_from_slice(to.as_bytes());
    });
}

#[test]
fn only_a_raw_disk_is_imported_as_one() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("web.vmx"), "x".repeat(1024)).unwrap();
    process::tool("tar", &["-C", path.to_str().unwrap(), "-cf", path.join("web.ova").to_str().unwrap(), "web.vmx"]);
    run_in(path, "image create web.vmdk 8M --format monolithicsparse").ok();
    let image = fs::read(path.join("web.vmdk")).unwrap();
    // A guest can write the first bytes of an image into its own disk.
    fs::write(path.join("guest.img"), &image).unwrap();
    change(&path.join("web.vmdk"), |bytes| bytes[0] ^= 1);
    for way in ["", "--live", "--in-place"] {
        for (file, words) in [
            ("web.ova", "lamina convert"),
            ("web.vmx", "--from raw"),
            ("web.vmdk", "it is damaged"),
            ("guest.img", "--from raw or --from vmdk"),
        ] {
            let done = store.run(&format!("disk import {way} {} web", path.join(file).display()));
            assert!(done.code != 0 && done.stderr.contains(words), "{file} {way}: {done:?}");
        }
        assert_ne!(store.run(&format!("disk import {way} /etc/passwd web")).code, 0);
    }
    store.run("disk show web").fails(3, "web");
    store.run(&format!("disk import --from raw {} web", path.join("guest.img").display())).ok();
    assert_eq!(store.run("disk show web --json").json()["capacity"], image.len());
}

#[test]
fn a_chain_on_a_raw_base_is_opened_by_its_path() {
    let store = Store::new();
    store.run("disk create web 8M --format raw").ok();
    store.run("snapshot create web@before").ok();
    let delta = store.path().join("images/web/web-000001.vmdk");
    let shown = process::run(&format!("image show {} --json", delta.display())).json();
    assert_eq!(shown["levels"].as_array().unwrap().len(), 2, "{shown}");
}

#[test]
fn a_disk_whose_common_snapshot_was_deleted_is_migrated() {
    let store = Store::new();
    store.run("disk create web 8M").ok();
    for name in ["first", "second"] {
        store.run(&format!("snapshot create web@{name}")).ok();
    }
    store.run("snapshot revert web@first").ok();
    store.run("snapshot delete web@first").ok();
    store.run("disk migrate web -d thin").ok();
    assert_eq!(store.run("snapshot list web --json").json()["snapshots"][0]["name"], "second");
}

#[test]
fn the_capacity_of_a_header_is_compared_with_that_of_its_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run_in(path, "image create web.vmdk 64M --format monolithicsparse").ok();
    replace(&path.join("web.vmdk"), "RW 131072 SPARSE", "RW 131080 SPARSE");
    run_in(path, "image show web.vmdk").fails(6, "--force-parent");
}

#[test]
fn a_table_is_read_by_the_directory_that_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let content = pattern::bytes(3, 34 * MIB);
    fs::write(path.join("raw.img"), &content).unwrap();
    run_in(path, "convert --from raw -d monolithicsparse raw.img web.vmdk").ok();
    // The first entry of the directory is a sector within the file, but not the sector of the table.
    change(&path.join("web.vmdk"), |bytes| {
        let first = word(bytes, 56) as usize * 512;
        bytes[first] += 1;
    });
    assert_eq!(run_in(path, "image check web.vmdk").code, 6);
    assert_eq!(run_in(path, "convert web.vmdk -d raw back.img").code, 0);
    assert!(fs::read(path.join("back.img")).unwrap() == content);
}

#[test]
fn an_entry_of_sesparse_without_its_type_is_repaired() {
    for kind in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let content = pattern::bytes(4, 8 * MIB);
        fs::write(path.join("raw.img"), &content).unwrap();
        run_in(path, "convert --from raw -d sesparse raw.img web.vmdk").ok();
        change(&path.join("web-sesparse.vmdk"), |bytes| {
            // Marks grain 5 of the disk as zeros, in its table entry.
            let entry = word(bytes, 144) as usize * 512 + 5 * 8;
            assert_eq!(bytes[entry + 7] >> 4, 3);
            bytes[entry + 7] = kind << 4 | bytes[entry + 7] & 15;
        });
        let checked = run_in(path, "image check web.vmdk");
        assert!(checked.code == 6 && checked.stdout.contains("bitmap and backmap prove"), "{checked:?}");
        run_in(path, "image check --repair web.vmdk").ok();
        run_in(path, "convert web.vmdk -d raw back.img").ok();
        assert!(fs::read(path.join("back.img")).unwrap() == content);
    }
}

#[test]
fn an_extent_without_its_descriptor_is_read_if_its_format_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let content = pattern::bytes(5, 8 * MIB);
    fs::write(path.join("raw.img"), &content).unwrap();
    run_in(path, "convert --from raw -d sesparse raw.img web.vmdk").ok();
    fs::remove_file(path.join("web.vmdk")).unwrap();
    run_in(path, "convert web-sesparse.vmdk -d raw back.img").fails(2, "--from");
    run_in(path, "convert --from sesparse web-sesparse.vmdk -d raw back.img").ok();
    assert!(fs::read(path.join("back.img")).unwrap() == content);
}

#[test]
fn a_live_import_is_shown_until_it_is_complete() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("raw.img"), pattern::bytes(6, 16 * MIB)).unwrap();
    run_in(path, "convert --from raw -d thin raw.img web.vmdk").ok();
    let mut server = store.serve("");
    store.run(&format!("disk import --live --rate 1M {} web", path.join("web.vmdk").display())).ok();
    let shown = store.run("disk show web").ok();
    assert!(shown.contains("live import:") && shown.contains("the server copies the images"), "{shown}");
    store.run("snapshot create web@early").fails(4, "web");
    assert_eq!(server.stop("TERM"), Some(0));
}

#[test]
fn images_of_large_disks_keep_to_the_limits_of_their_formats() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let refused = run_in(path, "image create whole.vmdk 2T --format monolithicsparse");
    assert!(refused.code == 2 && refused.stderr.contains("choose 2gbsparse"), "{refused:?}");
    assert!(!refused.stderr.contains("lamina-new"), "it names a temporary file: {refused:?}");
    assert_eq!(refused.stderr.matches("whole.vmdk").count(), 1, "{refused:?}");
    assert!(files(path).is_empty());
    run_in(path, "image create pieces.vmdk 8T --format 2gbsparse").ok();
    assert_eq!(run_in(path, "image show pieces.vmdk --json").json()["levels"][0]["capacity"], 8u64 << 40);
    let store = Store::new();
    store.run("disk create web 64T --format vsansparse").ok();
    store.run("snapshot create web@before").ok();
}

/// A list of one snapshot whose name lamina does not allow.
const LIST: &str = r#".encoding = "UTF-8"
snapshot.lastUID = "1"
snapshot.current = "1"
snapshot0.uid = "1"
snapshot0.filename = "web-Snapshot1.vmsn"
snapshot0.displayName = "before the update/1"
snapshot0.createTimeHigh = "350000"
snapshot0.createTimeLow = "1"
snapshot0.numDisks = "1"
snapshot0.disk0.fileName = "web.vmdk"
snapshot0.disk0.node = "scsi0:0"
snapshot.numSnapshots = "1"
"#;

#[test]
fn changed_names_of_snapshots_are_reported_and_kept_in_the_list() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run_in(path, "image create web.vmdk 8M").ok();
    run_in(path, "image create web-000001.vmdk --parent web.vmdk --format vmfssparse").ok();
    fs::write(path.join("web.vmsd"), LIST).unwrap();
    let imported = store.run(&format!("disk import --in-place {} web", path.join("web-000001.vmdk").display()));
    assert_eq!(imported.code, 0, "{imported:?}");
    for name in ["'before the update/1'", "'before-the-update-1'"] {
        assert!(imported.stderr.contains(name), "{imported:?}");
    }
    store.run("snapshot create web@after").ok();
    let list = fs::read_to_string(store.path().join("images/web/web.vmsd")).unwrap();
    assert!(list.contains("\"before the update/1\"") && list.contains("\"after\""), "{list}");
}

#[test]
fn refusals_name_the_option_that_permits() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (name, option) in [("elsewhere", "--allow-folder '/srv'"), ("changed", "give --force-parent")] {
        run_in(path, &format!("image create {name}.vmdk 8M")).ok();
        run_in(path, &format!("image create {name}-000001.vmdk --parent {name}.vmdk --format vmfssparse")).ok();
        let base = path.join(format!("{name}.vmdk"));
        let text = fs::read_to_string(&base).unwrap();
        let text = match name {
            "elsewhere" => text.replace("\"elsewhere-flat.vmdk\"", "\"/srv/elsewhere-flat.vmdk\""),
            _ => text
                .lines()
                .map(|line| if line.starts_with("CID=") { "CID=12345678" } else { line })
                .fold(String::new(), |text, line| text + line + "\n"),
        };
        fs::write(&base, text).unwrap();
        let delta = path.join(format!("{name}-000001.vmdk"));
        let refused = store.run(&format!("disk import {} web", delta.display()));
        assert!(refused.code != 0 && refused.stderr.contains(option), "{refused:?}");
    }
}

#[test]
fn a_target_may_be_named_in_capitals() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("raw.img"), pattern::bytes(7, MIB)).unwrap();
    run_in(path, "convert --from raw -d thin raw.img WEB.VMDK").ok();
    assert_eq!(run_in(path, "image show WEB.VMDK --json").json()["levels"][0]["capacity"], MIB);
}
