//! Machines with UEFI: imported ones boot a Linux guest whose agent answers, and keep their variables.

#![allow(clippy::unwrap_used)]

mod foreign;

use foreign::{Left, MIB, vmx, vmx_card, vmx_disk};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use testkit::machines::{KERNEL_LINE, Room, guest};
use testkit::process::{Done, output, tool};

/// The variables of a new machine, in Debian's package ovmf.
const TEMPLATE: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

fn import(room: &Room, path: &Path, arguments: &str) -> Value {
    let mut command = room.store.command("vm import");
    let done: Done = output(command.arg(path).args(["--json"]).args(arguments.split_whitespace())).into();
    done.json()["machines"][0].clone()
}

/// A raw disk with a FAT file system from which the firmware starts a Linux guest.
fn efi_disk(path: &Path) {
    let disk = path.to_str().unwrap();
    fs::File::create(path).unwrap().set_len(40 * MIB).unwrap();
    tool("mformat", &["-i", disk, "-h", "16", "-s", "63", "-t", "81", "::"]);
    let script = path.with_extension("nsh");
    fs::write(&script, format!("fs0:\\vmlinuz.efi initrd=\\initrd {KERNEL_LINE}\r\n")).unwrap();
    let [kernel, initrd] = ["vmlinuz", "vm-initrd"].map(|name| guest().join(name));
    for (file, name) in [(&kernel, "vmlinuz.efi"), (&initrd, "initrd"), (&script, "startup.nsh")] {
        tool("mcopy", &["-i", disk, file.to_str().unwrap(), &format!("::{name}")]);
    }
    fs::remove_file(script).unwrap();
}

#[test]
fn a_machine_of_esxi_with_uefi_answers() {
    let room = Room::new();
    let left = Left::new();
    efi_disk(&left.path().join("efi-flat.vmdk"));
    let sectors = 40 * MIB / 512;
    left.write(
        "efi.vmdk",
        &format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\
             RW {sectors} VMFS \"efi-flat.vmdk\"\nddb.adapterType = \"lsilogic\"\nddb.virtualHWVersion = \"14\"\n"
        ),
    );
    let scsi = "scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\nfirmware = \"efi\"\n";
    let text = vmx("efi", &(vmx_disk("scsi0:0", "efi.vmdk") + scsi + &vmx_card(0, "vmxnet3")));
    left.write("efi.vmx", &text.replace("memSize = \"64\"", "memSize = \"256\""));
    let before = left.state();
    let machine = import(&room, &left.path().join("efi.vmx"), "--start");
    assert_eq!((&machine["platform"]["firmware"], &machine["platform"]["chipset"]), (&json!("uefi"), &json!("q35")));
    assert_eq!(machine["disks"][0]["bus"], "sata", "{machine}");
    assert!(machine["notes"].to_string().contains("UEFI has no driver"), "{machine}");
    room.until_says("efi", "guest: up");
    room.until_answers("efi");
    assert_eq!(room.shell("efi", "ls -d /sys/firmware/efi"), "/sys/firmware/efi");
    assert_eq!(room.shell("efi", "cat /sys/class/dmi/id/product_uuid"), machine["uuid"].as_str().unwrap());
    assert!(left.state() == before, "the source was changed");

    // The variables belong to this machine, and snapshots and clones have copies.
    let folder = room.store.path().join("machines");
    let variables = |machine: &str| fs::read(folder.join(machine).join("nvram")).unwrap();
    assert!(variables("efi") != fs::read(TEMPLATE).unwrap(), "the firmware has written its boot entries");
    room.run("vm snapshot create efi@live --memory").fails(1, "variables of UEFI");
    room.run("vm freeze efi").fails(1, "variables of UEFI");
    room.run("vm clone efi instant --instant").fails(1, "variables of UEFI");
    room.run("vm stop --force efi").ok();
    room.run("vm snapshot create efi@off").ok();
    let then = variables("efi");
    assert!(variables("efi/snapshots/off") == then);
    room.run("vm clone efi linked").ok();
    room.run("vm clone efi@off full --full").ok();
    assert!(variables("linked") == then && variables("full") == then);
    fs::write(folder.join("efi/nvram"), vec![0; then.len()]).unwrap();
    room.run("vm revert efi@off").ok();
    assert!(variables("efi") == then);
    room.run("vm start linked").ok();
    room.until_answers("linked");
    room.close();
}

#[test]
fn variables_of_libvirt_and_secure_boot_are_kept() {
    let room = Room::new();
    let left = Left::new();
    efi_disk(&left.path().join("root.img"));
    let template = "/usr/share/OVMF/OVMF_VARS_4M.ms.fd";
    fs::copy(template, left.path().join("dom_VARS.fd")).unwrap();
    let place = left.path().display().to_string();
    left.write(
        "dom.xml",
        &format!(
            "<domain type='kvm'><name>dom</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type>\n\
             <loader readonly='yes' secure='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.ms.fd</loader>\n\
             <nvram template='{template}'>{place}/dom_VARS.fd</nvram></os>\n<devices>\n\
             <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{place}/root.img'/>\
             <target dev='sda' bus='sata'/></disk>\n</devices></domain>\n"
        ),
    );
    let machine = import(&room, &left.path().join("dom.xml"), "");
    assert_eq!((&machine["platform"]["secure_boot"], &machine["notes"]), (&json!(true), &json!([])), "{machine}");
    let own = room.store.path().join("machines/dom/nvram");
    assert!(fs::read(&own).unwrap() == fs::read(template).unwrap());
    room.run("vm start dom").ok();
    // No boot loader on the disk is signed, and the firmware does not start its own shell either.
    room.until_says("dom", "BdsDxe");
    assert!(!room.console("dom").contains("startup.nsh"), "{}", room.console("dom"));
    room.run("vm stop --force dom").ok();
    // No firmware has variables of this length: the error says what the machine needs.
    fs::write(&own, vec![0; 4096]).unwrap();
    room.run("vm start dom").fails(3, "variables of 4096 bytes");
    room.close();
}
