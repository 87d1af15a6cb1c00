//! Linked and full clones of a guest that has run get identities of their own: by the agent at their first start,
//! before their network is connected, or by cloud-init.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use testkit::machines::Room;
use testkit::process::{Done, output};

#[test]
fn the_agent_gives_an_identity_before_the_network_is_connected() {
    let room = Room::new();
    room.boot("web", "192M", "");
    room.shell("web", "echo web >/etc/hostname; hostname web; printf '127.0.1.1\tweb\n' >/etc/hosts; sync");
    let id = |name: &str| room.shell(name, "cat /etc/machine-id");
    let carrier = |name: &str| room.shell(name, "cat /sys/class/net/eth0/carrier");
    room.run("vm clone web plain").ok();
    room.run("vm clone web copy --full --identity required").ok();
    room.run("vm clone copy second --identity keep").ok();
    assert_eq!(room.show("copy")["new_identity"], "required");
    assert_eq!(room.show("second")["new_identity"], "required", "its source has not started yet");
    assert!(room.run("vm show copy").ok().contains("that of its source"));
    room.run("vm start copy --paused").fails(7, "start it without --paused");
    room.run("vm start copy second").ok();
    for name in ["copy", "second"] {
        assert_eq!(room.shell(name, "hostname; cat /etc/hostname /run/cloned"), format!("{name}\n{name}\n{name}"));
        assert_eq!(room.shell(name, "cat /etc/hosts"), format!("127.0.1.1 {name}"));
        assert_eq!((carrier(name), &room.show(name)["new_identity"]), ("1".to_owned(), &json!(null)));
    }
    assert_eq!([id("web"), id("copy"), id("second")].iter().collect::<BTreeSet<_>>().len(), 3);
    // The identity is on the disk as soon as the start returns: a loss of power does not restore that of the source.
    room.run("vm clone web third --identity required --start").ok();
    room.run("vm stop third --force").ok();
    room.run("vm start third").ok();
    room.until_answers("third");
    assert_eq!(room.shell("third", "hostname"), "third");
    assert_ne!(id("third"), id("web"));
    room.run("vm stop third --force").ok();
    // The identity stays.
    let before = id("copy");
    room.run("vm stop copy --force").ok();
    room.run("vm start copy").ok();
    room.until_answers("copy");
    assert_eq!((room.shell("copy", "hostname"), id("copy")), ("copy".to_owned(), before));
    // Without the option the guest keeps the identity of its source.
    room.run("vm start plain").ok();
    room.until_answers("plain");
    assert_eq!((id("plain"), carrier("plain")), (id("web"), "1".to_owned()));

    // The hook fails, so the guest keeps the identity of its source.
    room.shell("web", "printf '#!/bin/sh\\nexit 3\\n' >/etc/lamina/clone-hook; sync");
    let made = room.run("vm clone web auto --identity auto --start");
    assert_eq!(made.code, 0, "{made:?}");
    assert!(made.stderr.contains("its network is unplugged") && made.stderr.contains("exit code 3"), "{made:?}");
    assert_eq!((carrier("auto"), &room.show("auto")["new_identity"]), ("0".to_owned(), &json!("auto")));
    room.run("vm freeze auto").ok();
    room.run("vm start auto").ok();
    room.until_answers("auto");
    assert_eq!(carrier("auto"), "0", "it still has the identity of its source");
    room.run("vm clone web required --identity required").ok();
    room.run("vm start required").fails(1, "was stopped again");
    assert_eq!(
        (room.state("required"), &room.show("required")["new_identity"]),
        ("stopped".into(), &json!("required"))
    );
    room.shell("auto", "rm /etc/lamina/clone-hook; sync");
    room.run("vm stop auto --force").ok();
    room.run("vm start auto").ok();
    assert_eq!((carrier("auto"), room.shell("auto", "hostname")), ("1".to_owned(), "auto".to_owned()));
    room.close();
}

/// The identity of a Debian guest: host name, machine id, SSH host key, client id of DHCP.
fn identity(room: &Room, name: &str) -> [String; 4] {
    room.until(&format!("{name} has an address"), || {
        let ready = "cat /run/systemd/netif/leases/* && systemctl is-active ssh && \
                     ! systemctl is-active cloud-final | grep activating";
        let mut command = room.store.command(&format!("vm exec {name} -- /bin/sh -c"));
        let done: Done = output(command.arg(ready)).into();
        done.code == 0
    });
    let told = room.shell(
        name,
        "hostname && cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub && \
         sed -n 's/^CLIENTID=//p' /run/systemd/netif/leases/*",
    );
    let lines: Vec<String> = told.lines().map(str::to_owned).collect();
    lines.try_into().unwrap_or_else(|lines: Vec<String>| panic!("{name}: {lines:?}"))
}

/// Removes the seed from the definition of a machine that is off.
fn without_seed(room: &Room, name: &str) {
    let file = room.store.path().join("machines").join(name).join("machine.toml");
    let text = fs::read_to_string(&file).unwrap();
    let (before, after) = text.split_once("[seed]").unwrap();
    let rest = &after[after.find("\n[").unwrap()..];
    fs::write(&file, format!("{before}{rest}")).unwrap();
}

#[test]
fn clones_of_a_debian_that_has_run_are_distinct() {
    let room = Room::new();
    room.boot_debian("base");
    let source = identity(&room, "base");
    room.shell("base", "sync");
    room.run("vm stop base --force").ok();

    room.run("vm clone base seeded --start").ok();
    room.until_answers("seeded");
    let clone_of_seed = || {
        let one = identity(&room, "seeded");
        (one.iter().zip(&source).all(|(one, other)| one != other)).then_some(one)
    };
    room.until("cloud-init has changed all", || clone_of_seed().is_some());
    let seeded = clone_of_seed().unwrap();
    room.run("vm stop seeded --force").ok();
    without_seed(&room, "base");
    room.run("vm clone base agent --full --identity required --start").ok();
    let agent = identity(&room, "agent");
    for (at, what) in ["host name", "machine id", "host key", "client id"].iter().enumerate() {
        let all: BTreeSet<&String> = [&source[at], &seeded[at], &agent[at]].into();
        assert!(all.len() == 3 && all.iter().all(|one| !one.is_empty()), "{what}: {all:?}");
    }
    assert_eq!([&seeded[0], &agent[0]], ["seeded", "agent"]);
    assert_eq!(room.shell("agent", "stat -c %a /etc/ssh/ssh_host_ed25519_key"), "600");
    room.close();
}
