//! OVF descriptors (DSP0243, versions 1 and 2): the files, disks and machines that a text describes.
//!
//! A descriptor is a file next to its disks, or a member of an archive (OVA) together with its disks. This crate reads
//! the text only. Its users look up files and disks, and decide what a machine gets for each of its devices.
//!
//! 1. The text is untrusted. It is read in time and memory linear in its length, within the limits of [`xml`].
//! 2. An error names the origin of the text and the line.

#![forbid(unsafe_code)]

pub mod xml;

use error::text::size;
use error::{Error, ErrorKind, Result};
use xml::Element;

/// Bytes of a sector: capacities of images are multiples of it.
const SECTOR: u64 = 512;

/// Kinds of devices: resource types of CIM.
pub mod resource {
    /// Processors.
    pub const PROCESSOR: &str = "3";
    /// Memory.
    pub const MEMORY: &str = "4";
    /// IDE controllers.
    pub const IDE: &str = "5";
    /// SCSI controllers.
    pub const SCSI: &str = "6";
    /// Network cards.
    pub const ETHERNET: &str = "10";
    /// Floppy drives.
    pub const FLOPPY: &str = "14";
    /// CD drives.
    pub const CD: &str = "15";
    /// DVD drives.
    pub const DVD: &str = "16";
    /// Disks.
    pub const DISK: &str = "17";
    /// Other storage devices: SATA and NVMe controllers.
    pub const STORAGE: &str = "20";
    /// USB controllers.
    pub const USB: &str = "23";
    /// Graphics cards.
    pub const GRAPHICS: &str = "24";
    /// Sound cards.
    pub const SOUND: &str = "35";
}

/// The elements that describe a device.
const ITEMS: [&str; 3] = ["Item", "StorageItem", "EthernetPortItem"];
/// The unit, in bytes, of an amount of memory without a unit.
const MEMORY_UNIT: u64 = 1 << 20;

/// A descriptor.
#[derive(Debug)]
pub struct Envelope {
    origin: String,
    root: Element,
}

impl Envelope {
    /// Parses a descriptor; `origin` is the name of the text in errors.
    ///
    /// # Errors
    /// `Invalid` if the text is no OVF descriptor.
    pub fn parse(bytes: &[u8], origin: &str) -> Result<Self> {
        let root = xml::parse(bytes, origin)?;
        let envelope = Self { origin: origin.to_owned(), root };
        match envelope.root.name == "Envelope" {
            true => Ok(envelope),
            false => Err(envelope.wrong(&envelope.root, "it is no OVF descriptor: it does not begin with an Envelope")),
        }
    }

    /// The outermost element.
    pub fn root(&self) -> &Element {
        &self.root
    }

    /// The error for an element: `Invalid`, with the line of the element.
    pub fn wrong(&self, element: &Element, what: impl std::fmt::Display) -> Error {
        self.failed(ErrorKind::Invalid, element, what)
    }

    fn failed(&self, kind: ErrorKind, element: &Element, what: impl std::fmt::Display) -> Error {
        Error::new(kind, format!("'{}', line {}: {what}", self.origin, element.line))
    }

    /// The files in the order of the text.
    pub fn files(&self) -> impl Iterator<Item = &Element> {
        self.root.all("References").flat_map(|section| section.all("File"))
    }

    /// The disks in the order of the text.
    pub fn disks(&self) -> impl Iterator<Item = &Element> {
        self.root.all("DiskSection").flat_map(|section| section.all("Disk"))
    }

    /// The machines in the order of the text, including those in nested collections.
    pub fn systems(&self) -> Vec<&Element> {
        fn find<'a>(element: &'a Element, systems: &mut Vec<&'a Element>) {
            for child in &element.children {
                match child.name.as_str() {
                    "VirtualSystem" => systems.push(child),
                    "VirtualSystemCollection" => find(child, systems),
                    _ => {}
                }
            }
        }
        let mut systems = Vec::new();
        find(&self.root, &mut systems);
        systems
    }

    /// Where a file is, as the text names it.
    ///
    /// # Errors
    /// `Invalid` if the text does not name the file; `Unsupported` if the file is compressed or cut into chunks.
    pub fn href<'a>(&self, file: &'a Element) -> Result<&'a str> {
        let name = file.attribute("href").ok_or_else(|| self.wrong(file, "the file has no href"))?;
        for feature in ["compression", "chunkSize"] {
            match file.attribute(feature) {
                None | Some("" | "identity") => {}
                Some(value) => {
                    let text = format!(
                        "file '{}' has a {feature} ({}): unpack it with the tool that made it",
                        name.escape_debug(),
                        value.escape_debug()
                    );
                    return Err(self.failed(ErrorKind::Unsupported, file, text));
                }
            }
        }
        Ok(name)
    }

    /// The capacity of a disk in bytes, greater than 0.
    ///
    /// # Errors `Invalid` if the disk's element gives no number of bytes greater than 0; `Unsupported` if the capacity
    /// is a property (`${size}`), which the user of the descriptor would have to set.
    pub fn capacity(&self, disk: &Element) -> Result<Capacity> {
        let wrong = |what: &str| self.wrong(disk, format!("the capacity of the disk {what}"));
        let count = disk.attribute("capacity").ok_or_else(|| wrong("is missing"))?.trim();
        if count.starts_with("${") {
            let text = format!("the capacity of the disk is the property '{}': set a number", count.escape_debug());
            return Err(self.failed(ErrorKind::Unsupported, disk, text));
        }
        let count: u64 = count.parse().map_err(|_| wrong("is no number"))?;
        let unit = disk.attribute("capacityAllocationUnits").map_or(Some(1), allocation_unit);
        let unit = unit.ok_or_else(|| wrong("has an unknown unit"))?;
        let bytes = count.checked_mul(unit).filter(|bytes| *bytes > 0).ok_or_else(|| wrong("cannot be"))?;
        Ok(Capacity { bytes, unit })
    }
}

/// The capacity of a disk, as a descriptor states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The capacity in bytes, a multiple of `unit`.
    pub bytes: u64,
    /// The unit in which the descriptor counts, in bytes.
    pub unit: u64,
}

impl Capacity {
    /// Compares the capacity with that of the disk's image.
    ///
    /// # Errors `Corrupt` if they differ by more than a rounding to the unit or to sectors can explain.
    pub fn check(&self, image: u64) -> Result<()> {
        if self.bytes.abs_diff(image) < self.unit.max(SECTOR) {
            return Ok(());
        }
        let text = format!(
            "the description says that the disk has {}, and its image has {}: one of them is wrong; correct the \
             description, or import the image alone",
            size(self.bytes),
            size(image)
        );
        Err(Error::new(ErrorKind::Corrupt, text))
    }
}

/// The devices of a machine's hardware section.
pub fn items(hardware: &Element) -> impl Iterator<Item = &Element> {
    hardware.children.iter().filter(|item| ITEMS.contains(&&*item.name))
}

/// The bytes of an item of the kind [`resource::MEMORY`]; `None` if its quantity or its unit cannot be read.
pub fn memory(item: &Element) -> Option<u64> {
    let unit = item.text_of("AllocationUnits").map_or(Some(MEMORY_UNIT), allocation_unit)?;
    item.text_of("VirtualQuantity")?.parse::<u64>().ok()?.checked_mul(unit)
}

/// The number of bytes of an allocation unit: `byte * 2^30`, or a word such as `GigaBytes` in old descriptors.
pub fn allocation_unit(text: &str) -> Option<u64> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_lowercase();
    match text.as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" => return Some(1 << 10),
        "megabytes" | "mb" => return Some(1 << 20),
        "gigabytes" => return Some(1 << 30),
        _ => {}
    }
    let factor = text.strip_prefix("bytes").or_else(|| text.strip_prefix("byte"))?.strip_prefix('*')?;
    match factor.split_once('^') {
        Some((base, exponent)) => base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?),
        None => factor.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn files_disks_and_machines_are_found_in_the_order_of_the_text() {
        let text = "<o:Envelope xmlns:o='u'><References><File o:id='f' o:href='d.vmdk'/></References>\n\
                    <DiskSection>\
                    <Disk o:diskId='d' capacity='3' capacityAllocationUnits='byte * 2^20'/></DiskSection>\n\
                    <VirtualSystemCollection><VirtualSystem id='a'/><VirtualSystemCollection>\
                    <VirtualSystem id='b'><VirtualHardwareSection><Info/><Item><VirtualQuantity>2</VirtualQuantity>\
                    <AllocationUnits>GigaBytes</AllocationUnits></Item><StorageItem/></VirtualHardwareSection>\
                    </VirtualSystem></VirtualSystemCollection></VirtualSystemCollection></o:Envelope>";
        let envelope = Envelope::parse(text.as_bytes(), "f").unwrap();
        let (files, disks): (Vec<_>, Vec<_>) = (envelope.files().collect(), envelope.disks().collect());
        assert_eq!((files.len(), envelope.href(files[0]).unwrap()), (1, "d.vmdk"));
        assert_eq!(
            (disks.len(), envelope.capacity(disks[0]).unwrap()),
            (1, Capacity { bytes: 3 << 20, unit: 1 << 20 })
        );
        let systems = envelope.systems();
        assert_eq!(systems.iter().map(|system| system.attribute("id").unwrap()).collect::<Vec<_>>(), ["a", "b"]);
        let items: Vec<_> = items(systems[1].child("VirtualHardwareSection").unwrap()).collect();
        assert_eq!((items.len(), memory(items[0]), memory(items[1])), (2, Some(2 << 30), None));
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_its_line() {
        let error = Envelope::parse(b"\n<domain/>", "f").unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().starts_with("'f', line 2: "), "{error}");
        let text = "<Envelope><References>\n<File id='a' href='a' compression='gzip'/>\n<File id='b' chunkSize='9'/>\n\
                    </References><DiskSection>\n<Disk capacity='${size}'/></DiskSection></Envelope>";
        let envelope = Envelope::parse(text.as_bytes(), "f").unwrap();
        let files: Vec<_> = envelope.files().map(|file| envelope.href(file).unwrap_err()).collect();
        assert_eq!([files[0].kind(), files[1].kind()], [ErrorKind::Unsupported, ErrorKind::Invalid]);
        assert!(files[0].to_string().contains("line 2: file 'a' has a compression (gzip)"), "{}", files[0]);
        let error = envelope.capacity(envelope.disks().next().unwrap()).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("line 5: "), "{error}");
    }

    #[test]
    fn units_of_all_versions() {
        for (text, bytes) in [
            ("byte", Some(1)),
            ("byte * 2^30", Some(1 << 30)),
            ("bytes*1024", Some(1024)),
            ("MegaBytes", Some(1 << 20)),
            ("MB", Some(1 << 20)),
            ("byte * 2^64", None),
            ("byte * 9^999999999", None),
            ("furlong", None),
        ] {
            assert_eq!(allocation_unit(text), bytes, "{text}");
        }
    }

    #[test]
    fn a_capacity_is_that_of_the_image_except_for_rounding() {
        let (bytes, gib) = (Capacity { bytes: 16 << 20, unit: 1 }, Capacity { bytes: 10 << 30, unit: 1 << 30 });
        for (capacity, image, fits) in [
            (bytes, 16 << 20, true),
            (bytes, (16 << 20) + 512, false),
            (bytes, 64 << 40, false),
            (Capacity { bytes: 1000, unit: 1 }, 1024, true),
            (gib, (9 << 30) + 512, true),
            (gib, 9 << 30, false),
            (gib, u64::MAX, false),
        ] {
            assert_eq!(capacity.check(image).is_ok(), fits, "{capacity:?} {image}");
        }
        let error = bytes.check(64 << 40).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("has 16 MiB, and its image has 64 TiB"), "{error}");
    }
}
