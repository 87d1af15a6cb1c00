//! Machines of VMware, VirtualBox and libvirt, and disks alone: each is imported by one command, boots, and has disks
//! with the same bytes as its source. The source is not changed.

#![allow(clippy::unwrap_used)]

mod foreign;

use foreign::{Left, MIB, same_bytes, vmx, vmx_card, vmx_disk};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::fleet::Fleet;
use testkit::process::{Done, output, tool, until};

/// Number of imports that are killed.
const KILLS: u64 = 10;

/// Runs `vm import` on a path.
fn import(fleet: &Fleet, path: &Path, arguments: &str) -> Done {
    let mut command = fleet.command("import");
    command.arg(path).args(arguments.split_whitespace());
    output(&mut command).into()
}

/// The disks that the guest of a machine has found, in the order of the firmware's numbers.
fn found(fleet: &Fleet, machine: &str) -> Vec<String> {
    let console = || fleet.run(&format!("console {machine} --said")).stdout;
    until(&format!("{machine} has looked for its disks"), || console().contains("guest: done"));
    let text = console();
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("guest: ")?.split_once(' '));
    lines.map(|(_, text)| text.to_owned()).collect()
}

/// Imports and boots a machine; checks which disks its guest finds, the content of its disks, and that its source is
/// unchanged. Returns the output of the import.
#[track_caller]
fn boots(fleet: &Fleet, left: &Left, source: &str, name: &str, arguments: &str, disks: &[&str]) -> Value {
    let before = left.state();
    let made = import(fleet, &left.path().join(source), &format!("--start --json {arguments}")).json();
    let machine = made["machines"][0].clone();
    assert_eq!((&machine["name"], &machine["started"]), (&json!(name), &json!(true)), "{made}");
    let seen = found(fleet, name);
    assert_eq!(seen[0], disks[0], "it boots from another disk: {seen:?}");
    assert_eq!(seen.iter().map(String::as_str).collect::<BTreeSet<_>>(), disks.iter().copied().collect(), "{made}");
    fleet.run(&format!("stop --force {name}")).ok();
    for (disk, text) in machine["disks"].as_array().unwrap().iter().zip(disks) {
        same_bytes(fleet, disk["name"].as_str().unwrap(), &left.content(text));
    }
    assert!(left.state() == before, "the source of {name} was changed");
    machine
}

fn notes(machine: &Value) -> String {
    let notes = machine["notes"].as_array().unwrap().iter();
    notes.map(|note| format!("{} {}: {}\n", note["effect"], note["item"], note["reason"])).collect()
}

#[test]
fn machines_of_esxi() {
    let fleet = Fleet::new();
    let left = Left::new();
    left.disk("web.vmdk", "web-root", "thin");
    left.disk("web_1.vmdk", "web-data", "zeroedthick");
    let disks = vmx_disk("scsi0:0", "web.vmdk") + &vmx_disk("scsi0:1", "web_1.vmdk");
    let scsi = "scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\n";
    let cd = "sata0.present = \"TRUE\"\nsata0:0.present = \"TRUE\"\nsata0:0.deviceType = \"cdrom-image\"\n\
              sata0:0.fileName = \"x.iso\"\n";
    left.write("web.vmx", &vmx("web", &(disks + scsi + cd + &vmx_card(0, "vmxnet3") + &vmx_card(1, "e1000"))));
    let machine = boots(&fleet, &left, "web.vmx", "web", "", &["web-root", "web-data"]);
    assert_eq!(machine["uuid"], "22114d56-4433-6655-7788-99aabbccddee", "the guest's order of bytes since hardware 13");
    assert_eq!((&machine["cpus"], &machine["memory"]), (&json!(2), &json!(64 << 20)));
    assert_eq!(machine["platform"]["chipset"], "i440fx");
    assert_eq!(machine["platform"]["cores"], 2);
    let expected = json!([
        { "name": "web", "slot": 8, "bus": "pvscsi", "unit": 0 },
        { "name": "web-2", "slot": 8, "bus": "pvscsi", "unit": 1 },
    ]);
    assert_eq!(machine["disks"], expected);
    let cards = machine["networks"].as_array().unwrap();
    assert_eq!((&cards[0]["mac"], &cards[0]["model"]), (&json!("00:0c:29:aa:bb:00"), &json!("vmxnet3")));
    assert_eq!((&cards[1]["mac"], &cards[1]["model"]), (&json!("00:0c:29:aa:bb:01"), &json!("e1000")));
    for words in ["sata0:0", "CD drive", "vmci0", "web.nvram", "VM Network"] {
        assert!(notes(&machine).contains(words), "{words}: {}", notes(&machine));
    }
    // The definition is as the import reported it, and clones have the same hardware.
    assert_eq!(fleet.show("web")["disks"], expected);
    fleet.run("clone web copy --full").ok();
    let copy = fleet.show("copy");
    assert_eq!((&copy["disks"][1]["bus"], &copy["platform"]), (&json!("pvscsi"), &machine["platform"]));
    assert_ne!(copy["networks"][0]["mac"], cards[0]["mac"]);
    fleet.run("start copy").ok();
    assert_eq!(found(&fleet, "copy").len(), 2);
    // Importing the same machine again fails and creates nothing.
    import(&fleet, &left.path().join("web.vmx"), "").fails(1, "--name");
    import(&fleet, &left.path().join("web.vmx"), "--name again").ok();
    fleet.run("stop --force copy").ok();
    assert_eq!(fleet.names(), ["again", "copy", "web"]);
    fleet.store.is_clean();
}

#[test]
fn every_controller_is_the_one_of_the_source() {
    let fleet = Fleet::new();
    let left = Left::new();
    let scsi = |model: &str| format!("scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"{model}\"\n");
    let cases = [
        ("sas", scsi("lsisas1068"), "scsi0:0", "scsi0:1", "lsisas", 1),
        ("lsi", scsi("lsilogic"), "scsi0:0", "scsi0:8", "lsi", 1),
        ("bus", scsi("buslogic"), "scsi0:0", "scsi0:1", "lsi", 1),
        ("sata", "sata0.present = \"TRUE\"\n".into(), "sata0:0", "sata0:4", "sata", 4),
        ("nvme", "nvme0.present = \"TRUE\"\n".into(), "nvme0:0", "nvme0:1", "nvme", 1),
        ("ide", String::new(), "ide0:0", "ide1:1", "ide", 3),
    ];
    for (name, controller, first, second, bus, unit) in cases {
        let [root, data] = ["root", "data"].map(|kind| format!("{name}-{kind}"));
        left.qemu_disk(&format!("{name}.vmdk"), &root, "vmdk", "subformat=monolithicSparse");
        left.qemu_disk(&format!("{name}_1.vmdk"), &data, "vmdk", "subformat=twoGbMaxExtentSparse");
        let disks = vmx_disk(first, &format!("{name}.vmdk")) + &vmx_disk(second, &format!("{name}_1.vmdk"));
        left.write(&format!("{name}.vmx"), &vmx(name, &(controller + &disks)));
        let machine = boots(&fleet, &left, &format!("{name}.vmx"), name, "", &[&root, &data]);
        assert_eq!(
            (&machine["disks"][1]["bus"], &machine["disks"][1]["unit"]),
            (&json!(bus), &json!(unit)),
            "{machine}"
        );
        assert_eq!(notes(&machine).contains("53C895A"), bus == "lsi", "{}", notes(&machine));
    }
    // The user chooses other hardware than the source has.
    let machine = boots(&fleet, &left, "lsi.vmx", "by-virtio", "--name by-virtio --virtio", &["lsi-root", "lsi-data"]);
    assert_eq!(machine["disks"][1]["bus"], "virtio");
    let machine =
        boots(&fleet, &left, "lsi.vmx", "by-scsi", "--name by-scsi --bus virtio-scsi", &["lsi-root", "lsi-data"]);
    assert_eq!((&machine["disks"][1]["slot"], &machine["disks"][1]["unit"]), (&json!(8), &json!(1)));
}

/// An OVF descriptor as VirtualBox exports it.
const OVF: &str = include_str!("foreign/box.ovf");

#[test]
fn machines_of_virtualbox_as_ovf_and_ova() {
    let fleet = Fleet::new();
    let left = Left::new();
    for number in [1, 2] {
        let text = format!("box-{number}");
        left.qemu_disk(&format!("box-disk{number}.vmdk"), &text, "vmdk", "subformat=streamOptimized");
    }
    left.write("box.ovf", OVF);
    testkit::process::tool(
        "tar",
        &[
            "-C",
            left.path().to_str().unwrap(),
            "--format=ustar",
            "-cf",
            left.path().join("box.ova").to_str().unwrap(),
            "box.ovf",
            "box-disk1.vmdk",
            "box-disk2.vmdk",
        ],
    );
    for (source, name) in [("box.ovf", "box"), ("box.ova", "boxed")] {
        let arguments = format!("--name {name}");
        let before = left.state();
        let made = import(&fleet, &left.path().join(source), &format!("--start --json {arguments}")).json();
        let machine = &made["machines"][0];
        // The third disk is empty, so the boot sector finds no text on it.
        assert_eq!(found(&fleet, name)[0], "box-1");
        assert_eq!(found(&fleet, name).iter().filter(|text| *text == "box-2").count(), 1);
        fleet.run(&format!("stop --force {name}")).ok();
        same_bytes(&fleet, name, &left.content("box-1"));
        same_bytes(&fleet, &format!("{name}-2"), &left.content("box-2"));
        assert!(left.state() == before);
        let places = machine["disks"].as_array().unwrap().iter();
        let places: Vec<String> =
            places.map(|disk| format!("{} {}", disk["bus"].as_str().unwrap(), disk["unit"])).collect();
        assert_eq!(places, ["sata 0", "ide 3", "sata 2"], "{machine}");
        assert_eq!(
            (&machine["networks"][0]["mac"], &machine["networks"][0]["model"]),
            (&json!("08:00:27:aa:bb:cc"), &json!("e1000"))
        );
        assert_eq!((&machine["platform"]["clock"], &machine["memory"]), (&json!("utc"), &json!(64 << 20)));
        assert!(notes(machine).contains("sound"), "{}", notes(machine));
    }
    import(&fleet, &left.path().join("box.ova"), "--name live --live").fails(1, "without --live");
    // A descriptor whose capacity is not that of the image is refused, also by a dry run.
    let other = tempfile::tempdir().unwrap();
    let folder = other.path();
    for name in ["box-disk1.vmdk", "box-disk2.vmdk"] {
        fs::copy(left.path().join(name), folder.join(name)).unwrap();
    }
    fs::write(folder.join("box.ovf"), OVF.replacen("8388608", "16777216", 1)).unwrap();
    let archive = folder.join("box.ova").display().to_string();
    let members = ["box.ovf", "box-disk1.vmdk", "box-disk2.vmdk"];
    let options = ["-C", folder.to_str().unwrap(), "--format=ustar", "-cf", archive.as_str()];
    testkit::process::tool("tar", &[&options[..], &members].concat());
    for source in ["box.ovf", "box.ova"] {
        for how in ["", "--dry-run"] {
            let refused = import(&fleet, &folder.join(source), &format!("--name other {how}"));
            refused.fails(6, "says that the disk has 16 MiB, and its image has 8 MiB");
        }
    }
    // Imports an archive that lamina itself has written.
    left.disk("own.ova", "own-root", "ova");
    let machine = boots(&fleet, &left, "own.ova", "own", "--memory 64M", &["own-root"]);
    assert_eq!((&machine["disks"][0]["bus"], &machine["memory"]), (&json!("lsi"), &json!(64 << 20)));
    assert_eq!(fleet.unfinished(), [] as [String; 0]);
}

#[test]
fn domains_of_libvirt() {
    let fleet = Fleet::new();
    let left = Left::new();
    let images = Left::new();
    left.qemu_disk("root.qcow2", "dom-root", "qcow2", "");
    tool("qemu-img", &["snapshot", "-c", "before", left.path().join("root.qcow2").to_str().unwrap()]);
    images.qemu_disk("data", "dom-data", "raw", "");
    let xml = |machine: &str, root: &str| {
        format!(
            "<domain type='kvm'>\n<name>dom</name>\n<uuid>1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11</uuid>\n\
             <memory unit='KiB'>65536</memory>\n<vcpu placement='static'>2</vcpu>\n\
             <os><type arch='x86_64' machine='{machine}'>hvm</type></os>\n<clock offset='utc'/>\n<devices>\n\
             <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>\
             <target dev='sda' bus='scsi'/>\
             <address type='drive' controller='0' bus='0' target='0' unit='3'/></disk>\n\
             <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>\
             <target dev='{root}'/><boot order='1'/></disk>\n\
             <disk type='file' device='cdrom'><target dev='sdb' bus='sata'/></disk>\n\
             <controller type='scsi' index='0' model='virtio-scsi'/>\n\
             <interface type='network'><mac address='52:54:00:11:22:33'/><source network='default'/>\
             <model type='virtio'/></interface>\n\
             <hostdev mode='subsystem' type='pci'/>\n<video><model type='vga'/></video>\n</devices></domain>\n",
            images.path().join("data").display(),
            left.path().join("root.qcow2").display()
        )
    };
    left.write("dom.xml", &xml("pc-q35-7.2", "vda' bus='virtio"));
    import(&fleet, &left.path().join("dom.xml"), "").fails(2, "--allow-folder");
    let allow = format!("--allow-folder {}", images.path().display());
    let before = (left.state(), images.state());
    let made = import(&fleet, &left.path().join("dom.xml"), &format!("--start --json {allow}")).json();
    let machine = &made["machines"][0];
    assert_eq!(found(&fleet, "dom"), ["dom-root", "dom-data"]);
    fleet.run("stop --force dom").ok();
    same_bytes(&fleet, "dom", &left.content("dom-root"));
    same_bytes(&fleet, "dom-2", &images.content("dom-data"));
    assert!((left.state(), images.state()) == before);
    assert_eq!(machine["uuid"], "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11");
    assert_eq!((&machine["disks"][0]["bus"], &machine["disks"][1]["bus"]), (&json!("virtio"), &json!("virtio-scsi")));
    assert_eq!((&machine["disks"][1]["unit"], &machine["platform"]["chipset"]), (&json!(3), &json!("q35")));
    assert_eq!(machine["networks"][0]["mac"], "52:54:00:11:22:33");
    assert!(notes(machine).contains("hostdev") && notes(machine).contains("cdrom"), "{}", notes(machine));
    assert!(notes(machine).contains("its image has internal snapshots (1)"), "{}", notes(machine));

    left.write("ide.xml", &xml("pc-i440fx-7.2", "hda' bus='ide"));
    let made = import(&fleet, &left.path().join("ide.xml"), &format!("--start --json --name ide {allow}")).json();
    assert_eq!(
        found(&fleet, "ide").iter().map(String::as_str).collect::<BTreeSet<_>>(),
        ["dom-data", "dom-root"].into()
    );
    assert_eq!(made["machines"][0]["platform"]["chipset"], "i440fx");
}

#[test]
fn a_disk_alone() {
    let fleet = Fleet::new();
    let left = Left::new();
    left.qemu_disk("some disk.qcow2", "alone", "qcow2", "");
    let machine = boots(&fleet, &left, "some disk.qcow2", "some-disk", "--memory 64M --cpus 2", &["alone"]);
    assert_eq!((&machine["disks"][0]["bus"], &machine["networks"][0]["model"]), (&json!("sata"), &json!("e1000e")));
    let machine = boots(&fleet, &left, "some disk.qcow2", "fast", "--memory 64M --name fast --virtio", &["alone"]);
    assert_eq!((&machine["disks"][0]["bus"], &machine["networks"][0]["model"]), (&json!("virtio"), &json!("virtio")));
    left.write("notes.txt", "no disk");
    import(&fleet, &left.path().join("notes.txt"), "").fails(2, "notes.txt");
}

/// Creates a machine with two snapshots of its first disk; the second snapshot also includes the machine's second disk.
fn with_snapshots(left: &Left) {
    left.disk("snap.vmdk", "snap-root", "thin");
    left.disk("data.vmdk", "snap-data", "thin");
    for (child, parent) in
        [("snap-000001.vmdk", "snap.vmdk"), ("snap-000002.vmdk", "snap-000001.vmdk"), ("data-000001.vmdk", "data.vmdk")]
    {
        let mut command = testkit::process::lamina();
        command.args(["image", "create", "--format", "vmfssparse", "--parent"]);
        command.arg(left.path().join(parent)).arg(left.path().join(child));
        let done: Done = output(&mut command).into();
        done.ok();
    }
    let disks = vmx_disk("scsi0:0", "snap-000002.vmdk") + &vmx_disk("scsi0:1", "data-000001.vmdk");
    left.write("snap.vmx", &vmx("snap", &(disks + "scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\n")));
    left.write(
        "snap.vmsd",
        ".encoding = \"UTF-8\"\nsnapshot.lastUID = \"2\"\nsnapshot.current = \"2\"\nsnapshot0.uid = \"1\"\n\
         snapshot0.filename = \"snap-Snapshot1.vmsn\"\nsnapshot0.displayName = \"before the update\"\n\
         snapshot0.createTimeHigh = \"388745\"\nsnapshot0.createTimeLow = \"-100\"\nsnapshot0.numDisks = \"1\"\n\
         snapshot0.disk0.fileName = \"snap.vmdk\"\nsnapshot0.disk0.node = \"scsi0:0\"\nsnapshot.numSnapshots = \"2\"\n\
         snapshot1.uid = \"2\"\nsnapshot1.parent = \"1\"\nsnapshot1.displayName = \"later\"\n\
         snapshot1.createTimeHigh = \"388746\"\nsnapshot1.createTimeLow = \"7\"\nsnapshot1.numDisks = \"2\"\n\
         snapshot1.disk0.fileName = \"snap-000001.vmdk\"\nsnapshot1.disk0.node = \"scsi0:0\"\n\
         snapshot1.disk1.fileName = \"data.vmdk\"\nsnapshot1.disk1.node = \"scsi0:1\"\n",
    );
}

#[test]
fn snapshots_of_the_source_are_snapshots_of_the_machine() {
    let fleet = Fleet::new();
    let left = Left::new();
    with_snapshots(&left);
    let machine = boots(&fleet, &left, "snap.vmx", "snap", "", &["snap-root", "snap-data"]);
    assert_eq!(machine["snapshots"], json!(["before-the-update", "later"]), "{machine}");
    assert!(notes(&machine).contains("its name is 'before-the-update' here"), "{}", notes(&machine));
    let listed = fleet.run("snapshot list snap --json").json();
    let disks: Vec<&Value> = listed["snapshots"].as_array().unwrap().iter().map(|one| &one["disks"]).collect();
    assert_eq!(disks, [&json!(["snap@before-the-update"]), &json!(["snap@later", "snap-2@later"])]);
    assert_eq!(listed["snapshots"][0]["created"], ((388_745_u64 << 32) + (1 << 32) - 100) / 1_000_000);
    testkit::fleet::write(&fleet, "snap", MIB, 5);
    testkit::fleet::write(&fleet, "snap-2", MIB, 6);
    fleet.run("clone snap@later linked").ok();
    same_bytes(&fleet, "linked-2", &left.content("snap-data"));
    fleet.run("delete linked").ok();
    fleet.run("revert snap@later").ok();
    same_bytes(&fleet, "snap", &left.content("snap-root"));
    same_bytes(&fleet, "snap-2", &left.content("snap-data"));
    // When the first snapshot was taken, the machine had one disk.
    fleet.run("revert snap@before-the-update").ok();
    assert_eq!(fleet.show("snap")["disks"].as_array().unwrap().len(), 1);
    fleet.run("start snap").ok();
    assert_eq!(found(&fleet, "snap"), ["snap-root"]);
}

#[test]
fn a_live_import_runs_while_its_blocks_move() {
    let mut fleet = Fleet::new();
    let left = Left::new();
    with_snapshots(&left);
    let before = left.state();
    // The blocks are copied slowly, so that the server is killed and restarted before the copy is complete.
    let made = import(&fleet, &left.path().join("snap.vmx"), "--live --rate 1M --json").json();
    assert_eq!(
        (&made["machines"][0]["started"], &made["machines"][0]["snapshots"][1]),
        (&json!(true), &json!("later"))
    );
    assert_eq!(found(&fleet, "snap").len(), 2);
    testkit::fleet::write(&fleet, "snap", MIB, 5);
    for _ in 0..KILLS {
        fleet.server.take().unwrap().kill();
        fleet.server = Some(fleet.store.serve(""));
        std::thread::sleep(Duration::from_millis(300));
        testkit::fleet::holds(&fleet, "snap", MIB, 5);
        assert_eq!(fleet.state("snap"), "running");
    }
    let arrived = |disk: &str| fleet.store.run(&format!("disk show {disk} --json")).json()["format"] == "native";
    until("the blocks are in the datastore", || arrived("snap") && arrived("snap-2"));
    assert!(left.state() == before, "the source was changed");
    fleet.run("stop --force snap").ok();
    fs::remove_dir_all(left.path()).unwrap();
    testkit::fleet::holds(&fleet, "snap", MIB, 5);
    fleet.run("revert snap@later").ok();
    same_bytes(&fleet, "snap", &left.content("snap-root"));
    same_bytes(&fleet, "snap-2", &left.content("snap-data"));
    fleet.store.is_clean();
}

#[test]
fn a_killed_import_leaves_a_whole_machine_or_none() {
    let fleet = Fleet::new();
    let left = Left::new();
    with_snapshots(&left);
    let before = left.state();
    let mut random = Random(0x1e57);
    for way in ["", "--live"] {
        let begun = Instant::now();
        import(&fleet, &left.path().join("snap.vmx"), &format!("--name whole {way}")).ok();
        let whole = begun.elapsed();
        fleet.run("stop whole --force");
        fleet.run("delete whole").ok();
        let mut killed = 0;
        for round in 0..KILLS {
            let mut command = fleet.command("import");
            command.arg(left.path().join("snap.vmx")).args(way.split_whitespace());
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(whole.mul_f64(random.below(1000) as f64 / 1000.0));
            killed += u32::from(child.try_wait().unwrap().is_none());
            fleet.kill(&mut child);
            let what = format!("round {round}, '{way}'");
            let next = fleet.run("list --json");
            assert_eq!(next.code, 0, "{what}: {next:?}");
            until(&format!("{what}: nothing unfinished is left"), || {
                fleet.run("list").code == 0 && fleet.unfinished().is_empty()
            });
            let disks: Vec<String> = fleet.disks().into_iter().collect();
            match fleet.names().as_slice() {
                [] => assert!(disks.is_empty(), "{what}: {disks:?}"),
                _ => {
                    assert_eq!(disks, ["snap", "snap-2"], "{what}");
                    same_bytes(&fleet, "snap", &left.content("snap-root"));
                    assert_eq!(fleet.run("snapshot list snap --json").json()["snapshots"].as_array().unwrap().len(), 2);
                    fleet.run("stop snap --force");
                    fleet.run("delete snap").ok();
                }
            }
        }
        assert!(killed > KILLS as u32 / 3, "'{way}': {killed} of {KILLS} were killed");
    }
    assert!(left.state() == before, "the source was changed");
    fleet.store.is_clean();
}

#[test]
fn a_tree_of_machines_with_a_report() {
    let fleet = Fleet::new();
    let left = Left::new();
    for name in ["one", "two", "three"] {
        fs::create_dir(left.path().join(name)).unwrap();
        left.disk(&format!("{name}/{name}.vmdk"), &format!("{name}-root"), "thin");
        let scsi = "scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\n";
        left.write(&format!("{name}/{name}.vmx"), &vmx(name, &(vmx_disk("scsi0:0", &format!("{name}.vmdk")) + scsi)));
    }
    // Three of the machines fail: one names a file in another folder, one lacks a disk, and one has an invalid
    // description.
    fs::remove_file(left.path().join("three/three-flat.vmdk")).unwrap();
    for (name, text) in
        [("outside", vmx("outside", &vmx_disk("ide0:0", "/etc/passwd"))), ("broken", "no configuration".into())]
    {
        fs::create_dir(left.path().join(name)).unwrap();
        left.write(&format!("{name}/{name}.vmx"), &text);
    }
    let shown = import(&fleet, &left.path(), "--dry-run --json");
    assert_eq!((fleet.names().len(), fleet.disks().len()), (0, 0));
    let made = import(&fleet, &left.path(), "--json");
    for done in [shown, made] {
        let report: Value = serde_json::from_str(&done.stdout).unwrap();
        let names: Vec<&str> =
            report["machines"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["one", "two"], "{done:?}");
        assert_eq!(report["failed"].as_array().unwrap().len(), 3, "{done:?}");
        for words in ["broken.vmx', line 1", "outside.vmx', line", "--allow-folder '/etc'", "three-flat.vmdk"] {
            assert!(done.stderr.contains(words), "{words}: {done:?}");
        }
        assert_ne!(done.code, 0);
    }
    assert_eq!(fleet.names(), ["one", "two"]);
    assert_eq!(fleet.disks(), ["one", "two"].map(String::from).into());
    let text = import(&fleet, &left.path().join("one/one.vmx"), "--dry-run --name again").ok();
    for words in ["would make machine again from", "pvscsi unit 0, 8 MiB, from scsi0:0", "left out:", "bios, i440fx"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    import(&fleet, &left.path(), "--name x").fails(2, "--name names one");
}

#[test]
fn an_exported_machine_can_be_imported() {
    let fleet = Fleet::new();
    let left = Left::new();
    with_snapshots(&left);
    import(&fleet, &left.path().join("snap.vmx"), "--start").ok();
    let archive = left.path().join("out.ova");
    let export = |source: &str| -> Done { output(fleet.command("export --json").arg(source).arg(&archive)).into() };
    export("snap").fails(7, "export a snapshot of it");
    fleet.run("stop --force snap").ok();
    testkit::fleet::write(&fleet, "snap", MIB, 5);
    let made = export("snap@later").json();
    assert_eq!((&made["name"], &made["capacity"]), (&json!("snap"), &json!(16 << 20)), "{made}");
    export("snap").fails(1, "already");
    let machine = import(&fleet, &archive, "--name back --start --json").json()["machines"][0].clone();
    assert_eq!(found(&fleet, "back"), ["snap-root", "snap-data"]);
    let places = machine["disks"].as_array().unwrap().iter().map(|disk| (&disk["bus"], &disk["unit"]));
    assert_eq!(places.collect::<Vec<_>>(), [(&json!("pvscsi"), &json!(0)), (&json!("pvscsi"), &json!(1))]);
    let original = fleet.show("snap");
    assert_eq!(machine["networks"], original["networks"]);
    assert_eq!((&machine["cpus"], &machine["memory"]), (&original["cpus"], &original["memory"]));
    fleet.run("stop --force back").ok();
    same_bytes(&fleet, "back", &left.content("snap-root"));
    same_bytes(&fleet, "back-2", &left.content("snap-data"));
    // An OVA is a tar archive of an OVF package, which is imported too.
    let package = left.path().join("package");
    fs::create_dir(&package).unwrap();
    testkit::process::tool("tar", &["-xf", archive.to_str().unwrap(), "-C", package.to_str().unwrap()]);
    let descriptor = testkit::process::files(&package).into_iter().find(|name| name.ends_with(".ovf")).unwrap();
    import(&fleet, &package.join(descriptor), "--name loose").ok();
    same_bytes(&fleet, "loose", &left.content("snap-root"));
    same_bytes(&fleet, "loose-2", &left.content("snap-data"));
    fs::remove_file(&archive).unwrap();
    // With `--virtio`, the imported machine has virtio devices in place of VMware's, and the command lists the
    // differences.
    fleet.make("plain", "8M");
    assert!(notes(&export("plain").json()).contains("no virtio"));
}
