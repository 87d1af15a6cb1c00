//! Looking at every table: what is mapped, what is dead, and what contradicts itself. Opening for writing looks too, so
//! that no place is given out that an entry names.

use super::Hosted;
use super::directory::{Directories, ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO};
use super::header::FLAG_ZERO_GRAINS;
use super::space::{Run, Space};
use crate::{IoContext, Result, SECTOR};

/// What a look at every table found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Grains that have a place in the file.
    pub grains: u64,
    /// Grains that are zeros by an entry of their own.
    pub zero_grains: u64,
    /// Bytes of the file that nothing names, free places of an open image not counted.
    pub dead: u64,
    /// Entries that name places outside the file.
    pub bad: u64,
    /// Grains whose place is named by another entry too, or overlaps tables.
    pub shared: u64,
    /// Directories, tables, header and descriptor that overlap each other.
    pub overlaps: u64,
    /// Tables whose two copies are not the same; the primary counts.
    pub differing: u64,
    /// Tables that cannot be read in either copy.
    pub lost: u64,
    /// The image was not closed properly.
    pub unclean: bool,
    /// What had to be read around.
    pub warnings: Vec<String>,
}

impl Check {
    /// True when nothing is wrong; dead space and a missing close are not.
    pub fn is_sound(&self) -> bool {
        self.bad + self.shared + self.overlaps + self.differing + self.lost == 0
    }

    /// Why the image must not be written, if so.
    pub(super) fn unwritable(&self) -> Option<String> {
        match self {
            Check { shared, .. } if *shared > 0 => Some(format!("{shared} grains share their place with others")),
            Check { overlaps, .. } if *overlaps > 0 => Some(format!("{overlaps} of its tables overlap")),
            Check { lost, .. } if *lost > 0 => Some(format!("{lost} grain tables cannot be read")),
            _ => None,
        }
    }
}

/// A bit for every place of a grain in the file.
struct Places {
    bits: Vec<u64>,
    grain: u64,
}

impl Places {
    fn new(sectors: u64, grain: u64) -> Self {
        Self { bits: vec![0; (sectors / grain + 2).div_ceil(64) as usize], grain }
    }

    /// Marks the places that a range of sectors touches; true when one was marked before.
    fn mark(&mut self, start: u64, sectors: u64) -> bool {
        let mut before = false;
        for place in start / self.grain..start.saturating_add(sectors).div_ceil(self.grain) {
            let Some(word) = self.bits.get_mut((place / 64) as usize) else { break };
            before |= *word >> (place % 64) & 1 == 1;
            *word |= 1 << (place % 64);
        }
        before
    }

    fn is_marked(&self, place: u64) -> bool {
        self.bits.get((place / 64) as usize).is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// One past the last place marked.
    fn end(&self) -> u64 {
        let last = self.bits.iter().rposition(|word| *word != 0);
        last.map_or(0, |last| last as u64 * 64 + (64 - u64::from(self.bits[last].leading_zeros())))
    }
}

/// The findings with what opening for writing needs of them.
pub(super) struct Scan {
    pub(super) check: Check,
    /// Tables whose copies differ.
    pub(super) differing: Vec<usize>,
    tables: Places,
    grains: Places,
    /// Grains that touch two places each, so that neighbours seem to share one.
    unaligned: u64,
    overhead: u64,
    grain: u64,
}

impl Scan {
    /// First sector behind everything that something names.
    pub(super) fn used(&self) -> u64 {
        (self.tables.end().max(self.grains.end()) * self.grain).max(self.overhead)
    }

    /// Runs of places before [`Scan::used`] that nothing names.
    pub(super) fn dead_runs(&self) -> impl Iterator<Item = Run> + '_ {
        let (mut place, end) = (self.overhead.div_ceil(self.grain), self.used() / self.grain);
        std::iter::from_fn(move || {
            let marked = |place| self.tables.is_marked(place) || self.grains.is_marked(place);
            while place < end && marked(place) {
                place += 1;
            }
            let start = place;
            while place < end && !marked(place) {
                place += 1;
            }
            (place > start).then(|| Run { start: start * self.grain, sectors: (place - start) * self.grain })
        })
    }
}

impl Hosted {
    /// Looks at every table, and at both copies of each.
    pub fn check(&self) -> Result<Check> {
        let scan = self.scan(true)?;
        let length = self.file.len().during(|| format!("{}: cannot find out the length", self.image))? / SECTOR;
        let (end, free) = match &self.writer {
            Some(writer) => (writer.space.used(), writer.space.free()),
            None => (length, 0),
        };
        let inside: u64 = scan.dead_runs().map(|run| run.sectors).sum();
        let dead = (inside + end.saturating_sub(scan.used())).saturating_sub(free) * SECTOR;
        Ok(Check { dead, warnings: self.warnings(), ..scan.check })
    }

    /// Goes through all tables; `compare` also reads both copies of each.
    pub(super) fn scan(&self, compare: bool) -> Result<Scan> {
        let header = &self.header;
        let length = self.file.len().during(|| format!("{}: cannot find out the length", self.image))?;
        // However long a file claims to be, entries name nothing behind this.
        let sectors = length.div_ceil(SECTOR).min(u64::from(u32::MAX) + header.grain);
        let mut scan = Scan {
            check: Check { unclean: header.unclean, ..Check::default() },
            differing: Vec::new(),
            tables: Places::new(sectors, header.grain),
            grains: Places::new(sectors, header.grain),
            unaligned: 0,
            overhead: header.overhead.min(sectors),
            grain: header.grain,
        };
        let directories = self.tables.directories();
        let mut areas = vec![(0, 1)];
        if header.descriptor_offset != 0 {
            areas.push((header.descriptor_offset, header.descriptor_size));
        }
        for (copy, offset) in [header.directory_offset, header.redundant_offset].into_iter().enumerate() {
            if directories.has(copy) {
                areas.push((offset, header.directory_sectors()));
            }
        }
        for index in 0..directories.len() {
            self.scan_table(&directories, index, compare, &mut areas, &mut scan)?;
        }
        areas.sort_unstable();
        let overlap = |pair: &&[(u64, u64)]| pair[0].0.saturating_add(pair[0].1) > pair[1].0;
        scan.check.overlaps = areas.windows(2).filter(overlap).count() as u64;
        for &(start, sectors) in &areas {
            scan.tables.mark(start, sectors);
        }
        self.scan_shared(&directories, &areas, &mut scan);
        scan.check.differing = scan.differing.len() as u64;
        Ok(scan)
    }

    fn scan_table(
        &self,
        directories: &Directories,
        index: usize,
        compare: bool,
        areas: &mut Vec<(u64, u64)>,
        scan: &mut Scan,
    ) -> Result<()> {
        let table = match self.tables.peek(self.file.as_ref(), directories, index, &self.warnings) {
            Ok(Some(table)) => table,
            Ok(None) => return Ok(()),
            Err(_) => {
                scan.check.lost += 1;
                return Ok(());
            }
        };
        let places = table.places();
        areas.extend(places.iter().filter(|place| **place != 0).map(|p| (u64::from(*p), self.header.table_sectors())));
        let halved = directories.has(0) && directories.has(1) && (places[0] == 0 || places[1] == 0);
        let agree = || directories.copies_agree(self.file.as_ref(), places, &self.image).unwrap_or(false);
        if halved || (compare && !agree()) {
            scan.differing.push(index);
        }
        for at in 0..table.len() {
            match table.entry(at) {
                ENTRY_ABSENT => {}
                ENTRY_BAD => scan.check.bad += 1,
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

    /// Where places do not tell (grains off the beat, or tables among grains): looks at the sectors themselves.
    fn scan_shared(&self, directories: &Directories, areas: &[(u64, u64)], scan: &mut Scan) {
        let pairs = scan.tables.bits.iter().zip(&scan.grains.bits);
        let mixed: u64 = pairs.map(|(tables, grains)| u64::from((tables & grains).count_ones())).sum();
        if mixed == 0 && scan.unaligned == 0 {
            return;
        }
        let mut taken: Vec<(u64, u64)> = areas.to_vec();
        for index in 0..directories.len() {
            let Ok(Some(table)) = self.tables.peek(self.file.as_ref(), directories, index, &self.warnings) else {
                continue;
            };
            let entries = (0..table.len()).map(|at| table.entry(at));
            let places = entries.filter(|entry| ![ENTRY_ABSENT, ENTRY_ZERO, ENTRY_BAD].contains(entry));
            taken.extend(places.map(|place| (u64::from(place), self.header.grain)));
        }
        taken.sort_unstable();
        let overlap = |pair: &&[(u64, u64)]| pair[0].0.saturating_add(pair[0].1) > pair[1].0;
        scan.check.shared = (taken.windows(2).filter(overlap).count() as u64).saturating_sub(scan.check.overlaps);
    }

    /// Makes both copies of the tables given the one that counts, durably; a copy that is nowhere gets a new place.
    pub(super) fn mend_copies(&self, differing: &[usize], space: &Space) -> Result<()> {
        let flush = || self.file.sync().during(|| format!("{}: cannot flush", self.image));
        let directories = self.tables.directories();
        let mut moved: Vec<(usize, super::directory::Places)> = Vec::new();
        for &index in differing {
            let table = self.tables.peek(self.file.as_ref(), &directories, index, &self.warnings)?;
            let Some(table) = table.filter(|table| (0..table.len()).all(|at| table.entry(at) != ENTRY_BAD)) else {
                continue;
            };
            let mut places = table.places();
            for (copy, place) in places.iter_mut().enumerate() {
                if *place == 0 && directories.has(copy) {
                    *place = space.allocate_table(self.file.as_ref(), self.header.table_sectors())?;
                }
            }
            let bytes: Vec<u8> = (0..table.len()).flat_map(|at| table.entry(at).to_le_bytes()).collect();
            for place in places.into_iter().filter(|place| *place != 0) {
                self.file
                    .write_at(&[&bytes], u64::from(place) * SECTOR, false)
                    .during(|| format!("{}: cannot mend grain table {index}", self.image))?;
            }
            if places != table.places() {
                moved.push((index, places));
            }
        }
        flush()?;
        self.write_directories(moved.into_iter())?;
        flush()
    }
}
