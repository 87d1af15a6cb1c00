//! Import of machines from other programs.
//!
//! ```text
//! find         which files of a folder tree describe machines
//! paths        the files that a description names
//! dictionary   the lines of VMware's files: key = "value"
//! vmx          a machine of ESXi or Workstation, with its list of snapshots (vmsd)
//! ovf          a machine in an OVF descriptor, alone or in an archive (OVA)
//! vbox         a machine of VirtualBox
//! libvirt      a domain of libvirt
//! xml_source   the file of vbox and libvirt, for errors that name a line of it
//! image        a disk alone
//! models       devices of other programs, and QEMU's devices that replace them
//! plan         the machine that is created from a description
//! run          creating that machine
//! ```
//!
//! Every parser produces the same description, [`Foreign`], and only [`plan`] decides which machine is created from it.
//!
//! 1. The source is not modified.
//! 2. A description is untrusted. A parser returns a description or an error for any bytes, within the limits of
//!    [`limits`], and never follows a name out of the folder of the description, unless the user permits the folder.
//! 3. Every difference from the source is reported as a [`Note`]. A machine whose disks cannot be attached is refused.
//! 4. A machine is made completely or not at all ([`crate::machines`]).

mod dictionary;
mod find;
mod image;
mod libvirt;
mod models;
mod ovf;
mod paths;
pub mod plan;
pub mod run;
#[cfg(test)]
mod tests;
mod vbox;
mod vmx;
mod xml_source;

pub use find::sources;

use crate::definition::{Boot, Bus, Card, Firmware, Link, Platform};
use crate::disks::Disks;
use crate::identity::Mac;
use backend::regular;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Limits of descriptions.
pub mod limits {
    /// Longest text, in bytes.
    pub const TEXT_MAX: u64 = 4 << 20;
    /// Most controllers of disks.
    pub const CONTROLLERS_MAX: usize = 64;
    /// Most disks.
    pub const DISKS_MAX: usize = 256;
    /// Most network cards.
    pub const CARDS_MAX: usize = 64;
    /// Most snapshots.
    pub const SNAPSHOTS_MAX: usize = 2048;
    /// Most notes about a machine.
    pub const NOTES_MAX: usize = 1024;
}

/// The format of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// VMware's configuration file.
    Vmx,
    /// An OVF descriptor.
    Ovf,
    /// An archive with an OVF descriptor and disks.
    Ova,
    /// VirtualBox's settings of a machine.
    Vbox,
    /// The XML of a libvirt domain.
    Libvirt,
    /// A disk.
    Image,
}

impl Format {
    /// The format of a file, derived from its name.
    pub fn of(path: &Path) -> Self {
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
        match ending.as_deref() {
            Some("vmx") => Self::Vmx,
            Some("ovf") => Self::Ovf,
            Some("ova") => Self::Ova,
            Some("vbox") => Self::Vbox,
            Some("xml") => Self::Libvirt,
            _ => Self::Image,
        }
    }

    /// The format's name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmx => "vmx",
            Self::Ovf => "ovf",
            Self::Ova => "ova",
            Self::Vbox => "vbox",
            Self::Libvirt => "libvirt",
            Self::Image => "image",
        }
    }
}

/// How a part of the created machine differs from its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The created machine does not have the part.
    LeftOut,
    /// The created machine has another device in place of the part. The guest needs a driver for that device.
    Replaced,
    /// The part has another value.
    Changed,
}

impl Effect {
    /// The effect's name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeftOut => "left out",
            Self::Replaced => "replaced",
            Self::Changed => "changed",
        }
    }
}

/// A part of the created machine that differs from its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The part, by the name that the source uses.
    pub item: String,
    /// How the part differs.
    pub effect: Effect,
    /// Why the part differs, and the consequence for the guest.
    pub reason: String,
}

/// A controller of disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// The controller's name in the source.
    pub label: String,
    /// The controller's kind.
    pub bus: Bus,
}

/// The content of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// An image with its parents.
    Image {
        /// The newest image; an absolute path.
        path: PathBuf,
        /// The image's format, if the source names it: `raw`, `qcow2`, `vmdk`.
        format: Option<String>,
    },
    /// A member of an archive.
    Member {
        /// The archive; an absolute path.
        archive: PathBuf,
        /// The member's name.
        member: String,
    },
    /// Zeros.
    Empty {
        /// Capacity in bytes.
        capacity: u64,
    },
}

/// A disk of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignDisk {
    /// The disk's name in the source: `scsi0:0`.
    pub label: String,
    /// The disk's controller, an index of [`Foreign::controllers`].
    pub controller: usize,
    /// The disk's address on the controller.
    pub unit: u32,
    /// The disk's content.
    pub content: Content,
    /// The capacity that the description states, if it states one besides the image.
    pub stated: Option<::ovf::Capacity>,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignCard {
    /// The card's name in the source.
    pub label: String,
    /// The card's model.
    pub model: Card,
    /// The card's MAC address, if the source names one.
    pub mac: Option<Mac>,
    /// The name that the source uses for the network of the card.
    pub network: String,
    /// Whether the card is connected to the network.
    pub connected: bool,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignSnapshot {
    /// The snapshot's name.
    pub name: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// The disks in the snapshot, by their labels.
    pub disks: Vec<String>,
}

/// A machine of another program, as its description describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// The file with the description.
    pub source: PathBuf,
    /// The format of the description.
    pub format: Format,
    /// The machine's name.
    pub name: String,
    /// The UUID that the guest sees, if the description has one.
    pub uuid: Option<Uuid>,
    /// Virtual processors.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Firmware, chipset, clock.
    pub platform: Platform,
    /// The UEFI variables, in the format that QEMU uses.
    pub nvram: Option<PathBuf>,
    /// A kernel that is loaded without a boot loader.
    pub boot: Option<Boot>,
    /// Controllers of disks.
    pub controllers: Vec<Controller>,
    /// Disks; the boot disk is the first.
    pub disks: Vec<ForeignDisk>,
    /// Network cards.
    pub cards: Vec<ForeignCard>,
    /// Snapshots, parents before children.
    pub snapshots: Vec<ForeignSnapshot>,
    /// Differences from the source that were found while the description was read.
    pub notes: Vec<Note>,
}

impl Foreign {
    fn new(source: &Path, format: Format) -> Self {
        Self {
            source: source.to_owned(),
            format,
            name: String::new(),
            uuid: None,
            cpus: 1,
            memory: 0,
            platform: Platform::default(),
            nvram: None,
            boot: None,
            controllers: Vec::new(),
            disks: Vec::new(),
            cards: Vec::new(),
            snapshots: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn note(&mut self, item: impl Into<String>, effect: Effect, reason: impl Into<String>) {
        if self.notes.len() < limits::NOTES_MAX {
            self.notes.push(Note { item: item.into(), effect, reason: reason.into() });
        }
    }

    /// Adds a controller; returns its index.
    fn add_controller(&mut self, label: String, bus: Bus) -> Result<usize> {
        if self.controllers.len() == limits::CONTROLLERS_MAX {
            return Err(self.invalid(format!("it has more than {} controllers of disks", limits::CONTROLLERS_MAX)));
        }
        self.controllers.push(Controller { label, bus });
        Ok(self.controllers.len() - 1)
    }

    fn add_disk(&mut self, disk: ForeignDisk) -> Result<()> {
        if self.disks.len() == limits::DISKS_MAX {
            return Err(self.invalid(format!("it has more than {} disks", limits::DISKS_MAX)));
        }
        self.disks.push(disk);
        Ok(())
    }

    fn add_card(&mut self, card: ForeignCard) -> Result<()> {
        if self.cards.len() == limits::CARDS_MAX {
            return Err(self.invalid(format!("it has more than {} network cards", limits::CARDS_MAX)));
        }
        self.cards.push(card);
        Ok(())
    }

    /// An error about the description.
    fn invalid(&self, what: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Invalid, format!("'{}': {what}", self.source.display()))
    }
}

/// Options that the user chooses for an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The name of the machine; if `None`, derived from the source.
    pub name: Option<String>,
    /// Folders besides the source's own folder in which its files may be.
    pub permitted: Vec<PathBuf>,
    /// The network to which all cards are connected.
    pub link: Link,
    /// The kind of controller for all disks; `None` to keep the source's controllers.
    pub bus: Option<Bus>,
    /// The model of all cards; `None` to keep the source's models. Also the model of the card when a disk image alone
    /// is imported.
    pub card: Option<Card>,
    /// The firmware; `None` to keep the source's firmware.
    pub firmware: Option<Firmware>,
    /// Number of virtual processors; `None` to keep the source's number.
    pub cpus: Option<u32>,
    /// Memory in bytes; `None` to keep the source's memory size.
    pub memory: Option<u64>,
}

impl Default for Options {
    /// Everything as in the source, with all cards on QEMU's user network.
    fn default() -> Self {
        Self {
            name: None,
            permitted: Vec::new(),
            link: Link::User,
            bus: None,
            card: None,
            firmware: None,
            cpus: None,
            memory: None,
        }
    }
}

/// Reads the machines that a file describes.
pub fn read(path: &Path, options: &Options, disks: &dyn Disks) -> Result<Vec<Foreign>> {
    let permitted = paths::Permitted::beside(path, &options.permitted)?;
    match Format::of(path) {
        Format::Vmx => Ok(vec![vmx::read(path, &text(path)?, &permitted)?]),
        Format::Ovf => ovf::read(path, &text(path)?, ovf::Files::Beside(&permitted)),
        Format::Ova => ovf::read(path, &disks.descriptor(path)?, ovf::Files::Archive(path)),
        Format::Vbox => Ok(vec![vbox::read(path, &text(path)?, &permitted)?]),
        Format::Libvirt => Ok(vec![libvirt::read(path, &text(path)?, &permitted)?]),
        Format::Image => Ok(vec![image::read(path)?]),
    }
}

/// Parses a description without opening the files that it names, for tests with arbitrary bytes.
pub fn parse(format: Format, bytes: &[u8]) -> Result<Vec<Foreign>> {
    let path = Path::new("description");
    match format {
        Format::Vmx => Ok(vec![vmx::read(path, bytes, &paths::Permitted::unchecked())?]),
        Format::Ovf | Format::Ova => ovf::read(path, bytes, ovf::Files::Archive(path)),
        Format::Vbox => Ok(vec![vbox::read(path, bytes, &paths::Permitted::unchecked())?]),
        Format::Libvirt => Ok(vec![libvirt::read(path, bytes, &paths::Permitted::unchecked())?]),
        Format::Image => Err(Error::new(ErrorKind::Unsupported, "an image is no description")),
    }
}

/// Reads the bytes of a description, within the limit.
fn text(path: &Path) -> Result<Vec<u8>> {
    regular::read(path, limits::TEXT_MAX, "description of a machine")
}
