//! Reading an OVF descriptor: the disks with their files and capacities, the machine's name, processors and memory.

use super::MEMBERS_MAX;
use super::archive::plain_name;
use super::xml::{Element, Step, walk, wrong};
use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};

/// A disk that the OVF describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its identifier within the OVF.
    pub id: String,
    /// The member with its content.
    pub file: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// The URI of its format; that of VMware's disks ends with `#streamOptimized`.
    pub format: String,
    /// The disk of which this one is a delta, by its identifier within the OVF.
    pub parent: Option<String>,
}

/// Processors and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Number of processors.
    pub processors: Option<u32>,
    /// Memory in bytes.
    pub memory: Option<u64>,
}

/// The parts of an OVF descriptor that lamina uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Envelope {
    pub(super) name: Option<String>,
    pub(super) disks: Vec<Disk>,
    pub(super) hardware: Hardware,
}

impl Envelope {
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(text).map_err(|_| wrong("it is not UTF-8"))?;
        let mut found = Found::default();
        walk(text.trim_start_matches('\u{feff}').trim_end_matches('\0'), &mut |step| found.visit(step))?;
        let mut envelope = Self { name: found.name.or(found.id), disks: Vec::new(), hardware: found.hardware };
        // All known descriptors have the references first, but this code does not require it.
        for mut disk in found.disks {
            let file = found.files.iter().find(|(id, _)| *id == disk.file).map(|(_, name)| name.clone());
            let missing = || wrong(format!("disk {} refers to file {}, which is not listed", disk.id, disk.file));
            disk.file = file.ok_or_else(missing)?;
            envelope.disks.push(disk);
        }
        Ok(envelope)
    }
}

/// The elements found by the walk.
#[derive(Default)]
struct Found {
    /// File names by their identifier.
    files: Vec<(String, String)>,
    /// Disks, with the identifier of the file in place of its name.
    disks: Vec<Disk>,
    systems: usize,
    name: Option<String>,
    id: Option<String>,
    hardware: Hardware,
    item: Item,
}

/// The fields of a hardware item that lamina uses.
#[derive(Default)]
struct Item {
    kind: String,
    quantity: Option<u64>,
    unit: Option<u64>,
}

impl Found {
    fn visit(&mut self, step: Step<'_>) -> Result<()> {
        match step {
            Step::Open(path, _) if path.len() == 1 && path[0] != "Envelope" => {
                Err(wrong("it does not begin with an Envelope"))
            }
            Step::Open([_, section, element], file) if section == "References" && element == "File" => self.file(file),
            Step::Open([_, section, element], disk) if section == "DiskSection" && element == "Disk" => {
                let disk = read_disk(disk)?;
                self.disks.extend(disk);
                match self.disks.len() > MEMBERS_MAX {
                    true => Err(wrong(format!("it has more than {MEMBERS_MAX} disks"))),
                    false => Ok(()),
                }
            }
            Step::Open([.., element], system) if element == "VirtualSystem" => {
                self.systems += 1;
                self.id = self.id.take().or_else(|| system.attribute("id").map(str::to_owned));
                Ok(())
            }
            Step::Close(path, text) => {
                // If the OVF has several machines, only the first is read.
                if self.systems == 1 {
                    self.close(path, text);
                }
                Ok(())
            }
            Step::Open(..) => Ok(()),
        }
    }

    fn file(&mut self, file: &Element) -> Result<()> {
        let id = file.attribute("id").ok_or_else(|| wrong("a file has no id"))?;
        let href = file.attribute("href").ok_or_else(|| wrong(format!("file {id} has no href")))?;
        let name = plain_name(href.strip_prefix("./").unwrap_or(href))?;
        for (feature, what) in [("compression", "compressed"), ("chunkSize", "cut into chunks")] {
            match file.attribute(feature) {
                None | Some("" | "identity") => {}
                Some(value) => {
                    let what = format!("{name} is {what} ({value}): unpack it with the tool that made it");
                    return Err(Error::new(ErrorKind::Unsupported, what));
                }
            }
        }
        if self.files.len() == MEMBERS_MAX || self.files.iter().any(|(own, _)| own == id) {
            return Err(wrong(format!("file {id} is listed twice, or exceeds the limit of {MEMBERS_MAX} files")));
        }
        self.files.push((id.to_owned(), name.to_owned()));
        Ok(())
    }

    fn close(&mut self, path: &[String], text: &str) {
        match path {
            [.., system, element] if system == "VirtualSystem" && element == "Name" => {
                self.name = Some(text.to_owned());
            }
            [.., section, item, field] if section == "VirtualHardwareSection" && item == "Item" => match field.as_str()
            {
                "ResourceType" => self.item.kind = text.to_owned(),
                "VirtualQuantity" => self.item.quantity = text.parse().ok(),
                "AllocationUnits" => self.item.unit = unit(text),
                _ => {}
            },
            [.., section, element] if section == "VirtualHardwareSection" && element == "Item" => {
                let item = std::mem::take(&mut self.item);
                match item.kind.as_str() {
                    "3" => self.hardware.processors = item.quantity.and_then(|count| u32::try_from(count).ok()),
                    "4" => {
                        let unit = item.unit.unwrap_or(1 << 20);
                        self.hardware.memory = item.quantity.and_then(|count| count.checked_mul(unit));
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
}

/// A disk, with the identifier of its file in place of the name; `None` for a disk without a file, which importers
/// create empty.
fn read_disk(disk: &Element) -> Result<Option<Disk>> {
    let id = disk.attribute("diskId").ok_or_else(|| wrong("a disk has no id"))?;
    let Some(file) = disk.attribute("fileRef") else { return Ok(None) };
    let bad = |what: &str| wrong(format!("the capacity of disk {id} {what}"));
    let count = disk.attribute("capacity").ok_or_else(|| bad("is missing"))?.trim();
    if count.starts_with("${") {
        let what = format!("the capacity of disk {id} is the OVF property {count}: only numbers are supported there");
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    let count: u64 = count.parse().map_err(|_| bad("is no number"))?;
    let unit = disk.attribute("capacityAllocationUnits").map_or(Some(1), unit);
    let unit = unit.ok_or_else(|| bad("has an unknown unit"))?;
    let capacity = count.checked_mul(unit).filter(|capacity| (1..=CAPACITY_MAX).contains(capacity));
    let capacity = capacity.ok_or_else(|| bad("cannot be"))?;
    Ok(Some(Disk {
        id: id.to_owned(),
        file: file.to_owned(),
        capacity: capacity.next_multiple_of(SECTOR),
        format: disk.attribute("format").unwrap_or_default().to_owned(),
        parent: disk.attribute("parentRef").map(str::to_owned),
    }))
}

/// Bytes of an allocation unit: `byte * 2^30`, or the words in old descriptors.
fn unit(text: &str) -> Option<u64> {
    let text = text.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_lowercase();
    match text.as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" => return Some(1 << 10),
        "megabytes" => return Some(1 << 20),
        "gigabytes" => return Some(1 << 30),
        _ => {}
    }
    let factor = text.strip_prefix("bytes").or_else(|| text.strip_prefix("byte"))?.strip_prefix('*')?;
    match factor.split_once('^') {
        Some((base, exponent)) => base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?),
        None => factor.parse().ok(),
    }
}
