//! Descriptions that are accepted, and descriptions that are refused with the number of the wrong line.

#![allow(clippy::unwrap_used)]

use super::plan::{Plan, plan};
use super::*;
use crate::definition::{Chipset, Clock, Definition, IDE_SLOT};

const VMX: &str = "config.version = \"8\"\nvirtualHW.version = \"11\"\n";
const OS: &str = "<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>";

fn options() -> Options {
    Options { name: Some("web".into()), ..Options::default() }
}

fn planned(format: Format, text: &str, options: &Options) -> Plan {
    let mut machines = parse(format, text.as_bytes()).unwrap();
    assert_eq!(machines.len(), 1);
    plan(machines.remove(0), options).unwrap()
}

fn places(machine: &Definition) -> Vec<(u8, Bus, u8)> {
    machine.disks.iter().map(|disk| (disk.slot, disk.bus, disk.unit)).collect()
}

fn notes(plan: &Plan) -> String {
    plan.notes.iter().map(|note| format!("{}: {}\n", note.item, note.reason)).collect()
}

/// A configuration with disks at the given addresses.
fn vmx(more: &str, disks: &[&str]) -> String {
    let disk = |device: &&str| format!("{device}.present = \"TRUE\"\n{device}.fileName = \"{device}.vmdk\"\n");
    format!("{VMX}{more}{}", disks.iter().map(disk).collect::<String>())
}

#[test]
fn what_vmware_writes() {
    let text = vmx(
        "displayName = \"Web |22x|22\"\nmemSize = \"2048\"\nnumvcpus = \"6\"\ncpuid.coresPerSocket = \"3\"\n\
         guestOS = \"windows9Server64Guest\"\nuuid.bios = \"56 4d 11 22 33 44 55 66-77 88 99 aa bb cc dd ee\"\n\
         scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\nscsi1.present = \"TRUE\"\n\
         scsi1.virtualDev = \"LSISAS1068\"\nscsi2.present = \"FALSE\"\nbios.hddOrder = \"scsi1:2,scsi0:0\"\n\
         scsi1:2.mode = \"independent-nonpersistent\"\nscsi1.sharedBus = \"virtual\"\nscsi0.sharedBus = \"none\"\n\
         scsi0:15.sharing = \"multi-writer\"\nscsi0:9.present = \"FALSE\"\nscsi0:9.fileName = \"gone.vmdk\"\n\
         ethernet1.present = \"TRUE\"\nethernet1.addressType = \"static\"\nethernet1.address = \"00:50:56:AA:BB:CC\"\n\
         ethernet1.startConnected = \"FALSE\"\nfloppy0.present = \"TRUE\"\nvtpm.present = \"TRUE\"\n",
        &["scsi0:0", "scsi0:15", "scsi1:2", "scsi2:0", "ide1:0"],
    );
    let plan = planned(Format::Vmx, &text, &Options { name: None, ..options() });
    let machine = &plan.definition;
    assert_eq!((machine.name.as_str(), machine.cpus, machine.memory), ("Web-x", 6, 2 << 30));
    assert_eq!((machine.platform.cores, machine.platform.clock), (Some(3), Clock::Local));
    assert_eq!(machine.uuid.to_string(), "564d1122-3344-5566-7788-99aabbccddee", "the order before hardware 13");
    // The boot disk is the first disk, and so gets the first slot.
    let expected = [(8, Bus::Lsisas, 2), (9, Bus::Pvscsi, 0), (9, Bus::Pvscsi, 15), (IDE_SLOT, Bus::Ide, 2)];
    assert_eq!(places(machine), expected);
    assert_eq!((plan.disks[0].label.as_str(), plan.disks[0].name.as_str()), ("scsi1:2", "Web-x"));
    let card = &machine.networks[0];
    assert_eq!(
        (card.mac.to_string().as_str(), &card.link, card.model),
        ("00:50:56:aa:bb:cc", &Link::None, Card::Pcnet)
    );
    for words in ["floppy0", "vtpm", "BitLocker", "scsi1:2: VMware discards the writes", "scsi1:2: several machines"] {
        assert!(notes(&plan).contains(words), "{words}: {}", notes(&plan));
    }
    assert!(notes(&plan).contains("scsi0:15: several machines") && !notes(&plan).contains("scsi0:0: several machines"));
}

#[test]
fn what_cannot_be_as_it_was_is_noted() {
    // The address 15 exists in VMware's controller, but not in QEMU's.
    let scsi = "memSize = \"64\"\nscsi0.present = \"TRUE\"\n";
    let plan = planned(Format::Vmx, &vmx(scsi, &["scsi0:0", "scsi0:12"]), &options());
    assert_eq!(places(&plan.definition), [(8, Bus::Lsi, 0), (8, Bus::Lsi, 1)]);
    assert!(notes(&plan).contains("scsi0:12") && notes(&plan).contains("the disk's address is 1"), "{}", notes(&plan));
    // UEFI boots from SATA, unless the user chooses a controller; the controllers of other disks are kept.
    let uefi = "memSize = \"64\"\nfirmware = \"efi\"\nscsi0.present = \"TRUE\"\nscsi0.virtualDev = \"pvscsi\"\n\
                scsi1.present = \"TRUE\"\nscsi1.virtualDev = \"pvscsi\"\n";
    let text = vmx(uefi, &["scsi0:0", "scsi0:1", "scsi1:0"]);
    let plan = planned(Format::Vmx, &text, &options());
    assert_eq!(places(&plan.definition), [(8, Bus::Sata, 0), (8, Bus::Sata, 1), (9, Bus::Pvscsi, 0)]);
    assert_eq!(plan.definition.platform.chipset, Chipset::Q35);
    assert!(notes(&plan).contains("scsi0: UEFI has no driver for pvscsi"), "{}", notes(&plan));
    let kept = planned(Format::Vmx, &text, &Options { bus: Some(Bus::Pvscsi), ..options() });
    assert_eq!(places(&kept.definition), [(8, Bus::Pvscsi, 0), (8, Bus::Pvscsi, 1), (8, Bus::Pvscsi, 2)]);
    let bios = planned(Format::Vmx, &text, &Options { firmware: Some(Firmware::Bios), ..options() });
    assert_eq!(bios.definition.disks[0].bus, Bus::Pvscsi);
    // Two disks attached by virtio-blk need two slots.
    let virtio = Options { bus: Some(Bus::Virtio), card: Some(Card::Virtio), ..options() };
    let plan = planned(Format::Vmx, &text, &virtio);
    assert_eq!(places(&plan.definition), [(8, Bus::Virtio, 0), (9, Bus::Virtio, 0), (10, Bus::Virtio, 0)]);
}

#[test]
fn refused_configurations_are_named_with_the_line() {
    for (text, words) in [
        ("displayName = \"x\"\n".to_owned(), "no configuration of a machine"),
        (format!("{VMX}encryption.keySafe = \"v\"\n"), "decrypt it"),
        (format!("{VMX}guestOS = \"arm-debian12-64\"\n"), "ARM"),
        (format!("{VMX}memSize = \"many\"\n"), "line 3, memSize: 'many' is no number"),
        (format!("{VMX}numvcpus = \"4294967296\"\n"), "line 3, numvcpus"),
        (format!("{VMX}firmware = \"coreboot\"\n"), "line 3, firmware: neither bios nor efi"),
        (format!("{VMX}uuid.bios = \"56 4d\"\n"), "line 3, uuid.bios"),
        (
            vmx("scsi0.present = \"TRUE\"\nscsi0.virtualDev = \"new\"\n", &["scsi0:0"]),
            "line 4, scsi0.virtualDev: 'new'",
        ),
        (vmx("scsi0:0.deviceType = \"tape\"\nscsi0.present = \"TRUE\"\n", &["scsi0:0"]), "line 3, scsi0:0.deviceType"),
        (format!("{VMX}ide0:0.present = \"TRUE\"\n"), "line 3, ide0:0.present: the device has no file"),
    ] {
        let error = parse(Format::Vmx, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("'description'") && error.contains(words), "{words}: {error}");
    }
    // QEMU needs more than 8 MiB of memory, so the plan refuses the machine; the error names the file.
    let machine = parse(Format::Vmx, format!("{VMX}memSize = \"8\"\n").as_bytes()).unwrap().remove(0);
    let error = plan(machine, &options()).unwrap_err().to_string();
    assert!(error.contains("'description'") && error.contains("16 MiB"), "{error}");
}

#[test]
fn a_disk_is_not_looked_for_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web.vmx");
    let scsi = "memSize = \"64\"\nscsi0.present = \"TRUE\"\n";
    for (name, words) in [("/etc/passwd", "--allow-folder '/etc'"), ("missing.vmdk", "there is no file")] {
        let text = vmx(scsi, &["scsi0:0"]).replace("scsi0:0.vmdk", name);
        let permitted = paths::Permitted::beside(&path, &[]).unwrap();
        let error = vmx::read(&path, text.as_bytes(), &permitted).unwrap_err().to_string();
        assert!(error.contains("line 6, scsi0:0.fileName") && error.contains(words), "{error}");
    }
}

fn domain(more: &str) -> String {
    format!("<domain><name>d</name><memory unit='MiB'>64</memory>{OS}\n<devices>\n{more}</devices></domain>")
}

#[test]
fn what_libvirt_writes() {
    let disk = |target: &str, bus: &str, more: &str| {
        format!(
            "<disk type='file'><driver type='raw'/><source file='/{target}'/><target dev='{target}' bus='{bus}'/>{more}</disk>"
        )
    };
    let address = |unit: u32| format!("<address type='drive' controller='1' bus='0' target='0' unit='{unit}'/>");
    let text = domain(
        &[
            disk("vda", "virtio", ""),
            disk("vdb", "virtio", "<boot order='1'/>"),
            disk("sda", "scsi", &address(4)),
            disk("sdb", "sata", ""),
            disk("sdc", "usb", ""),
            "<controller type='scsi' index='1' model='virtio-scsi'/><tpm model='tpm-crb'/><serial type='pty'/>".into(),
            "<interface type='bridge'><source bridge='br0'/><model type='ne2k_pci'/><link state='down'/></interface>"
                .into(),
        ]
        .concat(),
    );
    let plan = planned(Format::Libvirt, &text, &options());
    assert_eq!(
        plan.disks.iter().map(|disk| disk.label.as_str()).collect::<Vec<_>>(),
        ["vdb", "vda", "sda", "sdb", "sdc"]
    );
    let expected =
        [(8, Bus::Virtio, 0), (9, Bus::Virtio, 0), (10, Bus::VirtioScsi, 4), (11, Bus::Sata, 1), (12, Bus::Sata, 2)];
    assert_eq!(places(&plan.definition), expected);
    assert_eq!((plan.definition.networks[0].model, &plan.definition.networks[0].link), (Card::E1000e, &Link::None));
    for words in ["tpm", "no bus 'usb'", "no 'ne2k_pci'"] {
        assert!(notes(&plan).contains(words), "{words}: {}", notes(&plan));
    }
    let removable = "<disk device='cdrom'><source file='/x.iso'/><target dev='sda'/></disk>\
                     <disk device='floppy'><target dev='fda'/></disk>";
    let processors = "<cpu mode='custom'><model>EPYC</model><feature policy='require' name='pcid'/>\
                      <feature policy='disable' name='sse4a'/></cpu>\
                      <features><hyperv><relaxed state='on'/></hyperv></features><devices>";
    let large = "<disk><source file='/x'/><blockio logical_block_size='4096'/><target dev='vda' bus='virtio'/></disk>";
    let arguments = "</devices><qemu:commandline><qemu:arg value='-s'/></qemu:commandline>";
    let text = domain(&format!("{removable}{large}")).replace("<devices>", processors);
    let plan = planned(Format::Libvirt, &text.replace("</devices>", arguments), &options());
    for words in [
        "vda: its logical blocks of 4096 bytes are blocks of 512 bytes here",
        "commandline: 'lamina vm edit --qemu-arg' adds arguments of QEMU",
        "sda: it is a CD drive ('/x.iso'); 'lamina vm edit --cdrom FILE' adds one",
        "fda: machines have no floppy drives",
        "'lamina vm edit --cpu-model EPYC,+pcid,-sse4a' restricts the guest to the features of the source's CPU",
        "hyperv: Windows runs slower without",
    ] {
        assert!(notes(&plan).contains(words), "{words}: {}", notes(&plan));
    }
}

#[test]
fn sockets_of_libvirt_are_kept_and_lost_properties_are_noted() {
    let devices = "<disk><source file='/x'/><iotune/><serial>S1</serial><target dev='vda' bus='virtio'/></disk>\
                   <interface><source bridge='br0'/><vlan><tag id='7'/></vlan><filterref filter='clean'/></interface>";
    let with = |cpus: u32, topology: &str| {
        let more = format!("<vcpu>{cpus}</vcpu><cputune/><cpu><topology {topology}/></cpu><devices>");
        planned(Format::Libvirt, &domain(devices).replace("<devices>", &more), &options())
    };
    let plan = with(8, "sockets='1' dies='1' cores='4' threads='2'");
    assert_eq!((plan.definition.cpus, plan.definition.platform.cores), (8, Some(8)), "one socket, as before");
    for words in [
        "cpu topology: a socket has 8 cores, without threads",
        "cputune: the processors are neither pinned",
        "vda: it has <iotune> in the source; here the I/O of the disk is not limited",
        "vda: it has <serial> in the source; here the disk has no serial number",
        "card 1: it has <vlan> in the source; here frames of the card get no VLAN tag",
        "card 1: it has <filterref> in the source; here packets of the card are not filtered",
    ] {
        assert!(notes(&plan).contains(words), "{words}: {}", notes(&plan));
    }
    let plan = with(8, "sockets='2' cores='4' threads='1'");
    assert!(plan.definition.platform.cores == Some(4) && !notes(&plan).contains("topology"), "{}", notes(&plan));
    let plan = with(6, "sockets='2' cores='4' threads='1'");
    assert_eq!(plan.definition.platform.cores, None);
    assert!(notes(&plan).contains("4 cores in a socket do not divide the 6 processors"), "{}", notes(&plan));
}

#[test]
fn refused_domains_are_named_with_the_line() {
    let disk = |more: &str| domain(&format!("<disk type='file'>{more}<target dev='vda' bus='virtio'/></disk>"));
    for (text, words) in [
        ("<pool/>".to_owned(), "line 1: it is no domain"),
        ("<domain>\n<name>x</name></domain>".into(), "it has no memory"),
        ("<domain><memory unit='x'>1</memory></domain>".into(), "line 1: the amount of memory"),
        (domain("").replace("x86_64", "aarch64"), "not 'aarch64'"),
        (domain("").replace("<name>", "<uuid>1-2</uuid><name>"), "its uuid"),
        (disk(""), "line 3: disk 'vda' has no source"),
        (disk("<source file='/x'/><driver type='vdi'/>"), "line 3: disk 'vda' has the format 'vdi'"),
        (disk("").replace("type='file'", "type='network'"), "type 'network'"),
        (disk("<source file='/x'/><encryption format='luks'/>"), "line 3: disk 'vda' is encrypted"),
        (disk("<source file='/x'><encryption format='luks'/></source>"), "line 3: disk 'vda' is encrypted"),
        (
            disk("<source file='/x'><slices><slice offset='9' size='9'/></slices></source>"),
            "line 3: disk 'vda' is a slice",
        ),
        (domain("<interface><mac address='01:00:00:00:00:00'/></interface>"), "is no network address"),
    ] {
        let error = parse(Format::Libvirt, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("'description'") && error.contains(words), "{words}: {error}");
    }
}

fn envelope(items: &str) -> String {
    format!(
        "<Envelope><References><File id='f' href='d.vmdk'/><File id='z' href='z.vmdk' compression='gzip'/></References>\n\
         <DiskSection><Disk diskId='d' fileRef='f' capacity='1'/><Disk diskId='z' fileRef='z' capacity='1'/>\
         <Disk diskId='e' capacity='2' capacityAllocationUnits='byte * 2^30'/><Disk diskId='p' parentRef='d'/></DiskSection>\n\
         <VirtualSystem id='x'><VirtualHardwareSection>\n\
         <Item><ResourceType>4</ResourceType><VirtualQuantity>64</VirtualQuantity></Item>\n{items}\
         </VirtualHardwareSection></VirtualSystem></Envelope>"
    )
}

#[test]
fn what_vmware_exports() {
    let controller = |id: u32, kind: u32, name: &str| {
        format!(
            "<Item><InstanceID>{id}</InstanceID><ResourceType>{kind}</ResourceType><ResourceSubType>{name}</ResourceSubType></Item>"
        )
    };
    let disk = |parent: u32, unit: u32, disk: &str| {
        format!(
            "<Item><ElementName>{disk}</ElementName><ResourceType>17</ResourceType><Parent>{parent}</Parent>\
             <AddressOnParent>{unit}</AddressOnParent><HostResource>ovf:/disk/{disk}</HostResource></Item>"
        )
    };
    let text = envelope(
        &[
            disk(3, 1, "d"),
            controller(3, 6, "VirtualSCSI"),
            controller(4, 20, "vmware.nvme.controller"),
            disk(4, 0, "e"),
            "<Item><ResourceType>10</ResourceType><ResourceSubType>VmxNet3</ResourceSubType><Connection>VM Network</Connection></Item>".into(),
            "<Config required='false' key='firmware' value='efi'/><Config key='uefi.secureBoot.enabled' value='true'/>".into(),
        ]
        .concat(),
    );
    let plan = planned(Format::Ova, &text, &options());
    assert_eq!(places(&plan.definition), [(8, Bus::Sata, 1), (9, Bus::Nvme, 0)]);
    assert!(plan.definition.platform.secure_boot && plan.definition.networks[0].model == Card::Vmxnet3);
    let member = Content::Member { archive: "description".into(), member: "d.vmdk".into() };
    assert_eq!((&plan.disks[0].content, &plan.disks[1].content), (&member, &Content::Empty { capacity: 2 << 30 }));
    for (items, words) in [
        (disk(9, 0, "d"), "disk 'd' has no controller"),
        (controller(3, 6, "strange"), "controller 'strange' cannot be mapped"),
        (controller(3, 20, "AHCI") + &disk(3, 0, "x"), "there is no disk 'x'"),
        (controller(3, 20, "AHCI") + &disk(3, 0, "z"), "compression"),
        (controller(3, 20, "AHCI") + &disk(3, 0, "p"), "delta of another disk"),
        (controller(3, 20, "AHCI") + &controller(3, 20, "AHCI"), "one InstanceID"),
        (
            "<Item><ResourceType>3</ResourceType><VirtualQuantity>x</VirtualQuantity></Item>".into(),
            "'x' is no quantity",
        ),
    ] {
        let error = parse(Format::Ovf, envelope(&items).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("'description', line ") && error.contains(words), "{words}: {error}");
    }
}

/// Settings of a machine of VirtualBox, with the disk `{a}` and its child `{b}` registered.
fn vbox(hardware: &str, disk: &str, image: &str) -> String {
    format!(
        "<?xml version=\"1.0\"?>\n<VirtualBox xmlns=\"http://www.virtualbox.org/\" version=\"1.19-linux\">\n\
         <Machine uuid=\"{{1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11}}\" name=\"box\" OSType=\"Debian_64\">\n<MediaRegistry>\n\
         <HardDisks><HardDisk uuid=\"{{00000000-0000-0000-0000-00000000000a}}\" location=\"box.vmdk\" {disk} \
         type=\"Normal\"><HardDisk uuid=\"{{00000000-0000-0000-0000-00000000000b}}\" location=\"Snapshots/b.vmdk\" \
         format=\"VMDK\"/></HardDisk></HardDisks></MediaRegistry>\n<Hardware><CPU count=\"2\"/>\n\
         <Memory RAMSize=\"64\"/>\n{hardware}\n<StorageControllers>\
         <StorageController name=\"IDE\" type=\"PIIX4\" PortCount=\"2\">\
         <AttachedDevice type=\"DVD\" port=\"1\" device=\"0\"/>\
         <AttachedDevice type=\"HardDisk\" port=\"1\" device=\"1\"><Image \
         uuid=\"{{00000000-0000-0000-0000-00000000000{image}}}\"/></AttachedDevice>\
         </StorageController></StorageControllers></Hardware></Machine></VirtualBox>\n"
    )
}

#[test]
fn what_virtualbox_writes() {
    let hardware = "<Firmware type=\"BIOS\"/><Chipset type=\"PIIX3\"/><RTC localOrUTC=\"UTC\"/><AudioAdapter \
        enabled=\"true\"/><SharedFolders><SharedFolder name=\"share\"/></SharedFolders><Network>\
        <Adapter slot=\"0\" enabled=\"true\" MACAddress=\"080027AABBCC\" type=\"82540EM\"><NAT/></Adapter>\
        <Adapter slot=\"1\" enabled=\"false\" MACAddress=\"080027AABBCD\" type=\"82540EM\"/>\
        <Adapter slot=\"2\" enabled=\"true\" MACAddress=\"080027AABBCE\" cable=\"false\" type=\"virtio\">\
        <DisabledModes/><BridgedInterface name=\"eth0\"/></Adapter></Network>";
    let plan = planned(Format::Vbox, &vbox(hardware, "format=\"VMDK\"", "a"), &options());
    let machine = &plan.definition;
    assert_eq!((machine.cpus, machine.memory, places(machine)), (2, 64 << 20, vec![(IDE_SLOT, Bus::Ide, 3)]));
    assert_eq!((machine.platform.clock, machine.platform.chipset), (Clock::Utc, Chipset::I440fx));
    assert_eq!(machine.uuid.to_string(), "7c3a9e1d-0e5b-444a-9d0f-0f6f1c2f7a11", "the order that the guest saw");
    assert!(matches!(&plan.disks[0].content, Content::Image { format: Some(format), .. } if format == "vmdk"));
    let cards: Vec<_> = machine.networks.iter().map(|it| (it.mac.to_string(), it.model, it.link.clone())).collect();
    let expected = [
        ("08:00:27:aa:bb:cc".to_owned(), Card::E1000, Link::User),
        ("08:00:27:aa:bb:ce".to_owned(), Card::Virtio, Link::None),
    ];
    assert_eq!(cards, expected);
    for words in [
        "IDE port 1: it is a CD drive; 'lamina vm edit --cdrom FILE' adds one",
        "AudioAdapter",
        "share",
        "it was on 'NAT'",
    ] {
        assert!(notes(&plan).contains(words), "{words}: {}", notes(&plan));
    }
    let plain = format!("{hardware}<SmbiosUuidLittleEndian enabled=\"true\"/>");
    let plan = planned(Format::Vbox, &vbox(&plain, "format=\"raw\"", "a"), &options());
    assert_eq!(plan.definition.uuid.to_string(), "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11");
    let uefi = "<Firmware type=\"EFI\"/><NVRAM path=\"box.nvram\"/>";
    let plan = planned(Format::Vbox, &vbox(uefi, "format=\"VMDK\"", "a"), &options());
    assert_eq!(plan.definition.platform.firmware, Firmware::Uefi);
    assert!(notes(&plan).contains("box.nvram"), "{}", notes(&plan));
}

#[test]
fn refused_settings_of_virtualbox_are_named_with_the_line() {
    let good = |disk: &str, image: &str| vbox("", disk, image);
    for (text, words) in [
        ("<domain/>".to_owned(), "line 1: it is no machine of VirtualBox"),
        (good("format=\"VDI\"", "a"), "line 5: disk 'box.vmdk' has the format 'VDI'"),
        (good("format=\"VMDK\"", "b"), "line 5: disk 'Snapshots/b.vmdk' is a difference"),
        (good("format=\"VMDK\"", "c"), "no disk with the UUID 00000000-0000-0000-0000-00000000000c is registered"),
        (good("format=\"VMDK\"", "a").replace("PIIX4", "USB"), "controller 'USB'"),
        (good("format=\"VMDK\"", "a").replace("RAMSize=\"64\"", "RAMSize=\"x\""), "line 7: RAMSize"),
        (good("format=\"VMDK\"", "a").replace("{1d9e3a7c", "{1d"), "line 3: uuid"),
    ] {
        let error = parse(Format::Vbox, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("'description'") && error.contains(words), "{words}: {error}");
    }
}
