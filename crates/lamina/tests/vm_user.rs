//! QEMU as a user of its own: the guest works as before, what belongs to the machine stays private, and the user
//! reaches only the disks of its own machines. Needs root.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use testkit::fleet::{Fleet, MEMORY};
use testkit::machines::Room;
use testkit::process::{Done, Store, output, program, tool};

/// The user and its group, as every Debian has them.
const USER: (&str, &str, u32) = ("nobody", "nogroup", 65534);

/// Lets other users reach a datastore. Only this test uses the datastore's parent folder.
fn open_parent(store: &Store) {
    fs::set_permissions(store.path().parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
}

/// A command as a user.
fn as_user(command: &Path) -> Command {
    let mut all = Command::new("setpriv");
    all.args(["--reuid", USER.0, "--regid", USER.1, "--clear-groups", "--"]).arg(command);
    all
}

/// The numbers in a line of a process's status.
fn status(room: &Room, name: &str, line: &str) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{}/status", room.show(name)["pid"])).unwrap();
    let found = text.lines().find_map(|one| one.strip_prefix(line)).unwrap();
    found.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

#[track_caller]
fn runs_as_user(room: &Room, name: &str) {
    assert_eq!((status(room, name, "Uid:"), status(room, name, "Gid:")), (vec![USER.2; 4], vec![USER.2; 4]), "{name}");
    assert_eq!(status(room, name, "Seccomp:"), [2], "{name}");
}

/// Files and folders of a datastore that do not belong to root, or that others can access.
fn exposed(store: &Store) -> String {
    let store = store.path();
    let store = store.to_str().unwrap();
    let tests = ["(", "!", "-user", "root", "-o", "-perm", "/077", ")", "!", "-type", "l"];
    tool("find", &[&[store, "-mindepth", "1", "!", "-name", "nbd.sock"], &tests[..]].concat())
}

#[test]
fn a_guest_works_in_a_process_of_another_user() {
    let served = format!("--machine-group {}", USER.1);
    let mut room = Room::serving(&served);
    open_parent(&room.store);
    room.run("disk create secret 8M").ok();
    room.boot_from("vm-initrd", "web", &format!("--memory 192M --vnc --run-as {}", USER.0), "");
    runs_as_user(&room, "web");
    assert_eq!(room.show("web")["run_as"], USER.0);
    assert_eq!(exposed(&room.store), "");
    assert_eq!(fs::metadata(room.store.path()).unwrap().mode() & 0o777, 0o710);

    // The user can open the disk of its machine and no other disk, and cannot connect to the control socket.
    let socket = room.store.socket();
    let list = || {
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let done: Done = output(as_user(Path::new("nbdinfo")).args(["--list", "--json", &uri])).into();
        let exports = done.json()["exports"].as_array().unwrap().clone();
        let names = exports.iter().map(|one| one["export-name"].as_str().unwrap().to_owned());
        names.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(list(), ["web"]);
    let refused = |name: &str| {
        let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
        let done: Done = output(as_user(Path::new("nbdinfo")).arg(&uri)).into();
        assert_ne!(done.code, 0, "{done:?}");
        done.stderr.replace(name, "NAME")
    };
    assert_eq!(refused("secret"), refused("nothing"), "a disk of others is not told apart from an absent one");
    let control = room.store.path().join("control.sock");
    assert_eq!(fs::metadata(&control).unwrap().mode() & 0o777, 0o600);

    // The screen, the state of devices and memory are written to files of root.
    let picture = room.store.path().with_file_name("screen.png");
    room.run(&format!("vm screenshot web {}", picture.display())).ok();
    assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    room.run("vm snapshot create web@live --memory").ok();
    runs_as_user(&room, "web");
    room.run("vm clone web twin --instant --identity required").ok();
    runs_as_user(&room, "twin");
    assert_eq!(list(), ["twin", "web"]);
    room.run("vm freeze web").ok();
    room.run("vm start web").ok();
    runs_as_user(&room, "web");
    room.run("vm revert web@live").ok();
    room.until_answers("web");
    runs_as_user(&room, "web");
    assert_eq!(exposed(&room.store), "");

    // The process connects again after a restart of the server, now as its user, also to a disk that is added.
    room.serve_again(&served);
    assert_eq!(room.shell("web", "head -c 4194304 /dev/urandom >/x; sync; wc -c </x"), "4194304");
    room.run("disk create more 8M").ok();
    room.run("vm edit web --add-disk more").ok();
    room.until("the guest has the disk", || room.shell("web", "ls /sys/block").contains("vdb"));
    room.run("vm edit web --run-as root").fails(7, "stop it first");
    room.run("vm stop web --force").ok();
    room.run("vm edit web --run-as root").ok();
    room.run("vm start web").ok();
    assert_eq!(status(&room, "web", "Uid:"), [0; 4]);
    assert_eq!(list(), ["twin"]);
    room.close();
}

#[test]
fn variables_of_uefi_are_written_by_another_user_and_stay_private() {
    let room = Room::serving(&format!("--machine-group {}", USER.1));
    open_parent(&room.store);
    // The default user of the datastore applies to machines without a user.
    let defaults = room.store.path().join("machines/defaults.toml");
    room.run("vm list").ok();
    fs::write(&defaults, format!("version = 1\nrun_as = \"{}\"\n", USER.0)).unwrap();
    fs::set_permissions(&defaults, Permissions::from_mode(0o600)).unwrap();
    room.run("vm create efi --memory 128M --firmware uefi --network none --disk-size 8M --start").ok();
    runs_as_user(&room, "efi");
    let variables = room.store.path().join("machines/efi/nvram");
    let template = fs::read("/usr/share/OVMF/OVMF_VARS_4M.fd").unwrap();
    room.until("the firmware has written its variables", || fs::read(&variables).unwrap() != template);
    assert_eq!(exposed(&room.store), "");
    fs::write(&defaults, "run_as = 7\n").unwrap();
    room.run("vm create bad --memory 128M --start").fails(2, "defaults.toml");
    room.close();
}

#[test]
fn what_does_not_work_is_said_before_a_process_starts() {
    let fleet = Fleet::new();
    open_parent(&fleet.store);
    let create = |name: &str, user: &str| {
        fleet.run(&format!("create {name} --memory {MEMORY} --network none --disk-size 8M --run-as {user}"))
    };
    create("bad", "a,b").fails(2, "is no name of a user");
    create("web", "no-such-user").ok();
    fleet.run("start web").fails(3, "there is no user 'no-such-user'");
    fleet.run(&format!("edit web --run-as {}", USER.0)).ok();
    fleet.run("start web").fails(2, "--machine-group");
    fleet.run("edit web --no-run-as").ok();
    fleet.run("start web").ok();
    assert_eq!(fleet.processes().len(), 1);
    fleet.store.run("serve --machine-group no-such-group").fails(3, "there is no group 'no-such-group'");

    // Only root can start a machine as another user.
    let store = Store::new();
    open_parent(&store);
    store.run("vm create web --memory 32M --network none --disk-size 8M --run-as daemon").ok();
    let copy = store.path().with_file_name("lamina");
    fs::copy(program(), &copy).unwrap();
    tool("chown", &["-R", &format!("{}:{}", USER.0, USER.1), store.path().to_str().unwrap()]);
    let run = |arguments: &[&str]| -> Done {
        let mut command = as_user(&copy);
        command.arg("--datastore").arg(store.path()).args(arguments).env("LAMINA_MEMORY", "/dev/shm");
        output(&mut command).into()
    };
    let mut serve = as_user(&copy).arg("--datastore").arg(store.path()).arg("serve").spawn().unwrap();
    testkit::process::until("the server listens", || store.socket().exists());
    run(&["vm", "start", "web"]).fails(2, "only root can start it as another user");
    run(&["vm", "edit", "web", "--run-as", USER.0]).ok();
    run(&["vm", "start", "web"]).ok();
    run(&["vm", "stop", "web", "--force"]).ok();
    tool("kill", &[&serve.id().to_string()]);
    serve.wait().unwrap();
}
