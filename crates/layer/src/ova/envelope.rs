//! Writing an OVF 1 descriptor: the disks, and the least hardware that a machine needs.

use std::fmt::Write;

/// The controller to which the disks are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// LSI Logic SCSI.
    LsiLogic,
    /// LSI Logic SAS.
    LsiSas,
    /// VMware's paravirtual SCSI.
    ParaVirtual,
    /// SATA.
    Sata,
    /// IDE: at most four disks.
    Ide,
    /// NVMe.
    Nvme,
}

impl Controller {
    /// Resource type and subtype in CIM.
    fn resource(self) -> (u32, &'static str) {
        match self {
            Self::LsiLogic => (6, "lsilogic"),
            Self::LsiSas => (6, "lsilogicsas"),
            Self::ParaVirtual => (6, "VirtualSCSI"),
            Self::Sata => (20, "vmware.sata.ahci"),
            Self::Ide => (5, "PIIX4"),
            Self::Nvme => (20, "vmware.nvme.controller"),
        }
    }

    /// The most disks on one controller; on SCSI, address 7 is the controller's own.
    fn disks(self) -> usize {
        match self {
            Self::LsiLogic | Self::LsiSas | Self::ParaVirtual | Self::Nvme => 15,
            Self::Sata => 30,
            Self::Ide => 2,
        }
    }

    fn address(self, number: usize) -> usize {
        match self {
            Self::LsiLogic | Self::LsiSas | Self::ParaVirtual if number >= 7 => number + 1,
            _ => number,
        }
    }
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// The network to which the card is connected.
    pub name: String,
    /// The kind of the card: `VmxNet3`, `E1000e`.
    pub adapter: String,
    /// The card's MAC address, if it is fixed.
    pub mac: Option<String>,
}

/// The virtual machine with the disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The machine's name.
    pub name: String,
    /// Number of processors.
    pub processors: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// VMware's hardware version: `vmx-13`.
    pub hardware: String,
    /// The guest's operating system by its CIM number: 1 other, 36 Linux, 101 Linux 64-bit.
    pub system: u32,
    /// The controller of the disks.
    pub controller: Controller,
    /// Network cards.
    pub networks: Vec<Network>,
    /// VMware's settings of the machine, as keys and values: for example, its firmware.
    pub settings: Vec<(String, String)>,
}

/// A disk for the descriptor.
pub(super) struct DescribedDisk<'a> {
    pub(super) file: &'a str,
    /// Size of the file in bytes.
    pub(super) size: u64,
    pub(super) capacity: u64,
}

const FORMAT: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

/// The text of the descriptor. Its length depends on the files' sizes only through their numbers of digits.
pub(super) fn text(machine: &Machine, disks: &[DescribedDisk<'_>]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_envelope(&mut out, machine, disks);
    out
}

fn write_envelope(out: &mut String, machine: &Machine, disks: &[DescribedDisk<'_>]) -> std::fmt::Result {
    let cim = "http://schemas.dmtf.org/wbem/wscim/1";
    out.push_str("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    writeln!(
        out,
        "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:rasd=\"{cim}/cim-schema/2/CIM_ResourceAllocationSettingData\" \
         xmlns:vmw=\"http://www.vmware.com/schema/ovf\" \
         xmlns:vssd=\"{cim}/cim-schema/2/CIM_VirtualSystemSettingData\">"
    )?;
    out.push_str("  <References>\n");
    for (number, disk) in (1..).zip(disks) {
        let (file, size) = (escaped(disk.file), disk.size);
        writeln!(out, "    <File ovf:href=\"{file}\" ovf:id=\"file{number}\" ovf:size=\"{size}\"/>")?;
    }
    out.push_str("  </References>\n  <DiskSection>\n    <Info>Virtual disks</Info>\n");
    for (number, disk) in (1..).zip(disks) {
        let capacity = disk.capacity;
        writeln!(
            out,
            "    <Disk ovf:capacity=\"{capacity}\" ovf:capacityAllocationUnits=\"byte\" ovf:diskId=\"vmdisk{number}\" \
             ovf:fileRef=\"file{number}\" ovf:format=\"{FORMAT}\"/>"
        )?;
    }
    out.push_str("  </DiskSection>\n  <NetworkSection>\n    <Info>Networks</Info>\n");
    let mut networks: Vec<&str> = machine.networks.iter().map(|network| network.name.as_str()).collect();
    networks.sort_unstable();
    networks.dedup();
    for name in networks {
        let name = escaped(name);
        writeln!(out, "    <Network ovf:name=\"{name}\"><Description>{name}</Description></Network>")?;
    }
    let name = escaped(&machine.name);
    writeln!(out, "  </NetworkSection>\n  <VirtualSystem ovf:id=\"{name}\">\n    <Info>A virtual machine</Info>")?;
    writeln!(out, "    <Name>{name}</Name>\n    <OperatingSystemSection ovf:id=\"{}\">", machine.system)?;
    out.push_str("      <Info>The guest's operating system</Info>\n    </OperatingSystemSection>\n");
    out.push_str("    <VirtualHardwareSection>\n      <Info>Virtual hardware</Info>\n      <System>\n");
    let type_of_system = escaped(&machine.hardware);
    for (field, value) in [
        ("ElementName", "Virtual Hardware Family"),
        ("InstanceID", "0"),
        ("VirtualSystemIdentifier", name.as_str()),
        ("VirtualSystemType", type_of_system.as_str()),
    ] {
        writeln!(out, "        <vssd:{field}>{value}</vssd:{field}>")?;
    }
    out.push_str("      </System>\n");
    write_items(out, machine, disks.len())?;
    for (key, value) in &machine.settings {
        let (key, value) = (escaped(key), escaped(value));
        writeln!(out, "      <vmw:Config ovf:required=\"false\" vmw:key=\"{key}\" vmw:value=\"{value}\"/>")?;
    }
    out.push_str("    </VirtualHardwareSection>\n  </VirtualSystem>\n</Envelope>\n");
    Ok(())
}

fn write_items(out: &mut String, machine: &Machine, disks: usize) -> std::fmt::Result {
    let (processors, memory) = (machine.processors.to_string(), machine.memory_mib.to_string());
    write_item(
        out,
        &[
            ("AllocationUnits", "hertz * 10^6"),
            ("Description", "Number of virtual processors"),
            ("ElementName", &format!("{processors} virtual processors")),
            ("InstanceID", "1"),
            ("ResourceType", "3"),
            ("VirtualQuantity", &processors),
        ],
    )?;
    write_item(
        out,
        &[
            ("AllocationUnits", "byte * 2^20"),
            ("Description", "Memory"),
            ("ElementName", &format!("{memory} MiB of memory")),
            ("InstanceID", "2"),
            ("ResourceType", "4"),
            ("VirtualQuantity", &memory),
        ],
    )?;
    let mut instance = 2;
    let mut next = || {
        instance += 1;
        instance.to_string()
    };
    let (kind, subtype) = machine.controller.resource();
    let per_controller = machine.controller.disks();
    for controller in 0..disks.div_ceil(per_controller) {
        let own = next();
        let address = controller.to_string();
        write_item(
            out,
            &[
                ("Address", &address),
                ("ElementName", &format!("Controller {controller}")),
                ("InstanceID", &own),
                ("ResourceSubType", subtype),
                ("ResourceType", &kind.to_string()),
            ],
        )?;
        for disk in controller * per_controller..disks.min((controller + 1) * per_controller) {
            let number = disk + 1;
            write_item(
                out,
                &[
                    ("AddressOnParent", &machine.controller.address(disk % per_controller).to_string()),
                    ("ElementName", &format!("Hard disk {number}")),
                    ("HostResource", &format!("ovf:/disk/vmdisk{number}")),
                    ("InstanceID", &next()),
                    ("Parent", &own),
                    ("ResourceType", "17"),
                ],
            )?;
        }
    }
    for (number, network) in (1..).zip(&machine.networks) {
        let (unit, own) = ((number + 6).to_string(), next());
        let (name, adapter) = (escaped(&network.name), escaped(&network.adapter));
        let label = format!("Network adapter {number}");
        let mac = network.mac.as_deref().map(escaped);
        let mut fields: Vec<(&str, &str)> = mac.iter().map(|mac| ("Address", mac.as_str())).collect();
        fields.extend([
            ("AddressOnParent", unit.as_str()),
            ("AutomaticAllocation", "true"),
            ("Connection", name.as_str()),
            ("ElementName", label.as_str()),
            ("InstanceID", own.as_str()),
            ("ResourceSubType", adapter.as_str()),
            ("ResourceType", "10"),
        ]);
        write_item(out, &fields)?;
    }
    Ok(())
}

/// Writes one item; its fields are in the order of the schema, which is alphabetical.
fn write_item(out: &mut String, fields: &[(&str, &str)]) -> std::fmt::Result {
    debug_assert!(fields.is_sorted());
    out.push_str("      <Item>\n");
    for (name, value) in fields {
        writeln!(out, "        <rasd:{name}>{value}</rasd:{name}>")?;
    }
    out.push_str("      </Item>\n");
    Ok(())
}

/// Text escaped for XML elements and attributes; characters that XML does not permit become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
