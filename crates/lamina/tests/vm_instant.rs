//! Instant clones of a real guest: clones of a frozen and of a running parent continue from the parent's state with an
//! identity of their own. Further tests: a guest without an agent, a QEMU that fails, a command that is killed.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;
use testkit::machines::{Room, ticks};
use testkit::process;

/// Number of kills of the command.
const ROUNDS: u32 = 10;

/// Asserts that all answers of the guests differ.
#[track_caller]
fn all_differ(what: &str, answers: &[String]) {
    let different: BTreeSet<&String> = answers.iter().collect();
    assert_eq!(different.len(), answers.len(), "{what}: {answers:?}");
    assert!(answers.iter().all(|answer| !answer.is_empty()), "{what}: {answers:?}");
}

/// Checks that the guest and its network card have the identity of the definition.
#[track_caller]
fn is_itself(room: &Room, name: &str) {
    let mac = room.show(name)["networks"][0]["mac"].as_str().unwrap().to_string();
    assert_eq!(room.shell(name, "hostname; cat /etc/hostname /run/cloned"), format!("{name}\n{name}\n{name}"));
    assert_eq!(room.shell(name, "cat /sys/class/net/eth0/address"), mac);
    assert_eq!(room.ask(name, "query-rx-filter")[0]["main-mac"], mac);
    // The card is connected again, and the guest has requested a new address.
    assert_eq!(room.shell(name, "cat /sys/class/net/eth0/carrier"), "1");
    room.until(&format!("{name} has an address"), || room.shell(name, "ip addr show eth0").contains("inet "));
}

#[test]
fn children_of_a_frozen_parent() {
    let room = Room::new();
    room.boot("parent", "192M", "workload=48,64");
    room.until_counts("parent");
    let answer = room.run("vm snapshot create parent@quiet --quiesce --json").json();
    assert_eq!(room.shell("parent", "cat /run/fsfreeze.log"), "freeze\nthaw", "{answer}");
    room.shell("parent", "echo parent >/who; echo only here >/run/who; sync");
    room.run("vm freeze parent").ok();
    assert_eq!(room.state("parent"), "frozen");
    let last = room.tick("parent").unwrap();

    let made = room.run("vm clone parent --instant --count 20 --parallel 3 --name-pattern web-%02d --json").json();
    assert_eq!(made["made"].as_array().unwrap().len(), 20, "{made}");
    let names: Vec<String> = (1..=20).map(|number| format!("web-{number:02}")).collect();
    for one in made["made"].as_array().unwrap() {
        assert!(one["without_identity"].is_null() && one["same_randomness"] == false, "{made}");
    }
    // The clone has run for only seconds and has changed its identity, so it still shares most memory with the parent.
    let own = room.own_memory("web-20");
    assert!(own > 0 && own < 24 << 20, "{own} bytes");
    // A guest without KVM needs a tenth of a second for each command, so one command asks for all.
    let identity = "cat /proc/sys/kernel/random/uuid /etc/machine-id /sys/class/net/eth0/address; hostname";
    let told: Vec<String> = names.iter().map(|name| room.shell(name, identity)).collect();
    for (number, what) in ["random UUIDs", "machine ids", "addresses", "host names"].iter().enumerate() {
        let lines: Vec<String> = told.iter().map(|one| one.lines().nth(number).unwrap().to_owned()).collect();
        all_differ(what, &lines);
    }
    for name in ["web-01", "web-20"] {
        is_itself(&room, name);
        assert_eq!(room.state(name), "running");
        assert_eq!(ticks(&room.console(name))[0], last + 1, "the clone continues where its parent stopped");
        assert_eq!(room.shell(name, "cat /who /run/who"), "parent\nonly here");
        room.memory_is_right(name);
    }
    // The other clones are no longer needed.
    let rest: Vec<&str> = names[3..].iter().map(String::as_str).collect();
    room.run(&format!("vm stop --force {}", rest.join(" "))).ok();
    room.run(&format!("vm delete {}", rest.join(" "))).ok();

    // Each clone writes to its own disk, and finds its data again after its guest was restarted.
    for name in &names[..3] {
        room.shell(name, &format!("echo {name} >/who; sync"));
    }
    let up = |console: &str| console.matches("guest: up").count();
    let before = up(&room.console("web-01"));
    room.shell("web-01", "reboot");
    room.until("web-01 is up again", || up(&room.console("web-01")) > before);
    room.until_answers("web-01");
    assert_eq!(room.shell("web-01", "cat /who; hostname"), "web-01\nweb-01");
    room.run("vm stop web-02").ok();
    room.run("vm start web-02").ok();
    room.until_answers("web-02");
    assert_eq!(room.shell("web-02", "cat /who"), "web-02");
    assert_eq!(room.shell("web-03", "cat /who /run/who"), "web-03\nonly here");

    // The parent continues too. The image is removed with the last machine that needs it.
    room.run("vm start parent").ok();
    room.until("the parent continues to count", || room.tick("parent").is_some_and(|tick| tick > last));
    assert_eq!(ticks(&room.console("parent"))[0], last + 1);
    assert_eq!(room.shell("parent", "cat /who; hostname"), "parent\nguest");
    room.memory_is_right("parent");
    assert_eq!(room.images().len(), 1);
    room.run("vm stop --force parent web-01 web-02 web-03").ok();
    room.run("vm delete web-01 web-02 web-03").ok();
    // The command that deletes this machine removes the image itself; no further command is needed.
    assert_eq!(room.images(), Vec::<String>::new());
    assert_eq!(room.memory_files(), Vec::<String>::new());
    assert_eq!(room.names(), ["parent"]);
    let left = room.run("snapshot list parent --json").ok();
    assert!(!left.contains("instant-"), "{left}");
    room.close();
}

#[test]
fn children_of_a_running_parent() {
    let room = Room::new();
    room.boot("parent", "192M", "workload=48,256");
    room.until_counts("parent");
    room.shell("parent", "dd if=/dev/urandom of=/run/random bs=1M count=8; sha256sum </run/random >/run/sum");
    // The first clone uses the parent's own memory file; later clones use a copy that includes the parent's changes.
    for number in 1..=4 {
        let name = format!("child-{number}");
        room.shell("parent", &format!("echo {number} >/run/number; echo {number} >/number; sync"));
        let made = room.run(&format!("vm clone parent {name} --instant --json")).json();
        assert!(made["stun_ms"].is_number(), "{made}");
        assert_eq!(room.shell(&name, "cat /run/number /number"), format!("{number}\n{number}"));
        assert_eq!(room.shell(&name, "sha256sum </run/random | cmp - /run/sum && echo same"), "same");
        is_itself(&room, &name);
        room.memory_is_right(&name);
        // The parent's workload continues where it was paused: it prints every number exactly once.
        room.until_counts("parent");
        room.memory_is_right("parent");
        assert_eq!(room.state("parent"), "running");
    }
    let counted = ticks(&room.console("parent"));
    assert!(counted.windows(2).all(|pair| pair[1] == pair[0] + 1), "{counted:?}");
    assert_eq!(room.shell("parent", "hostname; cat /number; cat /sys/class/net/eth0/carrier"), "guest\n4\n1");
    for number in 1..=4 {
        assert_eq!(room.shell(&format!("child-{number}"), "cat /run/number /number"), format!("{number}\n{number}"));
    }
    // Firmware and tables were copied through all clones of clones, so guests can reboot.
    for name in ["parent", "child-4"] {
        room.shell(name, "reboot");
        room.until(&format!("{name} is up again"), || {
            room.console(name).rsplit("guest: up").next().is_some_and(|last| last.contains("tick 0"))
        });
        room.until_answers(name);
        assert_eq!(room.shell(name, "cat /number"), "4");
    }
    // A parent that was cloned several times is frozen, is cloned from its memory image, and then continues.
    room.shell("parent", "echo frozen >/run/number; sync");
    room.run("vm freeze parent").ok();
    room.run("vm clone parent last --instant").ok();
    room.run("vm start parent").ok();
    for name in ["last", "parent"] {
        assert_eq!(room.shell(name, "cat /run/number"), "frozen");
        room.memory_is_right(name);
    }
    // A clone whose guest fails to change its identity is kept with its network unplugged, unless the identity is
    // required.
    room.shell("parent", "printf '#!/bin/sh\\nexit 3\\n' >/etc/lamina/clone-hook; chmod 755 /etc/lamina/clone-hook");
    let made = room.run("vm clone parent kept --instant --json");
    let told: serde_json::Value = serde_json::from_str(&made.stderr).unwrap();
    assert!(told["warning"].as_str().unwrap().contains("exit code 3"), "{made:?}");
    let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
    assert!(made["made"][0]["without_identity"].as_str().unwrap().ends_with("its network is unplugged"), "{made}");
    assert_eq!(room.shell("kept", "cat /sys/class/net/eth0/carrier"), "0");
    room.run("vm clone parent required --instant --identity required").fails(1, "exit code 3");
    assert!(!room.names().contains(&"required".to_owned()));
    room.run("vm stop parent").ok();
    assert!(room.console("parent").contains("Requesting system poweroff"));
    room.close();
}

/// Two processes that use all processor time that the kernel gives them.
struct BusyLoops([std::process::Child; 2]);

impl BusyLoops {
    fn start() -> Self {
        Self([(); 2].map(|()| std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap()))
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `LAMINA_CLONES` is the number of clones (default 4). With `LAMINA_GUEST=debian` they are clones of a Debian with
/// systemd and an SSH server, instead of the small guest.
#[test]
fn no_clone_is_dropped_on_a_loaded_machine() {
    const AT_ONCE: usize = 25;
    let count: usize = std::env::var("LAMINA_CLONES").map_or(4, |text| text.parse().unwrap());
    let room = Room::new();
    let mut distinct = vec!["random UUIDs", "machine ids", "addresses"];
    let mut identity = "cat /proc/sys/kernel/random/uuid /etc/machine-id /sys/class/net/e*/address; ".to_owned();
    match std::env::var("LAMINA_GUEST").as_deref() {
        Ok("debian") => {
            room.boot_debian("parent");
            distinct.push("SSH host keys");
            identity += "cut -d ' ' -f 2 /etc/ssh/ssh_host_ed25519_key.pub; ";
        }
        Ok(other) => panic!("LAMINA_GUEST is 'debian' or not set, and not '{other}'"),
        Err(_) => room.boot("parent", "96M", ""),
    }
    distinct.push("host names");
    identity += "hostname";
    room.run("vm freeze parent").ok();
    let _load = BusyLoops::start();
    let begun = Instant::now();
    let mut seen: Vec<Vec<String>> = vec![Vec::new(); distinct.len()];
    let mut names = Vec::new();
    while names.len() < count {
        let part = AT_ONCE.min(count - names.len());
        let pattern = format!("c{}-%02d", names.len());
        let made =
            room.run(&format!("vm clone parent --instant --count {part} --name-pattern {pattern} --json")).json();
        let made = made["made"].as_array().unwrap();
        assert_eq!(made.len(), part);
        let before = names.len();
        for one in made {
            assert!(one["without_identity"].is_null() && one["same_randomness"] == false, "{one}");
            names.push(one["name"].as_str().unwrap().to_owned());
        }
        for name in &names[before..] {
            assert_eq!(room.state(name), "running");
            let answer = room.shell(name, &identity);
            assert_eq!(answer.lines().last(), Some(name.as_str()));
            seen.iter_mut().zip(answer.lines()).for_each(|(all, line)| all.push(line.to_owned()));
        }
        // A hundred running guests need more memory than a machine for tests has, so these clones are stopped before
        // the next ones are made.
        room.run(&format!("vm stop --force {}", names[before..].join(" "))).ok();
    }
    println!("{count} clones, asked one by one: {:.0?}", begun.elapsed());
    for (what, answers) in distinct.iter().zip(&seen) {
        assert_eq!(answers.len(), count);
        all_differ(what, answers);
    }
    let uuids: Vec<String> = names.iter().map(|name| room.show(name)["uuid"].to_string()).collect();
    all_differ("UUIDs of the machines", &uuids);
    assert_eq!(room.names().len(), count + 1, "clones are missing");
    room.close();
}

#[test]
fn a_failed_clone_leaves_the_parent_running() {
    let room = Room::new();
    room.boot("parent", "128M", "workload=8 noagent");
    room.until_counts("parent");

    // Two programs in place of QEMU: the first exits at once; the second does not start because an option names an
    // unknown device.
    for (number, end) in ["exit 1", "exec \"$qemu\" \"$@\" -device nothing"].iter().enumerate() {
        let broken = room.store.path().join(format!("qemu-{number}"));
        let text = format!(
            "#!/bin/sh\nqemu=qemu-system-x86_64\ncase \"$*\" in *-incoming*) {end} ;; *) exec $qemu \"$@\" ;; esac\n"
        );
        std::fs::write(&broken, text).unwrap();
        std::fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).unwrap();
        let failed = room.run(&format!("vm --qemu {} clone parent child --instant", broken.display()));
        assert!(failed.code != 0 && failed.stderr.contains("QEMU did not start"), "{failed:?}");
        assert_eq!((room.names(), room.state("parent").as_str()), (vec!["parent".to_string()], "running"));
        assert_eq!(room.disks(), BTreeSet::from(["parent".to_string()]));
        assert_eq!(room.images(), Vec::<String>::new());
        room.until_counts("parent");
        std::fs::remove_file(broken).unwrap();
    }

    // Without an agent the identity is not changed: the command reports that, and the network stays disconnected.
    let refused = room.run("vm clone parent strict --instant --identity required");
    assert!(refused.code != 0 && refused.stderr.contains("no agent"), "{refused:?}");
    assert_eq!(room.names(), ["parent"]);
    let made = room.run("vm clone parent child --instant");
    assert!(made.code == 0 && made.stderr.contains("no guest agent answers"), "{made:?}");
    room.until_counts("child");
    let mac = |name: &str| room.ask(name, "query-rx-filter")[0]["main-mac"].clone();
    assert_eq!(mac("child"), mac("parent"), "the child keeps its parent's address");
    room.until_counts("parent");
    room.close();
}

#[test]
fn a_command_killed_anywhere_leaves_complete_clones_or_none() {
    let room = Room::new();
    room.boot("parent", "128M", "workload=16,64");
    room.until_counts("parent");
    let clone = |round: u32| {
        let command = format!("vm clone parent --instant --count 2 --parallel 2 --name-pattern r{round}-%d");
        room.store.command(&command).stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    // The first run is not killed, and measures the duration. Each other run is killed at a random part of this
    // duration.
    let began = Instant::now();
    assert!(clone(0).wait().unwrap().success());
    let whole = began.elapsed();
    for round in 0..=ROUNDS {
        if round > 0 {
            let mut manager = clone(round);
            std::thread::sleep(whole.mul_f64(f64::from(round) / f64::from(ROUNDS)));
            manager.kill().unwrap();
            manager.wait().unwrap();
            // A process that the killed command was starting keeps the command's locks until it executes QEMU.
            let machines = room.store.path().join("machines");
            process::until("no lock of the killed command is left", || process::lockers(&machines).is_empty());
        }
        // The next command reports what it completed or removed, and succeeds.
        let next = room.run("vm list");
        assert_eq!(next.code, 0, "{next:?}");
        let names = room.names();
        assert!(names.contains(&"parent".to_string()), "{names:?}");
        let children: Vec<&String> = names.iter().filter(|name| *name != "parent").collect();
        let mut expected = BTreeSet::from(["parent".to_string()]);
        for child in &children {
            assert!(child.starts_with(&format!("r{round}-")), "{names:?}");
            assert_eq!(room.state(child), "running", "round {round}");
            assert_eq!(&room.shell(child, "hostname"), *child, "a clone has its own identity, or does not exist");
            room.until_counts(child);
            expected.insert((*child).clone());
        }
        assert!(round > 0 || children.len() == 2, "{names:?}");
        assert_eq!(room.disks(), expected, "round {round}");
        assert_eq!(room.state("parent"), "running", "round {round}");
        room.until_counts("parent");
        let folders = process::files(&room.store.path().join("machines"));
        let left: Vec<&String> =
            folders.iter().filter(|name| name.starts_with(".new") || name.starts_with(".old")).collect();
        assert!(left.is_empty(), "round {round}: {left:?}");
        // Only processes of existing machines are running.
        let running = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let line = std::fs::read(entry.unwrap().path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).into_owned();
            (line.starts_with("qemu-system") && line.contains(room.store.path().to_str().unwrap())).then_some(())
        });
        assert_eq!(running.count(), expected.len(), "round {round}");
        for child in children {
            room.run(&format!("vm stop {child} --force")).ok();
            room.run(&format!("vm delete {child}")).ok();
        }
        room.memory_is_right("parent");
    }
    assert_eq!(room.images().len(), 1, "the image from which the parent continues");
    room.close();
}
