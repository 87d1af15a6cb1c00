//! The seed for cloud-init: the guest finds a disk with the configuration from the command line, and every clone has an
//! instance id of its own.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use testkit::machines::{KERNEL_LINE, Room, guest};
use testkit::process::{Done, output, tool};

const KEYS: [&str; 2] = ["ssh-rsa AAAAB3NzaC1yc2E one", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA two@example.org"];

/// What the disk of a running machine contains, as mtools reads it.
fn on_disk(room: &Room, name: &str, file: &str) -> String {
    let image = room.store.path().join("machines").join(name).join("run/seed.img");
    tool("mtype", &["-i", image.to_str().unwrap(), &format!("::{file}")])
}

fn meta(room: &Room, name: &str) -> Value {
    serde_json::from_str(&on_disk(room, name, "meta-data")).unwrap()
}

#[test]
fn a_guest_and_its_clones_find_their_own_seeds() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    let (data, keys) = (folder.path().join("user-data"), folder.path().join("keys"));
    fs::write(&data, "#cloud-config\nruncmd: [\"echo done\"]\n").unwrap();
    fs::write(&keys, format!("# keys\n\n{}\n", KEYS[0])).unwrap();
    let create = |name: &str, more: &str| -> Done {
        let mut command = room.store.command(&format!("vm create {name} --memory 192M --disk-size 1G {more}"));
        let [kernel, initrd] = ["vmlinuz", "vm-initrd"].map(|file| guest().join(file));
        command.arg("--kernel").arg(kernel).arg("--initrd").arg(initrd);
        command.args(["--append", KERNEL_LINE, "--ssh-key", KEYS[1]]);
        output(&mut command).into()
    };
    create("bad", "--user-data /nowhere/user-data").fails(2, "/nowhere/user-data");
    create("bad", "--hostname we_b").fails(2, "is no host name");
    create("bad", "--ssh-key /nowhere/key").fails(2, "/nowhere/key");
    create("bad", "--user-data /dev/zero").fails(2, "'/dev/zero' has more than");
    create("bad", "--ssh-key /dev/zero").fails(2, "'/dev/zero' has more than");
    fs::write(folder.path().join("private"), "-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap();
    create("bad", &format!("--ssh-key {}", folder.path().join("private").display())).fails(2, "must stay secret");
    fs::write(folder.path().join("plain"), "packages: [vim]\n").unwrap();
    create("bad", &format!("--user-data {}", folder.path().join("plain").display())).fails(2, "'#cloud-config'");
    assert!(room.names().is_empty() && room.disks().is_empty());
    let given = format!("--user-data {} --ssh-key {} --hostname web.example.org", data.display(), keys.display());
    create("web", &given).ok();
    room.run("vm start web").ok();
    room.until_says("web", "guest: up");
    room.until_answers("web");
    // The seed is not the guest's first disk. The guest prints the files of the seed.
    let uuid = room.show("web")["uuid"].clone();
    assert_eq!(room.shell("web", "cat /sys/block/vdb/ro; grep -c vda /proc/mounts"), "1\n1");
    let console = room.console("web").replace('\r', "");
    for line in [
        "seed: user-data: runcmd: [\"echo done\"]",
        &format!("seed: meta-data:   \"instance-id\": {uuid},"),
        "seed: meta-data:   \"local-hostname\": \"web.example.org\",",
        &format!("seed: meta-data:     \"{}\"", KEYS[1]),
        "seed: vendor-data: systemd-machine-id-setup",
    ] {
        assert!(console.lines().any(|one| one == line), "{line}: {console}");
    }
    let seen = meta(&room, "web");
    assert_eq!((&seen["public-keys"], &seen["instance-id"]), (&json!(KEYS), &uuid));
    assert_eq!(on_disk(&room, "web", "user-data"), fs::read_to_string(&data).unwrap());
    assert!(room.run("vm show web").ok().contains("host name web.example.org, 2 SSH keys, "));

    // Clones of every kind, and a state that is loaded again.
    room.run("vm clone web copy --full --start --hostname a.b --count 2").fails(2, "the same host name");
    room.run("vm clone web fast --instant --hostname fast").fails(2, "has started");
    room.run("vm snapshot create web@live --memory").ok();
    let image = || fs::read(room.store.path().join("machines/web/run/seed.img")).unwrap();
    let before = image();
    room.run("vm revert web@live").ok();
    room.until_answers("web");
    assert!(image() == before && room.shell("web", "head -c 1048576 /dev/vdb | sha256sum").len() > 64);
    fs::write(&data, "#!/bin/sh\n").unwrap();
    room.run(&format!("vm clone web two --start --user-data {}", data.display())).ok();
    room.run("vm clone web three --full --start --hostname other").ok();
    room.run("vm clone web four --instant --identity required").ok();
    let all = ["web", "two", "three", "four"].map(|name| meta(&room, name));
    let instances: BTreeSet<&str> = all.iter().map(|one| one["instance-id"].as_str().unwrap()).collect();
    assert_eq!(instances.len(), 4);
    let names: Vec<&str> = all.iter().map(|one| one["local-hostname"].as_str().unwrap()).collect();
    assert_eq!(names, ["web.example.org", "two", "other", "four"]);
    assert!(all.iter().all(|one| one["public-keys"] == json!(KEYS)));
    assert_eq!(on_disk(&room, "two", "user-data"), "#!/bin/sh\n");
    assert_eq!(on_disk(&room, "three", "user-data"), on_disk(&room, "web", "user-data"));
    room.until_says("two", "seed: meta-data:   \"local-hostname\": \"two\"");
    room.close();
}
