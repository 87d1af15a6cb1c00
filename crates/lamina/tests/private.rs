//! The files of a datastore, including the memory of guests, are private to their owner, whatever the umask is.

#![allow(clippy::unwrap_used)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use testkit::fleet::{Fleet, MEMORY};
use testkit::process::{Done, Store, output, tool};

/// Files and folders below `folder` that group or others can access, except sockets directly in it.
fn open_to_others(folder: &Path, depth: usize) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        let kind = metadata.file_type();
        if kind.is_symlink() || (kind.is_socket() && depth == 0) {
            continue;
        }
        if metadata.mode() & 0o077 != 0 {
            found.push(format!("{} {:o}", entry.path().display(), metadata.mode()));
        }
        if kind.is_dir() {
            found.extend(open_to_others(&entry.path(), depth + 1));
        }
    }
    found
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn set(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn everything_in_a_datastore_is_private() {
    // The tests run with the umask 022 that most systems have; with a stricter one this test would prove nothing.
    let probe = tempfile::tempdir().unwrap();
    fs::write(probe.path().join("probe"), b"").unwrap();
    assert_eq!(mode(&probe.path().join("probe")), 0o644, "run this test with umask 022");

    let fleet = Fleet::new();
    let store = fleet.store.path();
    fleet.store.run("disk create vmdk --size 32M --format vmdk").ok();
    fleet.store.run("snapshot create vmdk@first").ok();
    fleet.run(&format!("create web --disk-size 64M --disk vmdk --memory {MEMORY} --start")).ok();
    fleet.run("snapshot create web@plain").ok();
    fleet.run("snapshot create web@live --memory").ok();
    fleet.run("clone web twin --instant --identity keep").ok();
    fleet.run("clone web linked --start").ok();
    fleet.run("console web --quiet 0").ok();
    fleet.run("snapshot create web@later --memory").ok();
    let run = store.join("machines/web/run");
    for name in ["qmp.sock", "console.sock", "console.log", "pid", "qemu.log"] {
        assert!(run.join(name).exists(), "{name}");
    }
    assert!(store.join("machines/web/snapshots/live/memory").exists());
    assert_eq!(open_to_others(&store, 0), Vec::<String>::new());
    assert_eq!(mode(&store), 0o700);
    for name in ["nbd.sock", "control.sock"] {
        assert_eq!(mode(&store.join(name)), 0o600);
    }
    let report = fleet.store.run("check --json").json();
    assert_eq!((&report["warnings"], &report["findings"]), (&serde_json::json!([]), &serde_json::json!([])));
}

#[test]
fn a_check_reports_what_others_can_access_and_a_repair_closes_it() {
    let fleet = Fleet::new();
    let store = fleet.store.path();
    fleet.make("web", "64M");
    // Permissions as version 0.1.0 set them.
    let wide = ["machines", "machines/web", "machines/web/machine.toml"].map(|name| store.join(name));
    set(&store, 0o755);
    wide.iter().for_each(|path| set(path, if path.is_dir() { 0o755 } else { 0o644 }));
    fleet.run("start web").ok();
    fleet.run("stop web --force").ok();
    let told = fleet.store.run("check").ok();
    assert!(
        told.starts_with("warning: other users can access the folder of the datastore (mode 755), 'machines'"),
        "{told}"
    );
    assert!(told.contains("and 1 more") && told.contains("check --repair") && told.ends_with("clean\n"), "{told}");
    let told = fleet.store.run("check --repair").ok();
    assert!(told.contains("'machines/web/machine.toml' (mode 644); repaired: its mode is now 600"), "{told}");
    assert!(told.ends_with("4 problems, 4 repaired\n"), "{told}");
    assert_eq!((mode(&store), mode(&wide[0]), mode(&wide[2])), (0o711, 0o700, 0o600));
    assert_eq!(open_to_others(&store, 0), Vec::<String>::new());
    let told = fleet.store.run("check").ok();
    assert!(!told.contains("warning: other users"), "{told}");
}

#[test]
fn a_folder_that_exists_is_closed_when_it_becomes_a_datastore() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    fs::create_dir(&store).unwrap();
    set(&store, 0o775);
    let mut command = testkit::process::lamina();
    let done: Done = output(command.args(["init", "--journal-size", "8M"]).arg(&store)).into();
    done.ok();
    assert_eq!(mode(&store), 0o700);
}

#[test]
fn a_folder_that_all_users_share_does_not_become_a_datastore() {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).unwrap();
    set(&shared, 0o1777);
    let mut command = testkit::process::lamina();
    let done: Done = output(command.args(["init", "--journal-size", "8M"]).arg(&shared)).into();
    done.fails(2, "all users share the folder");
    assert_eq!((mode(&shared), fs::read_dir(&shared).unwrap().count()), (0o1777, 0));
    // A refusal changes no permissions: `init /dev/null` once closed the device to other users.
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    set(&file, 0o666);
    let mut command = testkit::process::lamina();
    let done: Done = output(command.args(["init", "--journal-size", "8M"]).arg(&file)).into();
    done.fails(1, "is not a folder, as a datastore must be");
    assert_eq!(mode(&file), 0o666);
}

const USER: u32 = 65534;

/// Gives a datastore to another user.
fn give(store: &Path) {
    let status = Command::new("chown").args(["-R", &format!("{USER}:{USER}")]).arg(store).status();
    assert!(status.unwrap().success());
}

/// Files and folders in a datastore that do not belong to [`USER`].
fn of_others(store: &Path) -> Vec<String> {
    let (store, user) = (store.to_str().unwrap(), USER.to_string());
    let found = tool("find", &[store, "!", "-user", &user, "(", "-type", "f", "-o", "-type", "d", ")"]);
    found.lines().map(str::to_owned).collect()
}

#[test]
fn what_root_creates_in_the_datastore_of_another_user_belongs_to_that_user() {
    let store = Store::new();
    give(&store.path());
    for command in [
        "disk create native 64M",
        "snapshot create native@one",
        "disk create vmdk 64M --format vmdk",
        "snapshot create vmdk@one",
        "clone vmdk@one linked",
        "vm create web --disk-size 64M",
    ] {
        store.run(command).ok();
    }
    {
        let _server = store.serve("");
        store.run("disk create served 64M --format sesparse").ok();
    }
    assert_eq!(of_others(&store.path()), Vec::<String>::new());
    let report = store.run("check --json").json();
    assert_eq!((&report["warnings"], &report["findings"]), (&serde_json::json!([]), &serde_json::json!([])));
}

#[test]
fn root_follows_no_link_in_place_of_a_definition_in_the_datastore_of_another_user() {
    let store = Store::new();
    store.run("vm create web --memory 64M").ok();
    let secret = store.path().with_file_name("secret");
    fs::write(&secret, "key = hidden\n").unwrap();
    let definition = store.path().join("machines/web/machine.toml");
    fs::remove_file(&definition).unwrap();
    std::os::unix::fs::symlink(&secret, &definition).unwrap();
    give(&store.path());
    let done = store.run("vm show web");
    assert!(!done.stderr.contains("hidden"), "{}", done.stderr);
    done.fails(1, "it is a symbolic link of another user, which root does not follow");
}

#[test]
fn a_check_reports_files_of_other_owners_and_a_repair_by_root_gives_them_back() {
    let store = Store::new();
    store.run("disk create native 64M").ok();
    store.run("disk create vmdk 64M --format vmdk").ok();
    give(&store.path());
    let files = ["images", "images/vmdk", "images/vmdk/vmdk.vmdk", "journal"].map(|name| store.path().join(name));
    files.iter().for_each(|path| std::os::unix::fs::chown(path, Some(0), Some(0)).unwrap());
    // The owner of the datastore can read neither the program nor the folder of this test. So the test copies the
    // program, and gives all users access to the folder.
    set(store.path().parent().unwrap(), 0o755);
    let copy = store.path().with_file_name("lamina");
    fs::copy(testkit::process::program(), &copy).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string(), "--clear-groups"]);
    let done: Done = output(command.arg(&copy).arg("--datastore").arg(store.path()).args(["disk", "list"])).into();
    done.fails(1, "does not own 'images' (user 0), 'journal' (user 0); run 'lamina check --repair' as root");
    let told = store.run("check").ok();
    let warning = "warning: the datastore belongs to user 65534, which does not own 'images' (user 0), 'images/vmdk'";
    assert!(told.starts_with(warning), "{told}");
    assert!(told.contains("and 1 more") && told.contains("check --repair") && told.ends_with("clean\n"), "{told}");
    let told = store.run("check --repair").ok();
    assert!(told.contains("'journal' belongs to user 0, not to the datastore's owner; repaired: it now"), "{told}");
    assert!(told.ends_with("4 problems, 4 repaired\n"), "{told}");
    assert_eq!(of_others(&store.path()), Vec::<String>::new());
}

/// Whether a user other than root, as a member of a group, can connect to a socket.
fn connects(socket: &Path, group: &str) -> bool {
    let script = "use IO::Socket::UNIX; exit !IO::Socket::UNIX->new(Peer => $ARGV[0])";
    let status = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--groups", group, "/usr/bin/perl", "-e", script])
        .arg(socket)
        .stderr(Stdio::null())
        .status();
    status.unwrap().success()
}

#[test]
fn members_of_the_socket_group_can_connect_and_no_others() {
    let store = Store::new();
    // Only this test uses the parent folder, so its permissions can be changed.
    set(store.path().parent().unwrap(), 0o755);
    let sockets = ["nbd.sock", "control.sock"].map(|name| store.path().join(name));
    {
        let _server = store.serve("");
        assert!(sockets.iter().all(|socket| !connects(socket, "2")));
    }
    {
        let _server = store.serve("--socket-group bin");
        for socket in &sockets {
            assert_eq!((mode(socket), fs::metadata(socket).unwrap().gid()), (0o660, 2));
            assert!(connects(socket, "2") && !connects(socket, "3"), "{}", socket.display());
        }
        assert_eq!(mode(&store.path()), 0o710);
        assert!(store.run("check --json").json()["warnings"].as_array().unwrap().is_empty());
        assert_eq!(open_to_others(&store.path(), 0), Vec::<String>::new());
    }
    {
        let _server = store.serve("");
        assert!(sockets.iter().all(|socket| !connects(socket, "2")));
    }
    {
        let _server = store.serve("--socket-mode 666");
        assert!(connects(&sockets[0], "3") && !connects(&sockets[1], "3"));
    }
    store.run("serve --socket-group no-such-group").fails(3, "there is no group 'no-such-group'");
    assert_eq!(tool("getent", &["group", "2"]).split(':').next(), Some("bin"));
}
