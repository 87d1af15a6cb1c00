//! CD-ROM drives and the boot order: guests boot from images with BIOS and UEFI, and images change while machines run.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use testkit::fleet::{Fleet, MEMORY};
use testkit::machines::{KERNEL_LINE, Room, guest};
use testkit::process::tool;

/// The text that the boot loader prints on the console.
fn words(name: &str) -> String {
    format!("the loader of {name}")
}

/// An image that BIOS and UEFI boot from a CD-ROM drive or from a disk. The boot loader prints [`words`], and then
/// executes `commands`.
fn bootable(folder: &Path, name: &str, commands: &str) -> PathBuf {
    let tree = folder.join(format!("{name}.tree"));
    fs::create_dir_all(tree.join("boot/grub")).unwrap();
    let begin = "serial --unit=0\nterminal_input serial\nterminal_output serial\n";
    let text = format!("{begin}echo \"{}\"\n{commands}\n", words(name));
    fs::write(tree.join("boot/grub/grub.cfg"), text).unwrap();
    if commands.contains("linux") {
        for file in ["vmlinuz", "vm-initrd"] {
            fs::copy(guest().join(file), tree.join(file)).unwrap();
        }
    }
    let image = folder.join(format!("{name}.iso"));
    tool("grub-mkrescue", &["-o", image.to_str().unwrap(), tree.to_str().unwrap()]);
    image
}

#[test]
fn a_guest_is_booted_from_an_image_beside_an_empty_disk() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    let commands = format!("linux /vmlinuz {KERNEL_LINE}\ninitrd /vm-initrd\nboot");
    let image = bootable(folder.path(), "install", &commands);
    for firmware in ["bios", "uefi"] {
        let options = format!("--memory 256M --disk-size 1G --firmware {firmware} --start");
        room.run(&format!("vm create {firmware} {options} --cdrom {}", image.display())).ok();
    }
    for (firmware, efi) in [("bios", "no"), ("uefi", "yes")] {
        room.until_says(firmware, &words("install"));
        room.until_says(firmware, "guest: installed");
        room.until_answers(firmware);
        assert_eq!(room.shell(firmware, "[ -d /sys/firmware/efi ] && echo yes || echo no"), efi);
        let shown = room.show(firmware);
        assert_eq!(shown["cdroms"], json!([{ "unit": 0, "file": image }]));
        assert_eq!(shown["boot_order"], json!(["disk", "cdrom"]));
    }
    room.close();
}

#[test]
fn the_firmware_tries_the_devices_in_the_order_of_the_definition() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    let [disk, image] = ["disk", "image"].map(|name| bootable(folder.path(), name, "sleep 1000"));
    for firmware in ["bios", "uefi"] {
        room.run(&format!("disk import {} {firmware} --from raw", disk.display())).ok();
        let options = format!("--memory 128M --disk {firmware} --network none --firmware {firmware}");
        room.run(&format!("vm create {firmware} {options} --cdrom {}", image.display())).ok();
    }
    // Each step changes the boot order that the previous step has set.
    for (order, name) in
        [(None, "disk"), (Some("cdrom,disk"), "image"), (Some("disk"), "disk"), (Some("default"), "disk")]
    {
        for firmware in ["bios", "uefi"] {
            if let Some(order) = order {
                room.run(&format!("vm edit {firmware} --boot {order}")).ok();
            }
            room.run(&format!("vm start {firmware}")).ok();
        }
        for firmware in ["bios", "uefi"] {
            room.until_says(firmware, "the loader of ");
            // The console shows one character after the other.
            room.until_says(firmware, &words(name));
            room.run(&format!("vm stop {firmware} --force")).ok();
        }
    }
    assert_eq!(room.show("bios")["boot_order"], json!(["disk", "cdrom"]));
    room.close();
}

/// The images in the drives, as QEMU has them.
fn in_process(room: &Room, name: &str) -> Vec<Value> {
    let all = room.ask(name, "query-block");
    let drives = all.as_array().unwrap().iter().filter(|one| one["qdev"].as_str().unwrap_or("").contains("cd"));
    drives.map(|drive| drive["inserted"]["image"]["filename"].clone()).collect()
}

#[test]
fn images_are_inserted_and_ejected_while_a_machine_runs() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one.iso", "two.iso"].map(|name| {
        let path = folder.path().join(name);
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        path.canonicalize().unwrap()
    });
    let (first, second) = (one.display(), two.display());
    room.run("vm create web --cdrom /nowhere/x.iso").fails(3, "opening the image '/nowhere/x.iso'");
    room.run(&format!("vm create web --cdrom {}", folder.path().display()))
        .fails(2, "neither a file nor a block device");
    room.run("vm create web --boot floppy").fails(2, "floppy");
    room.run("vm create web --boot disk,disk").fails(2, "twice");
    assert!(room.names().is_empty());
    room.run(&format!("vm create web --memory {MEMORY} --disk-size 1M --network none --cdrom {first} --start")).ok();
    assert_eq!(in_process(&room, "web"), [json!(one)]);
    room.run(&format!("vm edit web --cdrom {second}")).fails(7, "no empty CD-ROM drive");
    room.run("vm edit web --no-cdrom").fails(7, "stop it first");
    room.run("vm edit web --boot cdrom").fails(7, "stop it first");
    room.run("vm edit web --eject three.iso").fails(3, "no CD-ROM drive with");
    room.run("vm snapshot create web@live --memory").ok();
    // `--eject` also accepts the file name of an image.
    room.run("vm edit web --eject one.iso").ok();
    assert_eq!(
        (room.show("web")["cdroms"][0]["file"].clone(), in_process(&room, "web")),
        (json!(null), vec![json!(null)])
    );
    room.run("vm edit web --cdrom /nowhere/x.iso").fails(3, "/nowhere/x.iso");
    room.run(&format!("vm edit web --cdrom {second}")).ok();
    assert_eq!(
        (room.show("web")["cdroms"][0]["file"].clone(), in_process(&room, "web")),
        (json!(two), vec![json!(two)])
    );
    assert!(room.run("vm show web").ok().contains("two.iso"));
    // One command replaces an image.
    room.run(&format!("vm edit web --eject two.iso --cdrom {first}")).ok();
    assert_eq!(in_process(&room, "web"), [json!(one)]);
    room.run("vm edit web --eject one.iso").ok();
    room.run("vm revert web@live").ok();
    assert_eq!(in_process(&room, "web"), [json!(one)]);
    room.run("vm clone web twin --instant --identity keep").ok();
    assert_eq!(in_process(&room, "twin"), [json!(one)]);
    room.run("vm stop web twin --force").ok();

    // A second drive, and an image that is missing when the machine starts.
    room.run(&format!("vm edit web --cdrom {second}")).ok();
    fs::remove_file(&one).unwrap();
    room.run("vm start web").fails(3, "lamina vm edit web --eject");
    room.run("vm edit web --eject one.iso").ok();
    room.run("vm start web").ok();
    assert_eq!(in_process(&room, "web"), [json!(null), json!(two)]);
    room.run("vm stop web --force").ok();
    room.run("vm edit web --no-cdrom").ok();
    assert_eq!(room.show("web")["cdroms"], json!([]));
    room.close();
}

#[test]
fn a_guest_that_has_locked_a_drive_keeps_the_image_unless_forced() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| bootable(folder.path(), name, ""));
    room.boot("web", "192M", "");
    room.run("vm stop web --force").ok();
    let toml = room.store.path().join("machines/web/machine.toml");
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, text.replacen("[boot]", "[platform]\nchipset = \"i440fx\"\n\n[boot]", 1)).unwrap();
    room.run(&format!("vm edit web --cdrom {}", one.display())).ok();
    room.run("vm start web").ok();
    room.until_answers("web");
    room.shell("web", "while read -r module; do insmod /lib/modules/$module.ko; done </lib/modules/cdrom");
    let seen = || room.shell("web", "grep -ho 'loader of [a-z]*' /mnt/boot/grub/grub.cfg");
    room.until("the guest mounts the image", || {
        room.shell("web", "mount -t iso9660 -o ro /dev/sr0 /mnt 2>/dev/null && echo yes || echo no") == "yes"
    });
    assert_eq!(seen(), "loader of one");
    room.run("vm edit web --eject one.iso").fails(4, "unmount the image in the guest, or eject it with --force");
    assert_eq!((seen().as_str(), in_process(&room, "web").len()), ("loader of one", 1));
    room.run("vm edit web --eject one.iso --force").ok();
    room.shell("web", "umount /mnt");
    room.run(&format!("vm edit web --cdrom {}", two.display())).ok();
    room.until("the guest mounts the other image", || {
        room.shell("web", "mount -t iso9660 -o ro /dev/sr0 /mnt 2>/dev/null && echo yes || echo no") == "yes"
    });
    assert_eq!(seen(), "loader of two");
    room.close();
}

#[test]
fn a_machine_with_a_kernel_has_no_boot_order() {
    let fleet = Fleet::new();
    let kernel = fleet.store.path().join("superblock");
    let options = format!("--memory {MEMORY} --network none --kernel {}", kernel.display());
    fleet.run(&format!("create web {options} --boot disk")).fails(2, "--boot");
    fleet.run(&format!("create web {options}")).ok();
    fleet.run("edit web --boot disk").fails(2, "has no boot order");
    assert_eq!(fleet.show("web")["boot_order"], json!([]));
}
