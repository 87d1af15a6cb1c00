//! Tests of definitions: encoding, cloning, and what is refused.

#![allow(clippy::unwrap_used)]
use super::*;

fn machine() -> Definition {
    let mut machine = Definition {
        version: 1,
        name: "web".into(),
        uuid: "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11".parse().unwrap(),
        cpus: 2,
        cpu_model: Some("qemu64,+ssse3".into()),
        memory: 256 << 20,
        platform: Platform::default(),
        ports: 2,
        autostart: true,
        arguments: vec!["-device".into(), "usb-tablet, \"x\"".into()],
        qemu_memory: Some(512 << 20),
        run_as: None,
        write_errors: WriteErrors::Stop,
        boot_order: Vec::new(),
        vnc: None,
        vnc_tls: None,
        new_identity: None,
        seed: None,
        origin: Some(Origin { machine: "base".into(), snapshot: None, way: CloneKind::Linked }),
        boot: Some(Boot { kernel: "/k".into(), initrd: Some("/i".into()), append: "console=ttyS0".into() }),
        disks: Vec::new(),
        cdroms: Vec::new(),
        networks: Vec::new(),
    };
    machine.add_disk("web").unwrap();
    machine.add_disk("data").unwrap();
    machine.add_network("52:54:00:12:34:56".parse().unwrap(), Link::User).unwrap();
    machine.add_network("52:54:00:12:34:57".parse().unwrap(), Link::Bridge("br0".into())).unwrap();
    machine
}

#[test]
fn definitions_are_decoded_as_encoded() {
    let machine = machine();
    let text = machine.to_text().unwrap();
    assert!(text.contains("memory = \"256M\""), "{text}");
    assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
}

#[test]
fn inconsistent_definitions_are_refused() {
    let good = machine().to_text().unwrap();
    for (from, to) in [
        ("cpus = 2", "cpus = 0"),
        ("cpus = 2", "cpus = 256"),
        ("cpus = 2", "cpu = 2"),
        ("qemu64,+ssse3", ""),
        ("qemu64,+ssse3", "help"),
        ("qemu64,+ssse3", "-qemu64"),
        ("qemu64,+ssse3", "qemu64 -S"),
        ("256M", "256K"),
        ("256M", "+256M"),
        ("256M", "15M"),
        ("256M", "99999999T"),
        ("slot = 9", "slot = 8"),
        ("slot = 9", "slot = 34"),
        ("ports = 2", "ports = 9"),
        ("\"-device\"", "\"\""),
        ("slot = 9", "slot = 16"),
        ("slot = 17", "slot = 9"),
        ("name = \"data\"", "name = \"web\""),
        ("name = \"web\"", "name = \"../web\""),
        ("52:54:00:12:34:56", "52:54:00:12:34"),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        let error = Definition::parse(&text, "web").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{to}");
    }
}

/// A machine as an import from another program makes it.
fn foreign() -> Definition {
    let mut machine = machine();
    machine.version = VERSION;
    machine.platform = Platform {
        chipset: Chipset::I440fx,
        firmware: Firmware::Uefi,
        cores: Some(2),
        clock: Clock::Local,
        display: Display::Vga,
        ..Platform::default()
    };
    machine.disks[0] = Disk { name: "web".into(), slot: 8, bus: Bus::Pvscsi, unit: 0 };
    machine.disks[1] = Disk { name: "data".into(), slot: 8, bus: Bus::Pvscsi, unit: 15 };
    machine.disks.push(Disk { name: "old".into(), slot: IDE_SLOT, bus: Bus::Ide, unit: 2 });
    machine.networks[0].model = Card::Vmxnet3;
    machine.boot = None;
    machine.run_as = Some("nobody".into());
    machine.set_vnc(Some("[::1]:5901".parse().unwrap()));
    machine.boot_order = vec![BootDevice::Cdrom, BootDevice::Disk, BootDevice::Network];
    machine.add_cdrom(Some("/srv/x.iso".into())).unwrap();
    machine.add_cdrom(None).unwrap();
    machine
}

#[test]
fn the_hardware_of_other_programs_survives_encoding_and_cloning() {
    let machine = foreign();
    let text = machine.to_text().unwrap();
    assert!(text.contains("version = 2") && text.contains("bus = \"pvscsi\"") && text.contains("unit = 15"), "{text}");
    assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
    let with_defaults = Definition {
        ports: 0,
        autostart: false,
        arguments: Vec::new(),
        qemu_memory: None,
        cpu_model: None,
        write_errors: WriteErrors::default(),
        ..super::tests::machine()
    };
    assert_eq!((machine.needed_version(), with_defaults.needed_version()), (2, 1));
    let origin = Origin { machine: "web".into(), snapshot: None, way: CloneKind::Full };
    let clone = machine.for_clone("copy", origin).unwrap();
    assert_eq!((clone.platform, clone.version), (machine.platform, 2));
    let places =
        |machine: &Definition| machine.disks.iter().map(|disk| (disk.slot, disk.bus, disk.unit)).collect::<Vec<_>>();
    assert_eq!(places(&clone), places(&machine));
    assert_eq!(clone.networks[0].model, Card::Vmxnet3);
    assert!(machine.check_savable().is_err() && super::tests::machine().check_savable().is_ok());
}

#[test]
fn hardware_that_does_not_go_together_is_refused() {
    let good = foreign().to_text().unwrap();
    for (from, to) in [
        ("version = 2", "version = 0"),
        ("chipset = \"i440fx\"", "chipset = \"q35\""),
        ("chipset = \"i440fx\"", "chipset = \"i440fx\"\nsecure_boot = true"),
        ("vnc = \"[::1]:5901\"", "vnc = \"192.0.2.1:5901\""),
        ("vnc = \"[::1]:5901\"", "vnc = \"unix\"\nvnc_tls = { folder = \"/pki\" }"),
        ("display = \"vga\"", "display = \"none\""),
        ("run_as = \"nobody\"", "run_as = \"-nobody\""),
        ("run_as = \"nobody\"", "run_as = \"nobody,x\""),
        ("cores = 2", "cores = 3"),
        ("cores = 2", "cores = 0"),
        ("unit = 15", "unit = 64"),
        ("unit = 15\n", ""),
        ("bus = \"pvscsi\"", "bus = \"lsi\""),
        ("bus = \"pvscsi\"", "bus = \"scsi\""),
        ("slot = 1\n", "slot = 9\n"),
        ("model = \"vmxnet3\"", "model = \"vmxnet2\""),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        assert!(Definition::parse(&text, "web").is_err(), "{to}");
    }
    let newer = good.replacen("version = 2", "version = 3", 1);
    assert_eq!(Definition::parse(&newer, "web").unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn the_disks_of_a_broken_definition_are_found() {
    let good = machine().to_text().unwrap();
    let names = ["web", "data"].map(String::from);
    assert_eq!(named_disks(&good), names);
    for (from, to) in [("cpus = 2", "cpus = two"), ("[boot]", "[boot"), ("slot = 9", "slot ="), ("uuid", "uuit")] {
        let text = good.replacen(from, to, 1);
        assert!(Definition::parse(&text, "web").is_err(), "{to}");
        assert_eq!(named_disks(&text), names, "{to}");
    }
    assert!(named_disks("name = \"web\"\n[[network]]\nname = \"x\"\n[[disk]]\nnames = \"x\"\nname = x").is_empty());
}

#[test]
fn disks_and_network_cards_beyond_the_pci_slots_are_refused() {
    let mut machine = machine();
    for number in 2..DISK_SLOTS.len() {
        machine.add_disk(&format!("d{number}")).unwrap();
    }
    assert_eq!(machine.add_disk("one-more").unwrap_err().kind(), ErrorKind::Invalid);
    machine.plug_disk("plugged").unwrap();
    machine.plug_network("52:54:00:12:34:58".parse().unwrap(), Link::User).unwrap();
    machine.check().unwrap();
    assert!(machine.plug_disk("one-more").unwrap_err().to_string().contains("all 2 ports"));
    assert!(machine.set_ports(1).is_err() && machine.set_ports(9).is_err());
    machine.set_ports(8).unwrap();
    assert!(machine.disks.pop().unwrap().is_in_port() && machine.networks.pop().unwrap().is_in_port());
    machine.disks.remove(3);
    machine.add_disk("again").unwrap();
    machine.check().unwrap();
    assert_eq!(machine.disks.last().unwrap().slot, DISK_SLOTS.start + 3);
}
