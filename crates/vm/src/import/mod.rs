//! Machines of other programs, as they are imported.
//!
//! ```text
//! find         which files of a folder tree describe machines
//! paths        the files that a description names
//! dictionary   the lines of VMware's files: key = "value"
//! vmx          a machine of ESXi or Workstation, with its list of snapshots (vmsd)
//! xml          XML as a tree, within limits
//! ovf          a machine in an OVF descriptor, alone or in an archive (OVA)
//! libvirt      a domain of libvirt
//! image        a disk alone
//! models       devices of other programs, and those of QEMU that take their places
//! plan         the machine that is made of a description
//! run          making it
//! ```
//!
//! Every parser produces the same description, [`Foreign`], and [`plan`] alone decides what lamina makes of it.
//!
//! 1. The source is only read.
//! 2. A description is untrusted. A parser returns a description or an error for any bytes, within the limits of
//!    [`limits`], and never follows a name out of the folder of the description, unless the user permits the folder.
//! 3. Everything that is not as in the source is a [`Note`]. A machine whose disks cannot be attached is refused.
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
mod vmx;
mod xml;

pub use find::sources;

use crate::definition::{Boot, Bus, Card, Firmware, Link, Platform};
use crate::disks::Disks;
use crate::identity::Mac;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::fs;
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

/// The form of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// VMware's configuration file.
    Vmx,
    /// An OVF descriptor.
    Ovf,
    /// An archive with an OVF descriptor and disks.
    Ova,
    /// The XML of a libvirt domain.
    Libvirt,
    /// A disk.
    Image,
}

impl Format {
    /// The form of a file, by its name.
    pub fn of(path: &Path) -> Self {
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
        match ending.as_deref() {
            Some("vmx") => Self::Vmx,
            Some("ovf") => Self::Ovf,
            Some("ova") => Self::Ova,
            Some("xml") => Self::Libvirt,
            _ => Self::Image,
        }
    }

    /// Its name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmx => "vmx",
            Self::Ovf => "ovf",
            Self::Ova => "ova",
            Self::Libvirt => "libvirt",
            Self::Image => "image",
        }
    }
}

/// How a part of the machine differs from its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The machine does not have it.
    LeftOut,
    /// The machine has another device in its place, for which the guest needs a driver.
    Replaced,
    /// It has another value.
    Changed,
}

impl Effect {
    /// Its name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeftOut => "left out",
            Self::Replaced => "replaced",
            Self::Changed => "changed",
        }
    }
}

/// A part of a machine that is not as in its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The part, as the source calls it.
    pub item: String,
    /// What happens to it.
    pub effect: Effect,
    /// Why, and what that means for the guest.
    pub reason: String,
}

/// A controller of disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its name in the source.
    pub label: String,
    /// Its kind.
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
        /// Its format, if the source names it: `raw`, `qcow2`, `vmdk`.
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
    /// Its name in the source: `scsi0:0`.
    pub label: String,
    /// Its controller, an index of [`Foreign::controllers`].
    pub controller: usize,
    /// Its address on the controller.
    pub unit: u32,
    /// Its content.
    pub content: Content,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignCard {
    /// Its name in the source.
    pub label: String,
    /// Its model.
    pub model: Card,
    /// Its address, if the source names one.
    pub mac: Option<Mac>,
    /// The network that it is connected to, as the source calls it.
    pub network: String,
    /// Whether its cable is plugged in.
    pub connected: bool,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignSnapshot {
    /// Its name.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub created: u64,
    /// The disks that it has, by their labels.
    pub disks: Vec<String>,
}

/// A machine of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// The file that describes it.
    pub source: PathBuf,
    /// The form of that file.
    pub format: Format,
    /// Its name.
    pub name: String,
    /// The UUID that its guest sees, if it has one.
    pub uuid: Option<Uuid>,
    /// Virtual processors.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Firmware, chipset, clock.
    pub platform: Platform,
    /// The variables of its firmware, in the form that QEMU uses.
    pub nvram: Option<PathBuf>,
    /// A kernel that is loaded without a boot loader.
    pub boot: Option<Boot>,
    /// Controllers of disks.
    pub controllers: Vec<Controller>,
    /// Disks, the one that it boots from first.
    pub disks: Vec<ForeignDisk>,
    /// Network cards.
    pub cards: Vec<ForeignCard>,
    /// Snapshots, parents before children.
    pub snapshots: Vec<ForeignSnapshot>,
    /// What is not as in the source.
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

/// What the user requests of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The name of the machine; if `None`, derived from the source.
    pub name: Option<String>,
    /// Folders besides the source's own in which its files may be.
    pub permitted: Vec<PathBuf>,
    /// The network of all cards.
    pub link: Link,
    /// How all disks are attached, if not as in the source.
    pub bus: Option<Bus>,
    /// The model of all cards, if not that of the source. Also the card of a machine that is made of a disk alone.
    pub card: Option<Card>,
    /// The firmware, if not that of the source.
    pub firmware: Option<Firmware>,
    /// Virtual processors, if not as many as in the source.
    pub cpus: Option<u32>,
    /// Memory in bytes, if not as much as in the source.
    pub memory: Option<u64>,
}

impl Default for Options {
    /// Everything as in the source, on QEMU's user network.
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
        Format::Libvirt => Ok(vec![libvirt::read(path, &text(path)?, &permitted)?]),
        Format::Image => Ok(vec![image::read(path)?]),
    }
}

/// Parses a description without its files, for tests with arbitrary bytes.
pub fn parse(format: Format, bytes: &[u8]) -> Result<Vec<Foreign>> {
    let path = Path::new("description");
    match format {
        Format::Vmx => Ok(vec![vmx::read(path, bytes, &paths::Permitted::unchecked())?]),
        Format::Ovf | Format::Ova => ovf::read(path, bytes, ovf::Files::Archive(path)),
        Format::Libvirt => Ok(vec![libvirt::read(path, bytes, &paths::Permitted::unchecked())?]),
        Format::Image => Err(Error::new(ErrorKind::Unsupported, "an image is no description")),
    }
}

/// The bytes of a description.
fn text(path: &Path) -> Result<Vec<u8>> {
    let reading = || format!("reading '{}'", path.display());
    let length = fs::metadata(path).during(reading)?.len();
    if length > limits::TEXT_MAX {
        let text = format!("'{}' has {length} bytes: that is no description of a machine", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    fs::read(path).during(reading)
}
