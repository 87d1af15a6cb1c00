//! Changing machines: their names, processors, memory and arguments while they are off; disks and network cards also
//! while a real guest runs under load.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::path::Path;
use testkit::fleet::{Fleet, MEMORY, holds, write};
use testkit::machines::{LOAD, Room};
use testkit::nbd::Client;
use testkit::process;

/// A disk as `show` prints it.
fn virtio(name: &str, slot: u8) -> Value {
    json!({ "name": name, "slot": slot, "bus": "virtio", "unit": 0 })
}

#[test]
fn a_machine_that_is_off_is_changed_and_renamed() {
    let fleet = Fleet::new();
    fleet.make("web", "64M");
    write(&fleet, "web", 0, 1);
    fleet.run("snapshot create web@before").ok();
    fleet.run("edit web").fails(2, "nothing to change");
    fleet.run("edit web --cpus 0").fails(2, "1 to 255 CPUs");
    fleet.run("edit web --memory 1M").fails(2, "whole MiB");
    fleet.run("edit web --ports 9").fails(2, "9");
    fleet.run("edit web --qemu-memory 1M").fails(2, "256 MiB or more");
    fleet.run("edit web --autostart perhaps").fails(2, "neither on nor off");
    fleet.run("edit none --cpus 2").fails(3, "there is no machine 'none'");
    assert_eq!(fleet.show("web")["cpus"], 1, "nothing was changed");
    fleet.run("edit web --qemu-memory 512M --cpus 2 --memory 48M --qemu-arg -device --qemu-arg pci-testdev,addr=1e.0 --autostart on").ok();
    let shown = fleet.show("web");
    assert_eq!((&shown["cpus"], &shown["memory"], &shown["autostart"]), (&json!(2), &json!(48 << 20), &json!(true)));
    assert_eq!(shown["qemu_arguments"], json!(["-device", "pci-testdev,addr=1e.0"]));
    let shown = fleet.run("show web").ok();
    assert!(shown.contains("0 of 4 in use") && shown.contains("-device pci-testdev"), "{shown}");

    fleet.make("other", "1M");
    fleet.run("rename web other").fails(1, "there is a machine 'other' already");
    fleet.run("rename web we_b").fails(2, "cannot name a machine");
    fleet.run("rename none shop").fails(3, "there is no machine 'none'");
    // Only the marked machine is started, with its further arguments.
    assert_eq!(fleet.run("start --autostart").ok(), "started web\n");
    assert_eq!((fleet.state("web").as_str(), fleet.state("other").as_str()), ("running", "stopped"));
    assert_eq!(fleet.run("start --autostart").ok(), "");
    let pid = fleet.processes().into_keys().next().unwrap();
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    assert_eq!(data.split_whitespace().nth(3), Some((512 << 20).to_string().as_str()), "{limits}");
    assert!(line.contains("pci-testdev,addr=1e.0") && line.contains("-smp\x002\0"), "{line}");
    for change in ["edit web --cpus 3", "edit web --memory 64M", "edit web --no-qemu-args", "edit web --ports 2"] {
        fleet.run(change).fails(7, "stop it first");
    }
    fleet.run("rename web shop").fails(7, "stop it first");
    fleet.run("edit web --autostart off").ok();
    fleet.run("stop web --force").ok();

    fleet.run("rename web shop").ok();
    assert_eq!(fleet.names(), ["other", "shop"]);
    assert!(fleet.unfinished().is_empty());
    write(&fleet, "web", 0, 2);
    fleet.run("start shop").ok();
    fleet.run("freeze shop").ok();
    fleet.run("edit shop --no-qemu-args").fails(7, "is frozen");
    fleet.run("start shop").ok();
    assert_eq!(fleet.processes().into_values().next().as_deref(), Some("shop"));
    // The snapshot has the machine's definition at that time, but a revert does not restore the machine's former name.
    fleet.run("revert shop@before").ok();
    holds(&fleet, "web", 0, 1);
    let shown = fleet.show("shop");
    assert_eq!((&shown["name"], &shown["cpus"], &shown["qemu_arguments"]), (&json!("shop"), &json!(1), &json!([])));
    fleet.run("clone shop twin").ok();
    assert_eq!(fleet.show("twin")["autostart"], false);
    // The state after a rename that was killed between its two steps.
    let toml = fleet.folder().join("twin/machine.toml");
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, text.replace("name = \"twin\"\nuuid", "name = \"former\"\nuuid")).unwrap();
    assert_eq!(fleet.show("twin")["name"], "twin");
    fleet.run("delete twin").ok();
    fleet.run("delete shop").ok();
}

#[test]
fn cpus_have_the_model_and_the_sockets_that_the_user_chose() {
    let fleet = Fleet::new();
    let plain = format!("--memory {MEMORY} --disk-size 1M --network none");
    fleet.run(&format!("create bad {plain} --cpus 4 --cores 3")).fails(2, "sockets of 3 cores");
    fleet.run(&format!("create bad {plain} --cpu-model help")).fails(2, "'qemu-system-x86_64 -cpu help' lists");
    fleet.run(&format!("create bad {plain} --secure-boot")).fails(2, "Secure Boot needs UEFI");
    assert!(fleet.names().is_empty());
    let own = "--cpus 4 --cores 2 --cpu-model qemu64,+ssse3 --clock local";
    fleet.run(&format!("create web {plain} {own}")).ok();
    let of = |name: &str| {
        let shown = fleet.show(name);
        let platform = &shown["platform"];
        json!([shown["cpu_model"], platform["cores"], platform["clock"]])
    };
    assert_eq!(of("web"), json!(["qemu64,+ssse3", 2, "local"]));
    let shown = fleet.run("show web").ok();
    assert!(shown.contains("qemu64,+ssse3") && shown.contains("2 cores in a socket, clock in local time"), "{shown}");
    fleet.run("start web").ok();
    let pid = fleet.processes().into_keys().next().unwrap();
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    for part in ["-cpu\0qemu64,+ssse3\0", "-smp\x004,sockets=2,cores=2,threads=1\0", "-rtc\0base=localtime\0"] {
        assert!(line.contains(part), "{part:?}: {line:?}");
    }
    for change in ["--cpu-model default", "--cores 0", "--clock utc"] {
        fleet.run(&format!("edit web {change}")).fails(7, "stop it first");
    }
    // After a revert to a snapshot with memory, the machine and its instant clones have the same processors.
    fleet.run("snapshot create web@live --memory").ok();
    fleet.run("revert web@live").ok();
    fleet.run("clone web copy").ok();
    assert_eq!(of("copy"), of("web"));
    fleet.run("stop web --force").ok();
    fleet.run("edit web --cpu-model default --cores 0 --clock utc").ok();
    assert_eq!(of("web"), json!([null, null, "utc"]));
    // QEMU checks the name of the model, and lamina prints QEMU's message.
    fleet.run("edit copy --cpu-model nonsense").ok();
    fleet.run("start copy").fails(1, "unable to find CPU model 'nonsense'");
    fleet.run("edit copy --cpus 2 --cpu-model default").ok();
    fleet.run("start copy").ok();
}

#[test]
fn controllers_and_cards_are_exchanged_while_the_machine_is_off() {
    let fleet = Fleet::new();
    fleet.store.run("disk create data 1M").ok();
    fleet.run(&format!("create web --memory {MEMORY} --disk-size 1M --disk data --network unplugged")).ok();
    let found = |kind: &str| {
        let shown = fleet.show("web");
        let of = |list: &str, key: &str| -> Vec<Value> {
            shown[list].as_array().unwrap().iter().map(|one| one[key].clone()).collect()
        };
        assert_eq!(of("disks", "name"), ["web", "data"]);
        json!([of("disks", kind), of("networks", "model")])
    };
    fleet.run("edit web --bus ide").fails(2, "use sata");
    fleet.run("edit web --virtio --bus sata").fails(2, "--bus");
    fleet.run("edit web --bus sata --card e1000e").ok();
    assert_eq!(found("bus"), json!([["sata", "sata"], ["e1000e"]]));
    assert_eq!(found("unit"), json!([[0, 1], ["e1000e"]]));
    fleet.run("start web").ok();
    fleet.run("edit web --virtio").fails(7, "stop it first");
    fleet.run("stop web --force").ok();
    fleet.run("edit web --virtio").ok();
    assert_eq!(found("bus"), json!([["virtio", "virtio"], ["virtio"]]));
    assert_eq!(found("slot"), json!([[8, 9], ["virtio"]]));
    fleet.run("start web").ok();
}

#[test]
fn disks_of_a_machine_that_is_off_are_added_and_removed() {
    let fleet = Fleet::new();
    fleet.make("web", "1M");
    fleet.make("other", "1M");
    fleet.store.run("disk create data 1M").ok();
    fleet.run("edit web --add-disk other").fails(4, "belongs to machine 'other'");
    fleet.run("edit web --add-disk nothing").fails(3, "there is no disk 'nothing'");
    fleet.run("edit web --add-disk web").fails(1, "is in machine 'web' already");
    fleet.run("edit web --remove-disk data").fails(3, "has no disk 'data'");
    fleet.run("edit web --add-disk data --add-network unplugged").ok();
    let shown = fleet.show("web");
    assert_eq!(shown["disks"], json!([virtio("web", 8), virtio("data", 9)]));
    let mac = shown["networks"][0]["mac"].as_str().unwrap().to_owned();
    fleet.store.run("disk rename data other-data").fails(4, "'lamina vm edit web --remove-disk data'");
    fleet.run("edit web --remove-network 52:54:00:00:00:00").fails(3, "has no network card");
    fleet.run(&format!("edit web --remove-disk web --remove-network {mac}")).ok();
    let shown = fleet.show("web");
    assert_eq!((&shown["disks"], &shown["networks"]), (&json!([virtio("data", 9)]), &json!([])));
    fleet.store.run("disk delete web").ok();
    fleet.run("start web").ok();
    // The disk was added while the machine was off, so it cannot be removed while the machine runs.
    fleet.run("edit web --remove-disk data").fails(7, "stop it first");
    let client = Client::connect(&fleet.store.socket(), "other").unwrap();
    fleet.run("delete other --keep-disks").ok();
    fleet.run("edit web --add-disk other").fails(4, "in use by 1 other client");
    drop(client);
    process::until("the client is gone", || fleet.run("edit web --add-disk other").code == 0);
    assert_eq!(fleet.show("web")["disks"][1], virtio("other", 32));
    assert_eq!(fleet.run("stop --all --force").ok(), "stopped web\n");
    assert_eq!(fleet.run("stop --all --force").ok(), "");
    // A machine of version 0.1.0 has no ports.
    fleet.run(&format!("create old --memory {MEMORY} --network none")).ok();
    fleet.run("edit old --ports 0").ok();
    fleet.run("start old").ok();
    fleet.store.run("disk create more 1M").ok();
    fleet.run("edit old --add-disk more").fails(2, "no ports for devices");
    assert_eq!(fleet.show("old")["disks"], json!([]));
}

/// Sets the hardware of a machine that is off.
fn set_hardware(folder: &Path, changes: &[(&str, &str)]) {
    let path = folder.join("machine.toml");
    let mut text = std::fs::read_to_string(&path).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from}: {text}");
        text = text.replacen(from, to, 1);
    }
    std::fs::write(path, text).unwrap();
}

#[test]
fn disks_of_imported_controllers_are_added_and_removed_while_the_machine_runs() {
    let fleet = Fleet::new();
    for (name, bus) in [("vmware", "pvscsi"), ("other", "virtio-scsi")] {
        fleet.make(name, "1M");
        set_hardware(&fleet.folder().join(name), &[("slot = 8\n", &format!("slot = 8\nbus = \"{bus}\"\n"))]);
        let [first, second] = ["one", "two"].map(|disk| format!("{name}-{disk}"));
        let at = |disk: &str, unit: u8| json!({ "name": disk, "slot": 8, "bus": bus, "unit": unit });
        fleet.store.run(&format!("disk create {first} 1M")).ok();
        fleet.store.run(&format!("disk create {second} 1M")).ok();
        fleet.run(&format!("start {name}")).ok();
        fleet.run(&format!("edit {name} --add-disk {first} --add-disk {second}")).ok();
        assert_eq!(fleet.show(name)["disks"], json!([at(name, 0), at(&first, 1), at(&second, 2)]));
        // The process has the added disks, and a saved state with them can be loaded again.
        fleet.run(&format!("snapshot create {name}@live --memory")).ok();
        fleet.run(&format!("edit {name} --remove-disk {first}")).ok();
        assert_eq!(fleet.show(name)["disks"], json!([at(name, 0), at(&second, 2)]));
        fleet.run(&format!("edit {name} --remove-disk {name}")).fails(7, "stop it first");
        fleet.run(&format!("revert {name}@live")).ok();
        assert_eq!(fleet.show(name)["disks"].as_array().unwrap().len(), 3);
        fleet.run(&format!("edit {name} --remove-disk {first} --remove-disk {second}")).ok();
        fleet.store.run(&format!("disk show {first}")).ok();
        fleet.run(&format!("stop {name} --force")).ok();
        fleet.run(&format!("edit {name} --add-disk {first}")).ok();
        assert_eq!(fleet.show(name)["disks"], json!([at(name, 0), at(&first, 1)]));
        fleet.run(&format!("start {name}")).ok();
    }
}

#[test]
fn a_guest_on_the_chipset_i440fx_gets_and_releases_disks_and_cards() {
    let room = Room::new();
    room.boot("web", "192M", "");
    room.run("vm stop web --force").ok();
    let folder = room.store.path().join("machines/web");
    set_hardware(&folder, &[("[boot]", "[platform]\nchipset = \"i440fx\"\n\n[boot]")]);
    room.run("vm start web").ok();
    room.until_answers("web");
    let has = |what: &str| room.shell("web", &format!("[ -e {what} ] && echo yes || echo no")) == "yes";
    room.run("disk create data 8M").ok();
    room.run("vm edit web --add-disk data --add-network unplugged").ok();
    room.until("the guest has the disk", || has("/dev/vdb"));
    room.until("the guest has the card", || room.shell("web", "ls /sys/class/net | grep -c eth") == "2");
    room.shell("web", "echo written | dd of=/dev/vdb bs=512 conv=sync,fsync 2>/dev/null");
    room.run("vm snapshot create web@live --memory").ok();
    room.run("vm revert web@live").ok();
    room.until_answers("web");
    assert_eq!(room.shell("web", "head -n 1 /dev/vdb"), "written");
    let mac = room.show("web")["networks"][1]["mac"].as_str().unwrap().to_owned();
    room.run(&format!("vm edit web --remove-disk data --remove-network {mac}")).ok();
    assert!(!has("/dev/vdb") && room.shell("web", "ls /sys/class/net | grep -c eth") == "1");
    // The identity of a clone is assigned to cards by their addresses, which are the same for an added card.
    room.run("vm edit web --add-network unplugged").ok();
    room.until("the guest has the card", || room.shell("web", "ls /sys/class/net | grep -c eth") == "2");
    room.run("vm clone web twin --instant --identity required").ok();
    let macs = room.show("twin")["networks"].as_array().unwrap().iter().map(|it| it["mac"].clone()).collect::<Vec<_>>();
    room.until("the clone has its addresses", || {
        let seen = room.shell("twin", "cat /sys/class/net/eth*/address");
        macs.iter().all(|mac| seen.contains(mac.as_str().unwrap()))
    });
    room.close();
}

/// Rounds of adding, growing and removing a disk; LAMINA_ROUNDS sets their number.
fn rounds() -> u64 {
    std::env::var("LAMINA_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

#[test]
fn disks_and_cards_come_grow_and_go_while_a_guest_works() {
    let room = Room::new();
    room.boot("web", "192M", "");
    room.shell("web", LOAD);
    let has = |what: &str| room.shell("web", &format!("[ -e {what} ] && echo yes || echo no")) == "yes";
    let mut last = None;
    for round in 1..=rounds() {
        room.run("disk create data 8M").ok();
        room.run("vm edit web --add-disk data --add-network unplugged").ok();
        room.until("the guest has the disk", || has("/dev/vdb"));
        room.until("the guest has the card", || room.shell("web", "ls /sys/class/net | grep -c eth") == "2");
        let pattern = format!("round {round}");
        room.shell("web", &format!("echo {pattern} | dd of=/dev/vdb bs=512 conv=sync,fsync 2>/dev/null"));
        room.run("disk resize data 16M").ok();
        room.until("the guest sees the new size", || room.shell("web", "cat /sys/block/vdb/size") == "32768");
        assert_eq!(room.shell("web", "head -n 1 /dev/vdb"), pattern);
        if round == 1 {
            // A saved state includes the added devices. After a revert, the guest's clock shows the host's time.
            room.shell("web", "date -s '2001-02-03 04:05:06'");
            room.run("vm snapshot create web@live --memory").ok();
            room.shell("web", "echo changed >/run/changed");
            let reverted = room.run("vm revert web@live --json").json();
            assert_eq!((&reverted["clock_set"], &reverted["clock_problem"]), (&json!(true), &json!(null)));
            room.until_answers("web");
            let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
            let (before, clock) = (now(), room.shell("web", "date +%s").parse::<u64>().unwrap());
            // The clock of a guest that gets little processor time loses seconds.
            assert!((before.saturating_sub(60)..=now() + 60).contains(&clock), "{clock}, not {before}");
            assert!(!has("/run/changed") && has("/dev/vdb"));
            room.run("vm snapshot delete web@live").ok();
        }
        let mac = room.show("web")["networks"][1]["mac"].as_str().unwrap().to_owned();
        room.run(&format!("vm edit web --remove-disk data --remove-network {mac}")).ok();
        assert!(!has("/dev/vdb") && room.shell("web", "ls /sys/class/net | grep -c eth") == "1");
        let shown = room.show("web");
        assert_eq!((shown["disks"].as_array().unwrap().len(), shown["networks"].as_array().unwrap().len()), (1, 1));
        // A revert ends the process, so the process's connection to the disk ends without a disconnect request.
        room.run(if round == 1 { "disk delete data --force" } else { "disk delete data" }).ok();
        room.until("the guest's load goes on", || {
            let now = room.shell("web", "cat /run/rounds 2>/dev/null || true");
            assert_ne!(now, "broken");
            let moved = last.as_ref().is_some_and(|before| *before != now);
            last = (!now.is_empty()).then_some(now);
            moved
        });
    }
    let errors = room.shell("web", "dmesg | grep -ci 'i/o error' || true");
    assert_eq!(errors, "0", "{}", room.shell("web", "dmesg | tail -n 30"));
    room.close();
}
