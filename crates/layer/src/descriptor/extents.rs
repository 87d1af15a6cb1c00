//! Extent lines: `ACCESS SECTORS TYPE ["FILE" [OFFSET [PARTITION-UUID [DEVICE-ID]]]]`.

use super::{Encoding, PATH_MAX, Result, corrupt, invalid, shown, unsupported};
use crate::{CAPACITY_MAX, SECTOR};

/// The guest's access to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read.
    ReadOnly,
    /// No access: reads as zeros.
    None,
}

impl Access {
    const NAMES: [(&str, Self); 3] = [("RW", Self::ReadWrite), ("RDONLY", Self::ReadOnly), ("NOACCESS", Self::None)];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, access)| *access == self).map_or("RW", |(name, _)| name)
    }
}

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// A part of a file, without a format.
    Flat,
    /// A file on VMFS, without a format.
    Vmfs,
    /// The sparse format of VMware Workstation.
    Sparse,
    /// No file: this range of the disk reads as zeros.
    Zero,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// An object of a vSAN store.
    VsanSparse,
    /// A raw device mapping on VMFS.
    VmfsRdm,
    /// A device of the host, without a file system.
    VmfsRaw,
}

impl ExtentKind {
    const NAMES: [(&str, Self); 9] = [
        ("FLAT", Self::Flat),
        ("VMFS", Self::Vmfs),
        ("SPARSE", Self::Sparse),
        ("ZERO", Self::Zero),
        ("VMFSSPARSE", Self::VmfsSparse),
        ("SESPARSE", Self::SeSparse),
        ("VSANSPARSE", Self::VsanSparse),
        ("VMFSRDM", Self::VmfsRdm),
        ("VMFSRAW", Self::VmfsRaw),
    ];

    /// The name of the kind in an extent line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("FLAT", |(name, _)| name)
    }
}

/// A line that describes an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentLine {
    /// The guest's access.
    pub access: Access,
    /// Length in sectors, never 0.
    pub sectors: u64,
    /// The kind of the extent.
    pub kind: ExtentKind,
    /// The file, relative to the descriptor's folder; `None` for zeros.
    pub file: Option<String>,
    /// Sectors of the file before the extent.
    pub offset: u64,
    /// The fields after the offset that VMware writes (partition, device), passed through.
    pub device: String,
}

impl ExtentLine {
    /// An extent that is a whole file.
    pub fn whole(kind: ExtentKind, sectors: u64, file: impl Into<String>) -> Self {
        let file = Some(file.into());
        Self { access: Access::ReadWrite, sectors, kind, file, offset: 0, device: String::new() }
    }

    /// Length in bytes, which cannot overflow: parsing and writing limit it to the largest capacity.
    pub fn length(&self) -> u64 {
        self.sectors.saturating_mul(SECTOR)
    }

    /// Parses an extent line. Returns `None` if the line does not begin with an access and a number of sectors.
    pub(super) fn parse(line: &[u8], encoding: &Encoding) -> Option<Result<Self>> {
        let (first, rest) = word(line);
        let (second, rest) = word(rest);
        let numeric = !second.is_empty() && second.iter().all(u8::is_ascii_digit);
        let access = Access::NAMES.iter().find(|(name, _)| name.as_bytes().eq_ignore_ascii_case(first));
        match access {
            Some((_, access)) => Some(Self::parse_rest(line, *access, second, rest, encoding)),
            // If a line that looks like an extent were skipped, the extents after it would be at wrong offsets.
            None if numeric && first.iter().all(u8::is_ascii_alphabetic) && !first.is_empty() => {
                Some(Err(unsupported(format!("extent line {} allows an access of unknown kind", shown(line)))))
            }
            None => None,
        }
    }

    fn parse_rest(line: &[u8], access: Access, count: &[u8], rest: &[u8], encoding: &Encoding) -> Result<Self> {
        let wrong = |what: &str| corrupt(format!("extent line {} {what}", shown(line)));
        let sectors = number(count).ok_or_else(|| wrong("has no number of sectors"))?;
        if sectors == 0 || sectors > CAPACITY_MAX / SECTOR {
            return Err(wrong("has a size that no disk has"));
        }
        let (name, rest) = word(rest);
        let kind = ExtentKind::NAMES.iter().find(|(known, _)| known.as_bytes().eq_ignore_ascii_case(name));
        let Some((_, kind)) = kind else {
            return Err(unsupported(format!("extent line {} is of unknown type {}", shown(line), shown(name))));
        };
        let rest = rest.trim_ascii();
        let mut extent = Self { access, sectors, kind: *kind, file: None, offset: 0, device: String::new() };
        if rest.is_empty() {
            return match kind {
                ExtentKind::Zero => Ok(extent),
                _ => Err(wrong("names no file")),
            };
        }
        let (file, rest) = quoted(rest).ok_or_else(|| wrong("has a file name without quotes around it"))?;
        if file.is_empty() || file.len() > PATH_MAX {
            return Err(wrong("has a file name that is empty or too long"));
        }
        extent.file = Some(encoding.decode(file, "the name of an extent")?);
        let (offset, device) = word(rest);
        if !offset.is_empty() {
            extent.offset = number(offset).ok_or_else(|| wrong("has an offset that is no number"))?;
            if extent.offset > u64::MAX / SECTOR - CAPACITY_MAX / SECTOR {
                return Err(wrong("begins past the end of any file"));
            }
        }
        let device = device.trim_ascii();
        if !device.is_ascii() {
            return Err(wrong("names a device in characters other than ASCII"));
        }
        extent.device = device.iter().map(|byte| char::from(*byte)).collect();
        Ok(extent)
    }

    /// Appends the line without its line end.
    pub(super) fn write(&self, encoding: &Encoding, out: &mut Vec<u8>) -> Result<()> {
        let text = format!("{} {} {}", self.access.name(), self.sectors, self.kind.name());
        out.extend_from_slice(text.as_bytes());
        let Some(file) = &self.file else {
            return match self.kind {
                ExtentKind::Zero => Ok(()),
                _ => Err(invalid(format!("an extent of type {} names no file", self.kind.name()))),
            };
        };
        let name = super::write::quotable(encoding, file, "the name of an extent")?;
        out.extend_from_slice(b" \"");
        out.extend_from_slice(&name);
        out.push(b'"');
        // QEMU requires an offset for FLAT and refuses one for all other kinds.
        if self.kind == ExtentKind::Flat || self.offset != 0 || !self.device.is_empty() {
            out.extend_from_slice(format!(" {}", self.offset).as_bytes());
        }
        if !self.device.is_empty() {
            super::write::check_plain(self.device.as_bytes(), "the device of an extent")?;
            out.extend_from_slice(format!(" {}", self.device).as_bytes());
        }
        Ok(())
    }
}

/// The first word, and the text after it.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    let text = text.trim_ascii_start();
    text.split_at(text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len()))
}

/// The text between the quote at the beginning of `text` and the next one, and the text after it. A name cannot contain
/// a quote: the format has no known escape for it.
fn quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let inner = text.strip_prefix(b"\"")?;
    let end = inner.iter().position(|byte| *byte == b'"')?;
    Some((&inner[..end], &inner[end + 1..]))
}

/// A number in decimal digits only.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}
