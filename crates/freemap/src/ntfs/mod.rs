//! NTFS: one bitmap of all clusters, in the file `$Bitmap`.
//!
//! Sources: the documentation of the Linux-NTFS project, and the layout definitions of ntfs-3g.
//!
//! 1. The bitmap has no checksum, so the volume is the unit of doubt: no range is reported before the whole bitmap was
//!    read and all system files that were read here are in use in it.
//! 2. A volume that Windows may not have finished to write is refused: one that is marked dirty, whose journal
//!    (`$LogFile`) was not closed or has a version that Windows uses only while it runs or for fast startup, and one
//!    with a file `hiberfil.sys` that may contain a hibernated system. An empty journal proves nothing: ntfs-3g empties
//!    it, sets no other mark while the volume is mounted, and writes bitmap and records in any order.
//! 3. A volume with shadow copies is refused: Windows copies a cluster for them only when the cluster is overwritten,
//!    so clusters that were freed since are still theirs, although the bitmap has them as free.
//! 4. System files with attributes in several records are refused.

mod record;

use crate::bitmap::{all_set, clear_runs, merged};
use crate::fields::{byte, has, le16, le32, le64};
use crate::{EachFree, Outcome, Volume, refused};
use record::{Attribute, Run, fixed, in_runs};
use std::ops::Range;

/// Looks at a piece of the bitmap, which covers a range of clusters.
type LookAtPiece<'a> = dyn FnMut(&[u8], Range<u64>) -> Outcome<()> + 'a;

/// Bytes of the bitmap that are read at a time.
const PIECE: u64 = 64 << 10;
/// Bytes of a page of the journal.
const LOG_PAGE: u64 = 4096;
/// Bytes at the beginning of an empty journal that are compared.
const LOG_HEAD: u64 = 64 << 10;
/// Most bytes of the index of the root folder that are searched.
const INDEX_MAX: u64 = 64 << 20;
/// Bytes of a hibernation file that show whether it is in use.
const HIBERNATION_HEAD: u64 = 4096;

/// The place of the header of shadow copies, and the identifier with which it begins.
const SHADOW_HEADER: u64 = 0x1E00;
const SHADOW_IDENTIFIER: [u8; 16] =
    [0x6B, 0x87, 0x08, 0x38, 0x76, 0xC1, 0x48, 0x4E, 0xB7, 0xAE, 0x04, 0x04, 0x6E, 0x6C, 0xC7, 0x52];
/// The place of their catalog in this header: zero if there has been no shadow copy.
const SHADOW_CATALOG: usize = 0x30;
/// The identifiers of this volume and of the volume that stores its shadow copies.
const SHADOW_VOLUMES: (Range<usize>, Range<usize>) = (0x40..0x50, 0x50..0x60);

const RECORD_MFT: u64 = 0;
const RECORD_LOG: u64 = 2;
const RECORD_VOLUME: u64 = 3;
const RECORD_ROOT: u64 = 5;
const RECORD_BITMAP: u64 = 6;

const ATTRIBUTE_VOLUME: u32 = 0x70;
const ATTRIBUTE_DATA: u32 = 0x80;
const ATTRIBUTE_INDEX_ROOT: u32 = 0x90;
const ATTRIBUTE_INDEX: u32 = 0xA0;

/// Flags of a volume with work to be completed by Windows: dirty, the journal is to be resized, an upgrade, a repair of
/// identifiers, a check that runs or has changed something.
const FLAGS_UNFINISHED: u16 = 0xC027;
const LOG_NO_CLIENT: u16 = 0xFFFF;
const LOG_CLEAN: u16 = 2;
const INDEX_ENTRY_LAST: u16 = 2;

/// A volume.
pub(crate) struct Ntfs<'a> {
    volume: Volume<'a>,
    /// Bytes of a cluster.
    cluster: u64,
    clusters: u64,
    /// Bytes of a record of the MFT.
    record: u64,
    mft: Vec<Run>,
    bitmap: Vec<Run>,
    /// Clusters that must be in use.
    system: Vec<Range<u64>>,
}

/// A size in clusters if positive, otherwise the binary logarithm of a size in bytes.
fn unit(value: u8, cluster: u64) -> Option<u64> {
    match value as i8 {
        0 => None,
        clusters @ 1.. => Some(clusters as u64 * cluster),
        order => 1_u64.checked_shl(u32::from(order.unsigned_abs())),
    }
}

impl<'a> Ntfs<'a> {
    /// Reads the boot sector and the system files.
    pub fn open(volume: Volume<'a>) -> Outcome<Self> {
        let boot = volume.read(0, 512)?;
        let sector = u64::from(le16(&boot, 0xB));
        // Values above 128 are negative binary logarithms.
        let sectors = match byte(&boot, 0xD) {
            power @ 0xF0.. => 1_u64 << (256 - u32::from(power)),
            count => u64::from(count),
        };
        if ![512, 1024, 2048, 4096].contains(&sector) || !sectors.is_power_of_two() || sector * sectors > 2 << 20 {
            return refused("the size of its clusters is invalid");
        }
        let cluster = sector * sectors;
        let clusters = le64(&boot, 0x28) / sectors;
        if clusters == 0 || clusters.checked_mul(cluster).is_none_or(|bytes| bytes > volume.length()) {
            return refused(format!("its {clusters} clusters of {cluster} bytes reach beyond the volume"));
        }
        let Some(record) = unit(byte(&boot, 0x40), cluster).filter(|size| [1024, 2048, 4096].contains(size)) else {
            return refused("the size of its records is not supported");
        };
        let (first, mirror) = (le64(&boot, 0x30), le64(&boot, 0x38));
        if first >= clusters || mirror >= clusters {
            return refused("the place of its MFT is invalid");
        }
        let start = vec![Run { first: 0, place: Some(first), count: clusters - first }];
        let mut ntfs = Self { volume, cluster, clusters, record, mft: start, bitmap: Vec::new(), system: Vec::new() };
        let mft = ntfs.runs_of(RECORD_MFT, "$MFT")?.0;
        if mft.first().and_then(|run| run.place) != Some(first) {
            return refused("the place of its MFT is inconsistent");
        }
        ntfs.system.extend([0..1, mirror..mirror + 1]);
        ntfs.mft = ntfs.used(mft)?;
        ntfs.check_volume()?;
        ntfs.check_shadow_copies()?;
        ntfs.check_log()?;
        ntfs.check_hibernation()?;
        let (bitmap, length) = ntfs.runs_of(RECORD_BITMAP, "$Bitmap")?;
        if length < clusters.div_ceil(8) {
            return refused("its bitmap is too short");
        }
        ntfs.bitmap = ntfs.used(bitmap)?;
        Ok(ntfs)
    }

    pub fn size(&self) -> u64 {
        self.clusters * self.cluster
    }

    /// The free ranges of the volume.
    pub fn free(&self, each: EachFree<'_>) -> Outcome<()> {
        // The runs of hostile files may all cover the whole volume.
        let system = merged(&self.system);
        self.each_piece(&mut |map, covered| {
            for range in &system {
                let inside = range.start.max(covered.start)..range.end.min(covered.end);
                if inside.start < inside.end && !all_set(map, inside.start - covered.start..inside.end - covered.start)
                {
                    return refused("its bitmap has a system file as free");
                }
            }
            Ok(())
        })?;
        self.each_piece(&mut |map, covered| {
            for run in clear_runs(map, covered.end - covered.start) {
                each((covered.start + run.start) * self.cluster..(covered.start + run.end) * self.cluster)?;
            }
            Ok(())
        })
    }

    /// Calls `each` for every piece of the bitmap, with the clusters that it covers.
    fn each_piece(&self, each: &mut LookAtPiece<'_>) -> Outcome<()> {
        let length = self.clusters.div_ceil(8);
        let mut at = 0;
        while at < length {
            let count = PIECE.min(length - at);
            let map = self.read_runs(&self.bitmap, at, count)?;
            each(&map, at * 8..((at + count) * 8).min(self.clusters))?;
            at += count;
        }
        Ok(())
    }

    /// Notes that the clusters of a system file must be in use; refused if the file has holes.
    fn used(&mut self, runs: Vec<Run>) -> Outcome<Vec<Run>> {
        for run in &runs {
            let Some(place) = run.place else { return refused("a system file has a hole") };
            self.system.push(place..place + run.count);
        }
        Ok(runs)
    }

    /// Bytes of a file, which lie within its runs.
    fn read_runs(&self, runs: &[Run], offset: u64, length: u64) -> Outcome<Vec<u8>> {
        let mut bytes = Vec::with_capacity(length.min(PIECE) as usize);
        let mut at = offset;
        while at < offset + length {
            let Some((place, rest)) = in_runs(runs, at / self.cluster) else {
                return refused("a system file is shorter than stated");
            };
            let inside = at % self.cluster;
            let count = (rest * self.cluster - inside).min(offset + length - at);
            match place {
                Some(place) => bytes.extend(self.volume.read(place * self.cluster + inside, count)?),
                None => bytes.resize(bytes.len() + count as usize, 0),
            }
            at += count;
        }
        Ok(bytes)
    }

    /// A record of the MFT.
    fn record(&self, number: u64) -> Outcome<Vec<u8>> {
        let Some(at) = number.checked_mul(self.record) else { return refused("the number of a record is invalid") };
        let bytes = fixed(self.read_runs(&self.mft, at, self.record)?, b"FILE")?;
        match le16(&bytes, 0x16) & 1 {
            0 => refused(format!("record {number} of its MFT is not in use")),
            _ => Ok(bytes),
        }
    }

    /// The runs of a file's unnamed data, and the length of the data that was written.
    fn runs_of(&self, number: u64, name: &str) -> Outcome<(Vec<Run>, u64)> {
        let record = self.record(number)?;
        match record::find(&record, ATTRIBUTE_DATA)? {
            Some(Attribute::Runs { bytes, length, valid }) => {
                Ok((record::runs(bytes, self.clusters)?, length.min(valid)))
            }
            _ => refused(format!("its file {name} has no data in the expected form")),
        }
    }

    fn check_volume(&self) -> Outcome<()> {
        let record = self.record(RECORD_VOLUME)?;
        let Some(Attribute::Resident { value }) = record::find(&record, ATTRIBUTE_VOLUME)? else {
            return refused("the information about the volume is missing");
        };
        if value.len() < 12 {
            return refused("the information about the volume is too short");
        }
        match le16(value, 10) & FLAGS_UNFINISHED {
            0 => Ok(()),
            _ => refused("it is marked dirty: let its guest check it"),
        }
    }

    /// Refuses a volume that may have shadow copies.
    fn check_shadow_copies(&self) -> Outcome<()> {
        let header = self.volume.read(SHADOW_HEADER, 512)?;
        let is_elsewhere = header[SHADOW_VOLUMES.0] != header[SHADOW_VOLUMES.1];
        match has(&header, 0, &SHADOW_IDENTIFIER) && (le64(&header, SHADOW_CATALOG) != 0 || is_elsewhere) {
            true => refused("it has shadow copies, which use clusters that its bitmap has as free"),
            false => Ok(()),
        }
    }

    /// Refuses a volume whose journal was not closed.
    fn check_log(&mut self) -> Outcome<()> {
        let (runs, length) = self.runs_of(RECORD_LOG, "$LogFile")?;
        if length < LOG_HEAD {
            return refused("its journal is too short");
        }
        let runs = self.used(runs)?;
        let head = self.read_runs(&runs, 0, LOG_HEAD)?;
        if head.iter().all(|byte| *byte == 0xFF) {
            return refused(
                "its journal is empty, so it may not have been cleanly unmounted: let Windows mount it once",
            );
        }
        let page = |number: u64| -> Outcome<(u64, bool)> {
            let page = head[(number * LOG_PAGE) as usize..((number + 1) * LOG_PAGE) as usize].to_vec();
            let page = fixed(page, b"RSTR")?;
            if u64::from(le32(&page, 0x10)) != LOG_PAGE {
                return refused("the pages of its journal are not of 4 KiB");
            }
            if (le16(&page, 0x1C), le16(&page, 0x1A)) != (1, 1) {
                return refused(
                    "it was not cleanly unmounted: its journal is one of a running or fast-starting Windows",
                );
            }
            let at = usize::from(le16(&page, 0x18));
            if at + 0x10 > page.len() {
                return refused("its journal is damaged");
            }
            let is_clean = le16(&page, at + 0xC) == LOG_NO_CLIENT || le16(&page, at + 0xE) & LOG_CLEAN != 0;
            Ok((le64(&page, at), is_clean))
        };
        let (one, two) = (page(0)?, page(1)?);
        // The page with the higher sequence number is the newer one.
        let is_clean = if one.0 == two.0 { one.1 && two.1 } else { one.max(two).1 };
        if is_clean { Ok(()) } else { refused("it was not cleanly unmounted: its journal needs recovery") }
    }

    /// Refuses a volume with a hibernation file that may be in use.
    fn check_hibernation(&self) -> Outcome<()> {
        for number in self.find_in_root("hiberfil.sys")? {
            let record = self.record(number)?;
            let head = match record::find(&record, ATTRIBUTE_DATA)? {
                Some(Attribute::Runs { bytes, length, .. }) if length >= HIBERNATION_HEAD => {
                    self.read_runs(&record::runs(bytes, self.clusters)?, 0, HIBERNATION_HEAD)?
                }
                _ => return refused("its file hiberfil.sys may contain a hibernated system"),
            };
            if !(head.iter().all(|byte| *byte == 0) || has(&head, 0, b"WAKE") || has(&head, 0, b"wake")) {
                return refused("its file hiberfil.sys contains a hibernated system");
            }
        }
        Ok(())
    }

    /// The records of all files in the root folder with a name. All blocks of the folder's index are searched, also
    /// those that are not used any more, so records of former files may be among them.
    fn find_in_root(&self, name: &str) -> Outcome<Vec<u64>> {
        let record = self.record(RECORD_ROOT)?;
        let Some(Attribute::Resident { value }) = record::find(&record, ATTRIBUTE_INDEX_ROOT)? else {
            return refused("its root folder has no index");
        };
        let mut found = Vec::new();
        find_entries(value.get(0x10..).unwrap_or_default(), name, &mut found)?;
        let (runs, length) = match record::find(&record, ATTRIBUTE_INDEX)? {
            None => return Ok(found),
            Some(Attribute::Runs { bytes, valid, .. }) => (record::runs(bytes, self.clusters)?, valid),
            Some(Attribute::Resident { .. }) => return refused("the index of its root folder is inconsistent"),
        };
        let block = u64::from(le32(value, 8));
        if !block.is_power_of_two() || !(512..=65_536).contains(&block) || length > INDEX_MAX {
            return refused("the index of its root folder is not supported");
        }
        for at in (0..length / block).map(|number| number * block) {
            let bytes = self.read_runs(&runs, at, block)?;
            if bytes.iter().any(|byte| *byte != 0) {
                find_entries(&fixed(bytes, b"INDX")?[0x18..], name, &mut found)?;
            }
        }
        Ok(found)
    }
}

/// Adds the records of files with a name in a node of an index of names. `node` begins with the header of the node.
fn find_entries(node: &[u8], name: &str, found: &mut Vec<u64>) -> Outcome<()> {
    let (mut at, end) = (le32(node, 0) as usize, (le32(node, 4) as usize).min(node.len()));
    while at + 0x10 <= end {
        let entry = &node[at..end];
        let length = usize::from(le16(entry, 8));
        if le16(entry, 12) & INDEX_ENTRY_LAST != 0 {
            return Ok(());
        }
        if length < 0x10 || length > entry.len() {
            break;
        }
        let letters = usize::from(byte(entry, 0x10 + 0x40));
        let from = 0x10 + 0x42;
        let letters = entry.get(from..from + 2 * letters).unwrap_or_default();
        let is_same = |(one, other): (&[u8], u8)| one[1] == 0 && one[0].eq_ignore_ascii_case(&other);
        if letters.len() == 2 * name.len() && letters.chunks_exact(2).zip(name.bytes()).all(is_same) {
            found.push(le64(entry, 0) & 0xFFFF_FFFF_FFFF);
        }
        at += length;
    }
    refused("the index of its root folder is inconsistent")
}
