//! What lamina uses of an archive's OVF descriptor: the disks with their files and capacities, the machine's name,
//! processors and memory.

use super::MEMBERS_MAX;
use super::archive::plain_name;
use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};
use ovf::xml::Element;
use ovf::{Capacity, resource};

/// A disk that the OVF describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The disk's identifier within the OVF.
    pub id: String,
    /// The member of the archive with the disk's content.
    pub file: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// The URI of the disk's format; the URI of VMware's disks ends with `#streamOptimized`.
    pub format: String,
    /// The disk of which this one is a delta, by its identifier within the OVF.
    pub parent: Option<String>,
    stated: Capacity,
}

impl Disk {
    /// Compares the capacity that the OVF states with the capacity of the disk's image.
    ///
    /// # Errors
    /// `Corrupt`, with both sizes, if they differ.
    pub fn check_capacity(&self, image: u64) -> Result<()> {
        self.stated.check(image)
    }
}

/// Processors and memory of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Number of processors.
    pub processors: Option<u32>,
    /// Memory in bytes.
    pub memory: Option<u64>,
}

/// The parts of an OVF descriptor that lamina uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Description {
    pub(super) name: Option<String>,
    pub(super) disks: Vec<Disk>,
    pub(super) hardware: Hardware,
}

impl Description {
    /// Reads a descriptor; `origin` is its name in errors.
    pub(super) fn read(text: &[u8], origin: &str) -> Result<Self> {
        let envelope = ovf::Envelope::parse(text, origin).map_err(corrupt)?;
        let mut files: Vec<(&str, &str)> = Vec::new();
        for file in envelope.files() {
            let wrong = |what: &str| corrupt(envelope.wrong(file, what));
            let id = file.attribute("id").ok_or_else(|| wrong("the file has no id"))?;
            let href = envelope.href(file).map_err(corrupt)?;
            let name = plain_name(href.strip_prefix("./").unwrap_or(href))?;
            if files.len() == MEMBERS_MAX || files.iter().any(|(own, _)| *own == id) {
                return Err(wrong(&format!("file {id} is listed twice, or exceeds the limit of {MEMBERS_MAX} files")));
            }
            files.push((id, name));
        }
        let mut disks = Vec::new();
        for disk in envelope.disks() {
            let wrong = |what: &str| corrupt(envelope.wrong(disk, what));
            let id = disk.attribute("diskId").ok_or_else(|| wrong("the disk has no id"))?;
            // Importers create a disk without a file empty.
            let Some(file) = disk.attribute("fileRef") else { continue };
            let stated = envelope.capacity(disk).map_err(corrupt)?;
            if stated.bytes > CAPACITY_MAX {
                return Err(wrong("the capacity of the disk cannot be"));
            }
            let found = files.iter().find(|(own, _)| *own == file);
            let missing = || wrong(&format!("disk {id} refers to file {file}, which is not listed"));
            disks.push(Disk {
                id: id.to_owned(),
                file: found.ok_or_else(missing)?.1.to_owned(),
                capacity: stated.bytes.next_multiple_of(SECTOR),
                format: disk.attribute("format").unwrap_or_default().to_owned(),
                parent: disk.attribute("parentRef").map(str::to_owned),
                stated,
            });
            if disks.len() > MEMBERS_MAX {
                return Err(wrong(&format!("there are more than {MEMBERS_MAX} disks")));
            }
        }
        // If the OVF has several machines, only the first is read.
        let system = envelope.systems().first().copied();
        let name = system.and_then(|system| system.text_of("Name").or(system.attribute("id"))).map(str::to_owned);
        Ok(Self { name, disks, hardware: system.map_or_else(Hardware::default, hardware_of) })
    }
}

fn hardware_of(system: &Element) -> Hardware {
    let mut hardware = Hardware::default();
    for item in system.child("VirtualHardwareSection").into_iter().flat_map(ovf::items) {
        match item.text_of("ResourceType") {
            Some(resource::PROCESSOR) => {
                hardware.processors = item.text_of("VirtualQuantity").and_then(|count| count.parse().ok());
            }
            Some(resource::MEMORY) => hardware.memory = ovf::memory(item),
            _ => {}
        }
    }
    hardware
}

/// The error for an invalid descriptor.
fn corrupt(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Invalid => Error::new(ErrorKind::Corrupt, format!("the OVF descriptor is damaged: {error}")),
        _ => error,
    }
}
