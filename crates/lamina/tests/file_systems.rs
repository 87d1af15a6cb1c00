//! Warnings about the file system of a datastore, on real file systems.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use testkit::nbd::Client;
use testkit::process::{Store, tool, until};
use testkit::{mounted, process};

/// Checks that no warning is printed.
fn is_good(folder: &Path, name: &str) {
    let store = Store::at(folder, "4M");
    store.run("disk create vm 8M --format vmdk").ok();
    store.run("disk create native 8M").ok();
    let status = store.run("status --json").json();
    assert_eq!(status["file_system"]["name"], name);
    assert_eq!(status["file_system"]["warnings"], serde_json::json!([]));
    assert!(!store.run("check").ok().contains("warning"));
    let mut server = store.serve("");
    assert!(store.run("status").ok().contains(name));
    assert_eq!(server.stop("TERM"), Some(0));
    assert!(!server.log().contains("WARN"), "{}", server.log());
}

#[test]
fn ext4_is_supported() {
    mounted::on_ext4("ext4_is_supported", |folder| is_good(folder, "ext4"));
}

#[test]
fn xfs_is_supported() {
    mounted::on_xfs("xfs_is_supported", |folder| is_good(folder, "XFS"));
}

#[test]
fn btrfs_is_supported() {
    mounted::on_btrfs("btrfs_is_supported", |folder| is_good(folder, "btrfs"));
}

#[test]
fn copy_on_write_files_on_btrfs_are_reported() {
    mounted::on_btrfs("copy_on_write_files_on_btrfs_are_reported", |folder| {
        // Compressed files on btrfs cannot be overwritten in place.
        let compressed = folder.join("compressed");
        std::fs::create_dir(&compressed).unwrap();
        tool("chattr", &["+c", compressed.to_str().unwrap()]);
        let path = compressed.join("store");
        let made = process::run(&format!("init --journal-size 4M {}", path.display())).ok();
        assert!(made.contains("warning: btrfs copies files of the datastore on write (catalog, 9 in all)"), "{made}");
        let run = |arguments: &str| process::run(&format!("--datastore {} {arguments}", path.display()));
        let status = run("status --json").json();
        assert!(status["file_system"]["warnings"][0].as_str().unwrap().contains("on write"), "{status}");
        assert!(run("status").ok().contains("warning"));
        // A warning about the file system does not count as a problem that the check found.
        let checked = run("check").ok();
        assert!(checked.starts_with("warning: btrfs copies") && checked.ends_with("clean\n"), "{checked}");
        let mut command = process::lamina();
        command.arg("--datastore").arg(&path).arg("serve");
        let mut server = process::Serving::start(command);
        assert_eq!(server.log().matches("copies files of the datastore on write").count(), 1, "{}", server.log());
        assert_eq!(server.stop("TERM"), Some(0));
        // The folders of images are checked too: only the folder of one disk is compressed.
        let plain = folder.join("plain");
        process::run(&format!("init --journal-size 4M {}", plain.display())).ok();
        let run = |arguments: &str| process::run(&format!("--datastore {} {arguments}", plain.display()));
        run("disk create vm 8M --format vmdk").ok();
        let images = plain.join("images/vm");
        tool("sh", &["-c", &format!("cd {}; cp vm-flat.vmdk copy; mv copy vm-flat.vmdk", images.display())]);
        let checked = run("check").ok();
        assert!(checked.contains("(images/vm/vm-flat.vmdk, 1 in all)"), "{checked}");
    });
}

#[test]
fn tmpfs_is_allowed_with_a_warning() {
    mounted::on_tmpfs("tmpfs_is_allowed_with_a_warning", 96, |folder| {
        let path = folder.join("store");
        let made = process::run(&format!("init --journal-size 4M {}", path.display())).ok();
        assert!(made.contains("warning: the datastore is on tmpfs: it is kept in memory"), "{made}");
    });
}

#[test]
fn a_program_behind_fuse_is_refused() {
    if tool("id", &["-u"]).trim() != "0" {
        return println!("not root: FUSE is tested only by its file system number");
    }
    let folder = tempfile::tempdir().unwrap();
    let mounted = folder.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let mut medium = std::process::Command::new("nbdfuse")
        .arg(&mounted)
        .args(["[", "nbdkit", "--exit-with-parent", "null", "1M", "]"])
        .spawn()
        .unwrap_or_else(|e| panic!("nbdfuse: {e}; the tests need it"));
    until("nbdfuse has mounted", || mounted.join("nbd").exists());
    let path = mounted.join("store");
    let refused = process::run(&format!("init {}", path.display()));
    let insisted = process::run(&format!("init --any-file-system {}", path.display()));
    let unserved = process::run(&format!("serve {}", mounted.display()));
    let served = process::run(&format!("serve --any-file-system {}", mounted.display()));
    tool("fusermount3", &["-u", mounted.to_str().unwrap()]);
    process::wait(&mut medium);
    refused.fails(1, "is on FUSE");
    // The option has no effect here, because no folder can be created on this file system.
    assert!(insisted.code != 0 && !insisted.stderr.contains("is on FUSE"), "{insisted:?}");
    unserved.fails(1, "is on FUSE");
    // There is no datastore.
    served.fails(3, "superblock");
}

#[test]
fn limits_of_a_file_system_are_explained() {
    mounted::on_ext4("limits_of_a_file_system_are_explained", |folder| {
        let store = Store::at(folder, "4M");
        let refused = store.run("disk create large 64T --format vmdk");
        assert!(refused.code != 0 && refused.stderr.contains("XFS"), "{refused:?}");
        store.run("disk create thick 8M --provisioning zeroedthick").ok();
        let refused = store.run("disk resize thick 1G");
        assert!(refused.code == 5 && refused.stderr.contains("disk 'thick'"), "{refused:?}");
    });
}

#[test]
fn a_missing_data_file_is_found_without_reading_data_and_may_be_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path(), "4M");
    store.run("disk create vm 8M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    client.write(0, &[7; 64 << 10]).unwrap();
    client.flush().unwrap();
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    let (data, elsewhere) = (store.path().join("data.0000"), folder.path().join("elsewhere"));
    std::fs::rename(&data, &elsewhere).unwrap();
    let checked = store.run("check");
    assert!(checked.code != 0 && checked.stdout.contains("data.0000 is missing, with 16 blocks"), "{checked:?}");
    std::os::unix::fs::symlink(&elsewhere, &data).unwrap();
    store.is_clean();
}
