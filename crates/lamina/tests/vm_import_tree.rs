//! Twelve machines as ESXi, Workstation, VirtualBox and libvirt leave them, in one tree: one command imports all, each
//! boots a Linux guest whose agent answers, the disks have the same bytes, and the tree is not changed. Then machines
//! of the tree are imported while they run (`--live`), and imports are killed at random points.
//!
//! `LAMINA_IMPORT_ROUNDS` is the number of rounds with a kill and a live import. Their seed is `LAMINA_IMPORT_SEED`.

#![allow(clippy::unwrap_used)]

mod foreign;

use foreign::{MIB, raw_disk, same_bytes, vmx, vmx_card, vmx_disk};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use testkit::fleet::Fleet;
use testkit::machines::{KERNEL_LINE, PATIENCE, guest};
use testkit::process::{Done, lamina, output, tool, until};
use testkit::{Random, pattern};

/// Capacity of a disk from which a guest boots, and of another disk.
const ROOT: u64 = 48 * MIB;
const DATA: u64 = 8 * MIB;
/// Number of rounds if the environment variable is not set.
const ROUNDS: u64 = 1;
/// The argument of the kernel in the boot image. In the disk of a machine, the machine's name replaces the underscores.
const PLACEHOLDER: &str = "machine=____________";

/// A machine of the tree: its name and description, its firmware, the controllers of its disks, the contents of its
/// disks, and its snapshots.
struct Expected {
    name: &'static str,
    source: String,
    uefi: bool,
    buses: &'static [&'static str],
    contents: Vec<PathBuf>,
    snapshots: &'static [&'static str],
}

/// The tree, and beside it the contents of its disks.
struct Tree {
    folder: tempfile::TempDir,
    template: Vec<u8>,
    machines: Vec<Expected>,
}

impl Tree {
    fn path(&self) -> PathBuf {
        self.folder.path().join("tree")
    }

    /// Creates the folder of a machine; returns its path.
    fn place(&self, name: &str) -> PathBuf {
        let place = self.path().join(name);
        fs::create_dir_all(&place).unwrap();
        place
    }

    /// Makes the content of a disk from which a machine boots, by BIOS and by UEFI; returns its path.
    fn root(&self, name: &str) -> PathBuf {
        let file = self.folder.path().join(format!("{name}-root"));
        let mut bytes = self.template.clone();
        let wanted = format!("machine={name:_<12}");
        let places: Vec<usize> = bytes
            .windows(PLACEHOLDER.len())
            .enumerate()
            .filter_map(|(at, window)| (window == PLACEHOLDER.as_bytes()).then_some(at))
            .collect();
        assert!(!places.is_empty() && wanted.len() == PLACEHOLDER.len(), "{wanted}");
        for at in places {
            bytes[at..at + wanted.len()].copy_from_slice(wanted.as_bytes());
        }
        assert!(bytes.len() as u64 + MIB <= ROOT, "{} bytes", bytes.len());
        fs::write(&file, bytes).unwrap();
        let disk = fs::File::options().write(true).open(&file).unwrap();
        disk.set_len(ROOT).unwrap();
        let seed = name.bytes().fold(3, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        disk.write_all_at(&pattern::bytes(seed, MIB as usize / 2), ROOT - MIB).unwrap();
        file
    }

    /// Makes the content of a disk from which no machine boots; returns its path.
    fn data(&self, name: &str) -> PathBuf {
        let file = self.folder.path().join(format!("{name}-data"));
        raw_disk(&file, &format!("{name}-data"), DATA);
        file
    }

    fn expect(
        &mut self,
        (name, ending): (&'static str, &str),
        uefi: bool,
        buses: &'static [&'static str],
        contents: Vec<PathBuf>,
        snapshots: &'static [&'static str],
    ) {
        let source = format!("{name}/{name}.{ending}");
        self.machines.push(Expected { name, source, uefi, buses, contents, snapshots });
    }

    /// Names, times and checksums of all files, for a check that nothing was written.
    fn state(&self) -> String {
        let script =
            "cd \"$1\" && find . -printf '%p %T@ %m %s\\n' | sort && find . -type f -exec sha256sum {} + | sort";
        tool("sh", &["-c", script, "sh", self.path().to_str().unwrap()])
    }
}

/// Converts a raw disk to a format of VMware.
fn vmware(raw: &Path, target: &Path, format: &str) {
    let mut command = lamina();
    let done: Done = output(command.args(["convert", "--from", "raw", "-d", format]).arg(raw).arg(target)).into();
    done.ok();
}

/// Writes a disk with qemu-img.
fn qemu(raw: &Path, target: &Path, format: &str, options: &str) {
    let mut arguments = vec!["convert", "-f", "raw", "-O", format];
    if !options.is_empty() {
        arguments.extend(["-o", options]);
    }
    tool("qemu-img", &[&arguments[..], &[raw.to_str().unwrap(), target.to_str().unwrap()]].concat());
}

/// Writes the configuration of a machine of VMware with the given lines.
fn configure(place: &Path, name: &str, lines: &[String]) {
    let text = vmx(name, &(lines.concat() + &vmx_card(0, "vmxnet3")));
    fs::write(place.join(format!("{name}.vmx")), text.replace("memSize = \"64\"", "memSize = \"256\"")).unwrap();
}

fn scsi(model: &str) -> String {
    format!("scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"{model}\"\n")
}

fn present(controller: &str) -> String {
    format!("{controller}.present = \"TRUE\"\n")
}

/// The image that every guest boots: by GRUB, the kernel and the initial RAM disk of the guest.
fn template() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("tree");
    fs::create_dir_all(tree.join("boot/grub")).unwrap();
    let loader = format!(
        "serial --unit=0\nterminal_input serial\nterminal_output serial\n\
         linux /vmlinuz {KERNEL_LINE} {PLACEHOLDER}\ninitrd /vm-initrd\nboot\n"
    );
    fs::write(tree.join("boot/grub/grub.cfg"), loader).unwrap();
    for file in ["vmlinuz", "vm-initrd"] {
        fs::copy(guest().join(file), tree.join(file)).unwrap();
    }
    let image = folder.path().join("image");
    tool("grub-mkrescue", &["-o", image.to_str().unwrap(), tree.to_str().unwrap()]);
    fs::read(image).unwrap()
}

/// Four machines of ESXi: pvscsi and LSI Logic, UEFI, two disks, snapshots.
fn esxi(tree: &mut Tree) {
    let place = tree.place("esxi-pvscsi");
    let disks = vec![tree.root("esxi-pvscsi"), tree.data("esxi-pvscsi")];
    vmware(&disks[0], &place.join("esxi-pvscsi.vmdk"), "thin");
    vmware(&disks[1], &place.join("esxi-pvscsi_1.vmdk"), "zeroedthick");
    let lines = [vmx_disk("scsi0:0", "esxi-pvscsi.vmdk"), vmx_disk("scsi0:1", "esxi-pvscsi_1.vmdk"), scsi("pvscsi")];
    configure(&place, "esxi-pvscsi", &lines);
    tree.expect(("esxi-pvscsi", "vmx"), false, &["pvscsi", "pvscsi"], disks, &[]);

    let place = tree.place("esxi-lsi");
    let disks = vec![tree.root("esxi-lsi")];
    vmware(&disks[0], &place.join("esxi-lsi.vmdk"), "zeroedthick");
    configure(&place, "esxi-lsi", &[vmx_disk("scsi0:0", "esxi-lsi.vmdk"), scsi("lsilogic")]);
    tree.expect(("esxi-lsi", "vmx"), false, &["lsi"], disks, &[]);

    let place = tree.place("esxi-efi");
    let disks = vec![tree.root("esxi-efi")];
    vmware(&disks[0], &place.join("esxi-efi.vmdk"), "thin");
    let efi = "firmware = \"efi\"\n".to_owned();
    configure(&place, "esxi-efi", &[vmx_disk("scsi0:0", "esxi-efi.vmdk"), scsi("pvscsi"), efi]);
    // The firmware of distributions cannot boot from VMware's controllers.
    tree.expect(("esxi-efi", "vmx"), true, &["sata"], disks, &[]);

    let place = tree.place("esxi-snap");
    let disks = vec![tree.root("esxi-snap"), tree.data("esxi-snap")];
    vmware(&disks[0], &place.join("esxi-snap.vmdk"), "thin");
    vmware(&disks[1], &place.join("data.vmdk"), "thin");
    for (child, parent) in [
        ("esxi-snap-000001.vmdk", "esxi-snap.vmdk"),
        ("esxi-snap-000002.vmdk", "esxi-snap-000001.vmdk"),
        ("data-000001.vmdk", "data.vmdk"),
    ] {
        let mut command = lamina();
        command.args(["image", "create", "--format", "vmfssparse", "--parent"]).arg(place.join(parent));
        let done: Done = output(command.arg(place.join(child))).into();
        done.ok();
    }
    let lines = [vmx_disk("scsi0:0", "esxi-snap-000002.vmdk"), vmx_disk("scsi0:1", "data-000001.vmdk"), scsi("pvscsi")];
    configure(&place, "esxi-snap", &lines);
    let list = ".encoding = \"UTF-8\"\nsnapshot.lastUID = \"2\"\nsnapshot.current = \"2\"\nsnapshot0.uid = \"1\"\n\
         snapshot0.displayName = \"first\"\nsnapshot0.createTimeHigh = \"388745\"\nsnapshot0.createTimeLow = \"-100\"\n\
         snapshot0.numDisks = \"1\"\nsnapshot0.disk0.fileName = \"esxi-snap.vmdk\"\nsnapshot0.disk0.node = \"scsi0:0\"\n\
         snapshot.numSnapshots = \"2\"\nsnapshot1.uid = \"2\"\nsnapshot1.parent = \"1\"\n\
         snapshot1.displayName = \"second\"\nsnapshot1.createTimeHigh = \"388746\"\nsnapshot1.createTimeLow = \"7\"\n\
         snapshot1.numDisks = \"2\"\nsnapshot1.disk0.fileName = \"esxi-snap-000001.vmdk\"\n\
         snapshot1.disk0.node = \"scsi0:0\"\nsnapshot1.disk1.fileName = \"data.vmdk\"\n\
         snapshot1.disk1.node = \"scsi0:1\"\n";
    fs::write(place.join("esxi-snap.vmsd"), list).unwrap();
    tree.expect(("esxi-snap", "vmx"), false, &["pvscsi", "pvscsi"], disks, &["first", "second"]);
}

/// Four machines of Workstation: SAS, SATA, NVMe with UEFI, IDE, in the formats of its disks.
fn workstation(tree: &mut Tree) {
    let place = tree.place("ws-sas");
    let disks = vec![tree.root("ws-sas")];
    qemu(&disks[0], &place.join("ws-sas.vmdk"), "vmdk", "subformat=monolithicSparse");
    configure(&place, "ws-sas", &[vmx_disk("scsi0:0", "ws-sas.vmdk"), scsi("lsisas1068")]);
    tree.expect(("ws-sas", "vmx"), false, &["lsisas"], disks, &[]);

    let place = tree.place("ws-sata");
    let disks = vec![tree.root("ws-sata"), tree.data("ws-sata")];
    qemu(&disks[0], &place.join("ws-sata.vmdk"), "vmdk", "subformat=twoGbMaxExtentSparse");
    qemu(&disks[1], &place.join("ws-sata-2.vmdk"), "vmdk", "subformat=monolithicFlat");
    let lines = [vmx_disk("sata0:0", "ws-sata.vmdk"), vmx_disk("sata0:3", "ws-sata-2.vmdk"), present("sata0")];
    configure(&place, "ws-sata", &lines);
    tree.expect(("ws-sata", "vmx"), false, &["sata", "sata"], disks, &[]);

    let place = tree.place("ws-nvme");
    let disks = vec![tree.root("ws-nvme")];
    qemu(&disks[0], &place.join("ws-nvme.vmdk"), "vmdk", "subformat=monolithicSparse");
    let efi = "firmware = \"efi\"\n".to_owned();
    configure(&place, "ws-nvme", &[vmx_disk("nvme0:0", "ws-nvme.vmdk"), present("nvme0"), efi]);
    tree.expect(("ws-nvme", "vmx"), true, &["nvme"], disks, &[]);

    let place = tree.place("ws-ide");
    let disks = vec![tree.root("ws-ide"), tree.data("ws-ide")];
    qemu(&disks[0], &place.join("ws-ide.vmdk"), "vmdk", "subformat=monolithicFlat");
    qemu(&disks[1], &place.join("ws-ide-2.vmdk"), "vmdk", "subformat=twoGbMaxExtentFlat");
    configure(&place, "ws-ide", &[vmx_disk("ide0:0", "ws-ide.vmdk"), vmx_disk("ide1:0", "ws-ide-2.vmdk")]);
    tree.expect(("ws-ide", "vmx"), false, &["ide", "ide"], disks, &[]);
}

/// Two machines of VirtualBox: an archive that it has exported, and a folder of its own.
fn virtualbox(tree: &mut Tree) {
    let place = tree.place("box-ova");
    let disks = vec![tree.root("box-ova"), tree.data("box-ova")];
    let export = tree.folder.path().join("export");
    fs::create_dir(&export).unwrap();
    for (number, disk) in [(1, &disks[0]), (2, &disks[1])] {
        qemu(disk, &export.join(format!("box-disk{number}.vmdk")), "vmdk", "subformat=streamOptimized");
    }
    let text = include_str!("foreign/box.ovf").replacen("8388608", &ROOT.to_string(), 1);
    let text =
        text.replace("VirtualQuantity>64<", "VirtualQuantity>256<").replace("ovf:id=\"box\"", "ovf:id=\"box-ova\"");
    fs::write(export.join("box.ovf"), text).unwrap();
    let archive = place.join("box-ova.ova");
    let members = ["box.ovf", "box-disk1.vmdk", "box-disk2.vmdk"];
    let options = ["-C", export.to_str().unwrap(), "--format=ustar", "-cf", archive.to_str().unwrap()];
    tool("tar", &[&options[..], &members].concat());
    tree.expect(("box-ova", "ova"), false, &["sata", "ide", "sata"], disks, &[]);

    let place = tree.place("box");
    let disks = vec![tree.root("box"), tree.data("box")];
    qemu(&disks[0], &place.join("box.vmdk"), "vmdk", "subformat=monolithicSparse");
    qemu(&disks[1], &place.join("data.vmdk"), "vmdk", "subformat=monolithicFlat");
    fs::write(place.join("box.vbox"), include_str!("foreign/box.vbox")).unwrap();
    tree.expect(("box", "vbox"), false, &["ide", "sata"], disks, &[]);
}

/// Two domains of libvirt: q35 with UEFI and virtio, i440fx with IDE.
fn libvirt(tree: &mut Tree) {
    let firmware = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>";
    for (name, machine, loader, bus, buses) in [
        ("kvm-virtio", "pc-q35-7.2", firmware, ["vda' bus='virtio", "sda' bus='sata"], &["virtio", "sata"]),
        ("kvm-ide", "pc-i440fx-7.2", "", ["hda' bus='ide", "hdb' bus='ide"], &["ide", "ide"]),
    ] {
        let place = tree.place(name);
        let disks = vec![tree.root(name), tree.data(name)];
        qemu(&disks[0], &place.join("root.qcow2"), "qcow2", "");
        fs::copy(&disks[1], place.join("data.img")).unwrap();
        let disk = |format: &str, file: &str, target: &str| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='{format}'/><source file='{}'/>\
                 <target dev='{target}'/></disk>\n",
                place.join(file).display()
            )
        };
        let text = format!(
            "<domain type='kvm'>\n<name>{name}</name>\n<memory unit='KiB'>262144</memory>\n<vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='{machine}'>hvm</type>{loader}</os>\n<clock offset='utc'/>\n<devices>\n{}{}\
             <interface type='network'><mac address='52:54:00:11:22:33'/><source network='default'/>\
             <model type='virtio'/></interface>\n</devices></domain>\n",
            disk("qcow2", "root.qcow2", bus[0]),
            disk("raw", "data.img", bus[1])
        );
        fs::write(place.join(format!("{name}.xml")), text).unwrap();
        tree.expect((name, "xml"), !loader.is_empty(), buses, disks, &[]);
    }
}

fn tree() -> Tree {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("tree")).unwrap();
    let mut tree = Tree { folder, template: template(), machines: Vec::new() };
    for make in [esxi, workstation, virtualbox, libvirt] {
        make(&mut tree);
    }
    assert_eq!(tree.machines.len(), 12);
    tree
}

/// Waits until the agent of a guest answers; checks that the guest belongs to this machine, and whether BIOS or UEFI
/// has booted it.
#[track_caller]
fn answers(fleet: &Fleet, expected: &Expected) {
    let name = expected.name;
    let begun = Instant::now();
    let line = loop {
        let told = fleet.run(&format!("exec {name} -- /bin/cat /proc/cmdline"));
        if told.code == 0 {
            break told.stdout;
        }
        let console = || fleet.run(&format!("console {name} --said")).stdout;
        assert!(begun.elapsed() < PATIENCE, "{name} does not answer: {told:?}: {}", console());
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(line.contains(&format!("machine={name:_<12}")), "{name}: {line}");
    let efi = fleet.run(&format!("exec {name} -- /bin/ls -d /sys/firmware/efi")).code == 0;
    assert_eq!(efi, expected.uefi, "{name}");
}

/// Checks the disks of a machine that is off, its controllers and its snapshots.
#[track_caller]
fn is_whole(fleet: &Fleet, expected: &Expected) {
    let name = expected.name;
    let shown = fleet.show(name);
    let disks = shown["disks"].as_array().unwrap();
    let buses: Vec<&str> = disks.iter().map(|disk| disk["bus"].as_str().unwrap()).collect();
    assert_eq!(buses, expected.buses, "{name}");
    for (disk, content) in disks.iter().zip(&expected.contents) {
        same_bytes(fleet, disk["name"].as_str().unwrap(), &fs::read(content).unwrap());
    }
    let listed = fleet.run(&format!("snapshot list {name} --json")).json();
    let names: Vec<&str> =
        listed["snapshots"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, expected.snapshots, "{name}");
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn twelve_machines_of_four_programs() {
    let tree = tree();
    let before = tree.state();
    let fleet = Fleet::new();
    let import = |path: &Path, arguments: &str| -> Done {
        let mut command = fleet.command("import");
        output(command.arg(path).args(arguments.split_whitespace())).into()
    };

    // One command, and its report.
    let report = import(&tree.path(), "--json").json();
    let names = |key: &str| -> BTreeSet<String> {
        report[key].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("machines"), tree.machines.iter().map(|one| one.name.to_owned()).collect());
    assert_eq!(report["failed"], json!([]));
    let notes = |name: &str| {
        let machine: &Value = report["machines"].as_array().unwrap().iter().find(|one| one["name"] == name).unwrap();
        machine["notes"].to_string()
    };
    for (name, words) in [("esxi-lsi", "53C895A"), ("esxi-efi", "UEFI has no driver"), ("box-ova", "sound")] {
        assert!(notes(name).contains(words), "{name}: {}", notes(name));
    }
    for expected in &tree.machines {
        fleet.run(&format!("start {}", expected.name)).ok();
        answers(&fleet, expected);
        fleet.run(&format!("stop --force {}", expected.name)).ok();
        is_whole(&fleet, expected);
        fleet.run(&format!("delete {}", expected.name)).ok();
    }
    assert!(tree.state() == before, "the tree was changed");

    // Imports that are killed, and imports of machines that run meanwhile.
    let mut random = Random(number("LAMINA_IMPORT_SEED", 0x7e57));
    let rounds = number("LAMINA_IMPORT_ROUNDS", ROUNDS);
    let live = |expected: &Expected| if expected.source.ends_with(".ova") { "--start" } else { "--live" };
    let blocks_have_moved = |what: &str| {
        until(&format!("{what}: the blocks have moved"), || {
            let all = fleet.store.run("disk list --json").json();
            all["disks"].as_array().unwrap().iter().all(|disk| disk["format"] == "native")
        });
    };
    for round in 0..rounds {
        let expected = &tree.machines[random.below(tree.machines.len() as u64) as usize];
        let (name, way) = (expected.name, live(expected));
        let what = format!("round {round}, {name}");
        let source = tree.path().join(&expected.source);
        let begun = Instant::now();
        import(&source, way).ok();
        let whole = begun.elapsed();
        answers(&fleet, expected);
        blocks_have_moved(&what);
        assert!(tree.state() == before, "{what}: the tree was changed");
        fleet.run(&format!("stop --force {name}")).ok();
        is_whole(&fleet, expected);
        fleet.run(&format!("delete {name}")).ok();

        let way = if random.below(2) == 0 { "" } else { way };
        let mut delay = whole.mul_f64(random.below(1000) as f64 / 1000.0);
        loop {
            let mut command = fleet.command("import");
            command.arg(&source).args(way.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().unwrap();
            std::thread::sleep(delay);
            if child.try_wait().unwrap().is_none() {
                fleet.kill(&mut child);
                break;
            }
            // This import was faster than the one whose time was taken: it has nothing to kill.
            blocks_have_moved(&what);
            fleet.run(&format!("stop --force {name}"));
            is_whole(&fleet, expected);
            fleet.run(&format!("delete {name}")).ok();
            delay /= 2;
        }
        until(&format!("{what}: nothing unfinished is left"), || {
            fleet.run("list").code == 0 && fleet.unfinished().is_empty()
        });
        if fleet.names().is_empty() {
            assert_eq!(fleet.disks(), BTreeSet::new(), "{what}");
        } else {
            fleet.run(&format!("stop --force {name}"));
            is_whole(&fleet, expected);
            fleet.run(&format!("delete {name}")).ok();
        }
    }
    assert!(tree.state() == before, "the tree was changed");
    fleet.store.is_clean();
}
