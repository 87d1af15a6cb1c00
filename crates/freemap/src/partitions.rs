//! Partitions of a disk: MBR with logical partitions, and GPT.
//!
//! Sources: the UEFI specification, chapter 5, for both.
//!
//! 1. Partitions are returned only if all of them lie within the disk and none overlaps another one or a part of the
//!    tables: the free map of one partition says nothing about the data of another. If an MBR and a GPT describe the
//!    disk, each partition of the MBR must be one of the GPT.
//! 2. A disk that has both a table and the signature of a file system is not divided: one of them is a remainder.
//! 3. A partition whose type is of something else than a file system of Linux or Windows is marked. Dynamic disks of
//!    Windows have one partition for all volumes, and its first volume may continue behind others. A BSD makes its file
//!    system in a partition without overwriting the superblock of a former one.

use crate::fields::{be16, be32, byte, crc32, has, le16, le32, le64};
use crate::{Outcome, Source, Stop, Volume, refused, signatures};
use error::Result;
use std::ops::Range;

const SECTOR: u64 = 512;
/// Most logical partitions.
const LOGICAL_MAX: usize = 128;
/// Most entries of a GPT.
const ENTRIES_MAX: u32 = 1024;
const ENTRY_MAX: u32 = 1024;
/// First entry of an MBR.
const ENTRIES: usize = 446;
const TYPE_PROTECTIVE: u8 = 0xEE;
const TYPES_EXTENDED: [u8; 3] = [0x05, 0x0F, 0x85];
/// Types of an MBR for file systems of Windows (NTFS, hidden NTFS, recovery) and of Linux.
const TYPES_OF_FILE_SYSTEMS: [u8; 4] = [0x07, 0x17, 0x27, 0x83];
/// The same for a GPT: basic data and recovery of Windows, and file systems of Linux: unspecified, `/home`, of one
/// user, `/srv`, `/var`, `/var/tmp`, `/boot`, the root of x86-64, x86, ARM64 and ARM, and `/usr` of x86-64 and ARM64.
const GUIDS_OF_FILE_SYSTEMS: [&str; 15] = [
    "EBD0A0A2-B9E5-4433-87C0-68B6B72699C7",
    "DE94BBA4-06D1-4D40-A16A-BFD50179D6AC",
    "0FC63DAF-8483-4772-8E79-3D69D8477DE4",
    "933AC7E1-2EB4-4F13-B844-0E14E2AEF915",
    "773F91EF-66D4-49B5-BD83-D683BF40AD16",
    "3B8F8425-20E0-4F3B-907F-1A25A76F98E8",
    "4D21B016-B534-45C2-A9FB-5C16E091FD2D",
    "7EC6F557-3BC5-4ACA-B293-16EF5DF639D1",
    "BC13C2FF-59E6-4262-A352-B275FD6F7172",
    "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709",
    "44479540-F297-41B2-9AF7-D131D5F0458A",
    "B921B045-1DF0-41C3-AF44-4C6F280D3FAE",
    "69DAD710-2CE4-4E3C-B16C-21A1D49ABED3",
    "8484680C-9521-48C6-9C11-B0720656F69E",
    "B0E01050-EE5F-4390-949A-9101B17104E9",
];

/// How a disk is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Not at all: its content begins with its first byte.
    Whole,
    /// By an MBR.
    Mbr,
    /// By a GPT.
    Gpt,
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// The number that Linux gives it; 0 for a disk without partitions.
    pub number: u32,
    /// The bytes of the disk that belong to it.
    pub bytes: Range<u64>,
    /// Why a file system that is found in it may be a remainder, or only a part of one: its type is of something else.
    pub unsuited: Option<String>,
}

/// The partitions of a disk, in order of their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How the disk is divided.
    pub scheme: Scheme,
    /// The partitions; a disk that is not divided has one.
    pub partitions: Vec<Partition>,
}

/// Finds the partitions of a disk. The inner error is the reason why they cannot be known. Fails only if the disk
/// cannot be read.
pub fn partitions(source: &dyn Source, capacity: u64) -> Result<std::result::Result<Layout, String>> {
    match divide(&Volume::new(source, 0, capacity)) {
        Ok(layout) => Ok(Ok(layout)),
        Err(Stop::Refused(reason)) => Ok(Err(reason)),
        Err(Stop::Failed(error)) => Err(error),
    }
}

fn divide(disk: &Volume<'_>) -> Outcome<Layout> {
    let whole = || Layout {
        scheme: Scheme::Whole,
        partitions: vec![Partition { number: 0, bytes: 0..disk.length(), unsuited: None }],
    };
    if disk.length() < SECTOR {
        return Ok(whole());
    }
    let found = signatures::find(disk)?;
    let mbr = disk.read(0, SECTOR)?;
    let kinds = [0, 1, 2, 3].map(|index| byte(&mbr, ENTRIES + index * 16 + 4));
    // The boot sectors of NTFS and FAT end as an MBR does, with instructions or text in the place of the table.
    let is_table = has(&mbr, 510, &[0x55, 0xAA])
        && (0..4).all(|index| byte(&mbr, ENTRIES + index * 16) & 0x7F == 0)
        && kinds.iter().any(|kind| *kind != 0);
    if !is_table {
        return Ok(whole());
    }
    if !found.is_empty() {
        return refused(format!("there are a partition table and signatures of {}", found.join(" and of ")));
    }
    let (scheme, mut partitions) =
        if kinds.contains(&TYPE_PROTECTIVE) { (Scheme::Gpt, gpt(disk)?) } else { (Scheme::Mbr, primary(disk, &mbr)?) };
    if scheme == Scheme::Gpt {
        let known = |bytes: Range<u64>| partitions.iter().any(|one| one.bytes == bytes);
        let is_extra = |index: usize| ![0, TYPE_PROTECTIVE].contains(&kinds[index]) && !known(entry(&mbr, index, 0));
        if (0..4).any(is_extra) {
            return refused("the MBR has a partition that the GPT does not have");
        }
    }
    partitions.sort_by_key(|partition| partition.bytes.start);
    if partitions.iter().any(|one| one.bytes.is_empty() || one.bytes.end > disk.length()) {
        return refused("a partition is not within the disk");
    }
    if partitions.windows(2).any(|two| two[0].bytes.end > two[1].bytes.start) {
        return refused("partitions overlap");
    }
    Ok(Layout { scheme, partitions })
}

/// The range of an entry of an MBR, in bytes from `base` on.
fn entry(sector: &[u8], index: usize, base: u64) -> Range<u64> {
    let at = ENTRIES + index * 16;
    let (first, count) = (u64::from(le32(sector, at + 8)), u64::from(le32(sector, at + 12)));
    base + first * SECTOR..base + (first + count) * SECTOR
}

fn unsuited_kind(kind: u8) -> Option<String> {
    (!TYPES_OF_FILE_SYSTEMS.contains(&kind))
        .then(|| format!("the type of the partition ({kind:#04x}) is not the one of such a file system"))
}

/// As [`unsuited_kind`] for the type of an entry of a GPT, which is a GUID in the byte order of Windows.
fn unsuited_guid(entry: &[u8]) -> Option<String> {
    let (first, second, third) = (le32(entry, 0), le16(entry, 4), le16(entry, 6));
    let (fourth, high, low) = (be16(entry, 8), be16(entry, 10), be32(entry, 12));
    let guid = format!("{first:08X}-{second:04X}-{third:04X}-{fourth:04X}-{high:04X}{low:08X}");
    (!GUIDS_OF_FILE_SYSTEMS.contains(&guid.as_str()))
        .then(|| format!("the type of the partition ({guid}) is not the one of such a file system"))
}

/// The partitions of an MBR.
fn primary(disk: &Volume<'_>, mbr: &[u8]) -> Outcome<Vec<Partition>> {
    let mut partitions = Vec::new();
    let mut extended = None;
    for index in 0..4 {
        let bytes = entry(mbr, index, 0);
        match byte(mbr, ENTRIES + index * 16 + 4) {
            0 => {}
            kind if TYPES_EXTENDED.contains(&kind) => {
                if extended.replace(bytes).is_some() {
                    return refused("there are two extended partitions");
                }
            }
            kind => partitions.push(Partition { number: index as u32 + 1, bytes, unsuited: unsuited_kind(kind) }),
        }
    }
    if let Some(extended) = extended {
        // A primary partition within the extended one would hide behind the logical ones.
        let overlaps = |one: &Partition| one.bytes.start < extended.end && extended.start < one.bytes.end;
        if partitions.iter().any(overlaps) {
            return refused("partitions overlap");
        }
        logical(disk, extended, &mut partitions)?;
    }
    Ok(partitions)
}

/// The logical partitions: each has a table of its own, which refers to the next table.
fn logical(disk: &Volume<'_>, extended: Range<u64>, partitions: &mut Vec<Partition>) -> Outcome<()> {
    let mut table = extended.start;
    let mut tables = Vec::new();
    for number in 0..LOGICAL_MAX as u32 {
        let sector = disk.read(table, SECTOR)?;
        tables.push(table..table + SECTOR);
        if !has(&sector, 510, &[0x55, 0xAA]) {
            return refused("the table of a logical partition is damaged");
        }
        let kind = byte(&sector, ENTRIES + 4);
        if kind != 0 {
            let bytes = entry(&sector, 0, table);
            // The table itself is in no partition.
            if bytes.start <= table || bytes.end > extended.end {
                return refused("a logical partition is not within the extended one");
            }
            partitions.push(Partition { number: number + 5, bytes, unsuited: unsuited_kind(kind) });
        }
        let next = entry(&sector, 1, extended.start);
        match byte(&sector, ENTRIES + 16 + 4) {
            // A table without a partition of its own may lie in the partition of another one.
            0 => return outside(partitions, &tables),
            kind if TYPES_EXTENDED.contains(&kind) => {}
            _ => return refused("the table of a logical partition is not supported"),
        }
        if next.start <= table || next.start >= extended.end {
            return refused("the tables of the logical partitions do not ascend");
        }
        table = next.start;
    }
    refused(format!("there are more than {LOGICAL_MAX} logical partitions"))
}

/// Refuses partitions that overlap one of some ranges.
fn outside(partitions: &[Partition], ranges: &[Range<u64>]) -> Outcome<()> {
    let overlaps =
        |one: &Partition| ranges.iter().any(|range| one.bytes.start < range.end && range.start < one.bytes.end);
    match partitions.iter().any(overlaps) {
        true => refused("a partition contains a part of the partition table"),
        false => Ok(()),
    }
}

/// The partitions of a GPT, on a disk with sectors of 512 or 4096 bytes.
fn gpt(disk: &Volume<'_>) -> Outcome<Vec<Partition>> {
    for sector in [512, 4096] {
        if disk.length() < 2 * sector {
            break;
        }
        let header = disk.read(sector, sector)?;
        if has(&header, 0, b"EFI PART") {
            return entries(disk, &header, sector);
        }
    }
    refused("the GPT is missing")
}

fn entries(disk: &Volume<'_>, header: &[u8], sector: u64) -> Outcome<Vec<Partition>> {
    let length = le32(header, 12) as usize;
    let Some(covered) = header.get(..length).filter(|_| length >= 92) else {
        return refused("the header of the GPT is invalid");
    };
    if crc32(&[&covered[..16], &[0; 4], &covered[20..]]) != le32(header, 16) || le64(header, 24) != 1 {
        return refused("the header of the GPT is damaged");
    }
    let (first, count, size) = (le64(header, 72), le32(header, 80), le32(header, 84));
    if count > ENTRIES_MAX || !(128..=ENTRY_MAX).contains(&size) {
        return refused("the GPT has more or larger entries than are supported");
    }
    let Some(at) = first.checked_mul(sector) else { return refused("the header of the GPT is invalid") };
    let table_length = u64::from(count) * u64::from(size);
    let table = disk.read(at, table_length)?;
    if crc32(&[&table]) != le32(header, 88) {
        return refused("the entries of the GPT are damaged");
    }
    let mut partitions = Vec::new();
    for (index, entry) in table.chunks_exact(size as usize).enumerate() {
        if entry[..16] == [0; 16] {
            continue;
        }
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let range = first.checked_mul(sector).zip(last.checked_add(1).and_then(|end| end.checked_mul(sector)));
        let Some((start, end)) = range.filter(|(start, end)| start < end) else {
            return refused("a partition is not within the disk");
        };
        partitions.push(Partition { number: index as u32 + 1, bytes: start..end, unsuited: unsuited_guid(entry) });
    }
    // The header with the MBR, the entries, and the copy of both, which has its header behind.
    let copy = le64(header, 32).saturating_mul(sector);
    let copy = copy.saturating_sub(table_length)..copy.saturating_add(sector);
    outside(&partitions, &[0..2 * sector, at..at + table_length, copy])?;
    Ok(partitions)
}
