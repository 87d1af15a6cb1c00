//! Checking every table: allocated and dead space, and contradictions. Opening for writing uses this too, so that no
//! sector that an entry names is allocated again.

use super::Hosted;
use super::copies::Doubt;
use super::directory::{Directories, ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO, ReadTable};
use super::header::FLAG_ZERO_GRAINS;
use super::space::SectorRun;
use super::write::Writer;
use crate::{IoContext, Result, SECTOR};
use std::collections::BTreeMap;

/// The most findings reported as text; all are counted.
const FINDINGS_MAX: usize = 64;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Grains that have data in the file.
    pub grains: u64,
    /// Grains with the entry that means zeros.
    pub zero_grains: u64,
    /// Bytes of the file to which no entry refers; free grains of an open image are not counted.
    pub dead: u64,
    /// Grains without a valid sector in either copy of their table.
    pub bad: u64,
    /// Grains and tables that lie after the end of the file according to every copy. If the file grew, new grains would
    /// be at the same sectors.
    pub outside: u64,
    /// Grains for which the two copies of their table differ, and neither is provably wrong.
    pub unproven: u64,
    /// Grains with sectors that another entry names too, or that overlap tables.
    pub shared: u64,
    /// Directories, tables, header and descriptor that overlap each other.
    pub overlaps: u64,
    /// Tables whose two copies differ.
    pub differing: u64,
    /// Tables that cannot be read in either copy.
    pub lost: u64,
    /// Whether the image was not closed properly.
    pub unclean: bool,
    /// The first grains in doubt, as text.
    pub doubts: Vec<String>,
    /// The first entries that are wrong in one copy, as the other copy proves, as text.
    pub proven: Vec<String>,
    /// Tables for which the copies were made equal since the image was opened or last checked.
    pub repaired: u64,
    /// The first of these repairs, as text.
    pub mended: Vec<String>,
    /// Warnings about damage that did not prevent reads.
    pub warnings: Vec<String>,
}

impl Check {
    /// True when nothing is wrong; dead space and a missing close are not errors.
    pub fn is_sound(&self) -> bool {
        self.bad + self.unproven + self.shared + self.overlaps + self.differing + self.lost == 0
    }

    /// Why the image must not be written; `None` if it may be.
    pub(super) fn unwritable(&self) -> Option<String> {
        match self {
            Check { shared, .. } if *shared > 0 => Some(format!("{shared} grains overlap others")),
            Check { overlaps, .. } if *overlaps > 0 => Some(format!("{overlaps} of its tables overlap")),
            Check { outside, .. } if *outside > 0 => {
                let why = "it was truncated, or written without a flush before a power cut";
                Some(format!("{outside} of its grains and tables lie after the end of the file: {why}"))
            }
            _ => None,
        }
    }
}

/// Adds a sentence to a list that has fewer than [`FINDINGS_MAX`] sentences.
pub(super) fn tell(sentences: &mut Vec<String>, sentence: impl FnOnce() -> String) {
    if sentences.len() < FINDINGS_MAX {
        sentences.push(sentence());
    }
}

/// A bitmap of all grain-sized slots of the file.
#[derive(Clone)]
pub(super) struct Places {
    pub(super) bits: Vec<u64>,
    grain: u64,
}

impl Places {
    pub(super) fn new(sectors: u64, grain: u64) -> Self {
        Self { bits: vec![0; (sectors / grain + 2).div_ceil(64) as usize], grain }
    }

    /// Marks the slots that a range of sectors touches; true when one was marked before.
    pub(super) fn mark(&mut self, start: u64, sectors: u64) -> bool {
        let mut before = false;
        for place in start / self.grain..start.saturating_add(sectors).div_ceil(self.grain) {
            let Some(word) = self.bits.get_mut((place / 64) as usize) else { break };
            before |= *word >> (place % 64) & 1 == 1;
            *word |= 1 << (place % 64);
        }
        before
    }

    pub(super) fn is_marked(&self, place: u64) -> bool {
        self.bits.get((place / 64) as usize).is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// The end of the last marked slot.
    fn end(&self) -> u64 {
        let last = self.bits.iter().rposition(|word| *word != 0);
        last.map_or(0, |last| last as u64 * 64 + (64 - u64::from(self.bits[last].leading_zeros())))
    }
}

/// The result of a scan, with the parts that opening for writing needs.
pub(super) struct Scan {
    pub(super) check: Check,
    /// Tables whose copies differ.
    pub(super) differing: Vec<usize>,
    /// The right values of entries that only the scan of the whole file could determine, by table.
    pub(super) settled: BTreeMap<usize, Vec<(usize, u32)>>,
    /// Whether some entries are in doubt. A slot that seems unused may then be in use, so no free slot is used again.
    pub(super) in_doubt: bool,
    /// Sector ranges of header, descriptor, directories and tables, sorted.
    pub(super) areas: Vec<(u64, u64)>,
    /// Entries for which the copies of their own table prove no value.
    pub(super) doubts: Vec<(usize, Doubt)>,
    pub(super) tables: Places,
    pub(super) grains: Places,
    /// Grains that touch two slots each, so that adjacent grains seem to share a slot.
    pub(super) unaligned: u64,
    pub(super) sectors: u64,
    overhead: u64,
    grain: u64,
}

impl Scan {
    /// The first sector after everything that an entry names, or may name.
    pub(super) fn used(&self) -> u64 {
        match self.in_doubt {
            true => self.sectors.max(self.overhead),
            false => self.named_end(),
        }
    }

    pub(super) fn named_end(&self) -> u64 {
        (self.tables.end().max(self.grains.end()) * self.grain).max(self.overhead)
    }

    /// Runs of sectors before [`Scan::used`] that no entry names.
    pub(super) fn dead_runs(&self) -> impl Iterator<Item = SectorRun> + '_ {
        let (mut place, end) = (self.overhead.div_ceil(self.grain), self.named_end() / self.grain);
        std::iter::from_fn(move || {
            let marked = |place| self.tables.is_marked(place) || self.grains.is_marked(place);
            while place < end && marked(place) {
                place += 1;
            }
            let start = place;
            while place < end && !marked(place) {
                place += 1;
            }
            (place > start).then(|| SectorRun { start: start * self.grain, sectors: (place - start) * self.grain })
        })
    }
}

impl Hosted {
    /// Checks every table, and both copies of each. Reports the repairs since the last check.
    pub fn check(&self) -> Result<Check> {
        let check = self.examine()?;
        let (repaired, mended) = self.take_mended();
        Ok(Check { repaired, mended, ..check })
    }

    /// Checks every table, and leaves the report of repairs to the next check.
    pub(super) fn examine(&self) -> Result<Check> {
        // The scan reads one table after another. Without the epoch, a place that a table names when it is read can be
        // freed and named by a table that is read later: two grains seem to share it.
        let epoch = self.writer.as_ref().map(Writer::epoch);
        // The end is read before the tables: grains that are appended meanwhile may be named by a table that was read
        // already.
        let (end, free) = match &self.writer {
            Some(writer) => (writer.space.used(), writer.space.free()),
            None => (self.file.len().during(|| format!("{}: cannot find out the length", self.image))? / SECTOR, 0),
        };
        let scan = self.scan()?;
        drop(epoch);
        let before_end = |run: SectorRun| end.min(run.start + run.sectors).saturating_sub(run.start);
        let inside: u64 = scan.dead_runs().map(before_end).sum();
        let dead = (inside + end.saturating_sub(scan.named_end())).saturating_sub(free) * SECTOR;
        Ok(Check { dead, warnings: self.warnings(), ..scan.check })
    }

    /// Scans all tables, both copies of each.
    pub(super) fn scan(&self) -> Result<Scan> {
        let header = &self.header;
        let length = self.file.len().during(|| format!("{}: cannot find out the length", self.image))?;
        // 32-bit entries name nothing past this sector, however long the file is.
        let sectors = length.div_ceil(SECTOR).min(u64::from(u32::MAX) + header.grain);
        let mut scan = Scan {
            check: Check { unclean: header.unclean, ..Check::default() },
            differing: Vec::new(),
            settled: BTreeMap::new(),
            in_doubt: false,
            areas: vec![(0, 1)],
            doubts: Vec::new(),
            tables: Places::new(sectors, header.grain),
            grains: Places::new(sectors, header.grain),
            unaligned: 0,
            sectors,
            overhead: header.overhead.min(sectors),
            grain: header.grain,
        };
        let directories = self.tables.directories().strict();
        if header.descriptor_offset != 0 {
            scan.areas.push((header.descriptor_offset, header.descriptor_size));
        }
        for (copy, offset) in [header.directory_offset, header.redundant_offset].into_iter().enumerate() {
            if directories.has(copy) {
                scan.areas.push((offset, header.directory_sectors()));
            }
        }
        for index in 0..directories.len() {
            self.scan_table(&directories, index, &mut scan)?;
        }
        scan.areas.sort_unstable();
        let overlap = |pair: &&[(u64, u64)]| pair[0].0.saturating_add(pair[0].1) > pair[1].0;
        scan.check.overlaps = scan.areas.windows(2).filter(overlap).count() as u64;
        for &(start, sectors) in &scan.areas {
            scan.tables.mark(start, sectors);
        }
        self.scan_shared(&directories, &mut scan);
        self.settle_doubts(&directories, &mut scan)?;
        scan.check.differing = scan.differing.len() as u64;
        Ok(scan)
    }

    /// Table `index` from its copies in the file, or from memory if the file may be older.
    pub(super) fn look_at(&self, directories: &Directories, index: usize) -> Result<Option<ReadTable>> {
        if let Some(table) = self.tables.unwritten(index) {
            let entries = (0..table.len()).map(|at| table.entry(at)).collect();
            return Ok(Some(ReadTable::whole(entries, table.places())));
        }
        directories.read_table(self.file.as_ref(), index, &self.image, &self.warnings)
    }

    fn scan_table(&self, directories: &Directories, index: usize, scan: &mut Scan) -> Result<()> {
        let mut table = self.look_at(directories, index);
        if let Some(writer) = self.writer.as_ref().filter(|_| table.as_ref().is_ok_and(ReadTable::is_doubtful)) {
            // A commit under way may have written only one of the copies, so the table is read again while no commit
            // runs.
            let _between = writer.between_commits();
            table = self.look_at(directories, index);
        }
        let table = match table {
            Ok(Some(table)) => table,
            Ok(None) => return Ok(()),
            Err(_) => {
                scan.check.lost += 1;
                scan.in_doubt = true;
                let named = directories.named(index).into_iter().filter(|place| ![0, ENTRY_BAD].contains(place));
                let end = named.map(|place| u64::from(place) + self.header.table_sectors()).max();
                scan.check.outside += u64::from(end.is_some_and(|end| end > scan.sectors));
                tell(&mut scan.check.doubts, || {
                    let grains = index as u64 * self.grains_of_table()..(index as u64 + 1) * self.grains_of_table();
                    format!("grain table {index} cannot be read in either copy: {}", self.bytes_of(grains))
                });
                return Ok(());
            }
        };
        let places = table.places.iter().filter(|place| **place != 0);
        scan.areas.extend(places.map(|p| (u64::from(*p), self.header.table_sectors())));
        if table.differ {
            scan.differing.push(index);
            for (copy, name) in ["primary", "redundant"].into_iter().enumerate() {
                let wrong = table.wrong[copy];
                if table.places[copy] == 0 && directories.has(copy) {
                    tell(&mut scan.check.proven, || format!("the {name} directory leads to no grain table {index}"));
                } else if wrong > 0 {
                    tell(&mut scan.check.proven, || {
                        format!("{wrong} entries of the {name} copy of grain table {index} are provably wrong")
                    });
                }
            }
        }
        scan.doubts.extend(table.doubts.iter().map(|doubt| (index, *doubt)));
        for entry in table.entries {
            match entry {
                ENTRY_ABSENT | ENTRY_BAD => {}
                ENTRY_ZERO if self.header.has(FLAG_ZERO_GRAINS) => scan.check.zero_grains += 1,
                place => {
                    scan.check.grains += 1;
                    scan.unaligned += u64::from(!u64::from(place).is_multiple_of(self.header.grain));
                    scan.check.shared += u64::from(scan.grains.mark(u64::from(place), self.header.grain));
                }
            }
        }
        Ok(())
    }

    /// Finds sectors that two entries share by comparing exact sector ranges, if the bitmaps are not precise enough:
    /// with unaligned grains, or tables among grains.
    fn scan_shared(&self, directories: &Directories, scan: &mut Scan) {
        let pairs = scan.tables.bits.iter().zip(&scan.grains.bits);
        let mixed: u64 = pairs.map(|(tables, grains)| u64::from((tables & grains).count_ones())).sum();
        if mixed == 0 && scan.unaligned == 0 {
            return;
        }
        let mut taken: Vec<(u64, u64)> = scan.areas.clone();
        for index in 0..directories.len() {
            let Ok(Some(table)) = self.look_at(directories, index) else { continue };
            let places = table.entries.into_iter().filter(|entry| directories.rules().is_place(*entry));
            taken.extend(places.map(|place| (u64::from(place), self.header.grain)));
        }
        taken.sort_unstable();
        let overlap = |pair: &&[(u64, u64)]| pair[0].0.saturating_add(pair[0].1) > pair[1].0;
        scan.check.shared = (taken.windows(2).filter(overlap).count() as u64).saturating_sub(scan.check.overlaps);
    }

    pub(super) fn grains_of_table(&self) -> u64 {
        u64::from(self.header.table_entries)
    }

    /// The range of some grains, as text for messages.
    pub(super) fn bytes_of(&self, grains: std::ops::Range<u64>) -> String {
        let end = (grains.end * self.grain_bytes()).min(self.header.capacity * SECTOR);
        format!("bytes {} to {end} of its disk", grains.start * self.grain_bytes())
    }
}
