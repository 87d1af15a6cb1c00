//! Repairing the tables of an image from their redundant copies: decisions that need a scan of the whole file, and
//! making both copies equal.
//!
//! Besides the proofs in [`super::copies`], two more need the whole file. First, an entry is wrong if both copies give
//! its sector to another grain, or to a table. Second, if all unused parts of the file are holes, as in files that
//! lamina has closed, an entry that names data is right, and the differing entry of the other copy is wrong. An entry
//! still in doubt stays unchanged in both copies, is reported, and reads as an error.

use super::Hosted;
use super::check::{Scan, tell};
use super::copies::{Doubt, Rules, same_or_lenient};
use super::directory::{Directories, ENTRY_ABSENT, Places};
use super::space::Space;
use crate::{IoContext, Result, SECTOR};

/// Repairs not yet reported by a check.
#[derive(Default)]
pub(super) struct Mended {
    pub(super) tables: u64,
    pub(super) sentences: Vec<String>,
}

impl Hosted {
    /// Makes the two copies of every table equal where one is proven, in an image open for writing. The next
    /// [`Hosted::check`] reports the repairs.
    pub fn repair(&self) -> Result<()> {
        let writer = self.writer()?;
        let _no_changes = self.hold_changes(writer)?;
        let scan = self.scan()?;
        if !scan.differing.is_empty() && scan.check.unwritable().is_none() {
            // The file system reports a failed write-back once, so the next flush would succeed.
            self.mend(&scan, &writer.space).map_err(|error| self.stop_after(writer, error))?;
        }
        Ok(())
    }

    pub(super) fn take_mended(&self) -> (u64, Vec<String>) {
        let mended = std::mem::take(&mut *self.mended.lock());
        (mended.tables, mended.sentences)
    }

    /// Decides entries that a table alone does not decide; counts and reports the rest.
    pub(super) fn settle_doubts(&self, directories: &Directories, scan: &mut Scan) -> Result<()> {
        let rules = directories.rules();
        let grain = self.header.grain;
        let mut doubts = std::mem::take(&mut scan.doubts);
        for (_, doubt) in &mut doubts {
            for (entry, possible) in doubt.entries.into_iter().zip(&mut doubt.possible) {
                let place = u64::from(entry) / grain;
                let taken = scan.grains.is_marked(place) || scan.tables.is_marked(place);
                *possible &= !(rules.is_place(entry) && scan.unaligned == 0 && taken);
            }
        }
        let agreed = scan.grains.clone();
        for (_, doubt) in &doubts {
            for (entry, _) in doubt.entries.iter().zip(doubt.possible).filter(|(_, possible)| *possible) {
                if rules.is_place(*entry) {
                    scan.grains.mark(u64::from(*entry), grain);
                }
            }
        }
        let open = doubts.iter().any(|(_, doubt)| doubt.possible == [true; 2]);
        let tidy = open && !self.has_crashed() && scan.unaligned == 0 && self.is_tidy(scan);
        scan.grains = agreed;
        for (index, doubt) in doubts {
            let number = index as u64 * self.grains_of_table() + doubt.at as u64;
            let [one, other] = doubt.entries;
            match self.settle(rules, &doubt, tidy)? {
                Some(entry) => {
                    scan.settled.entry(index).or_default().push((doubt.at, entry));
                    let place = rules.is_place(entry);
                    let shared = place && scan.grains.mark(u64::from(entry), grain) && scan.unaligned == 0;
                    scan.check.shared += u64::from(shared);
                    scan.check.grains += u64::from(place);
                    scan.check.zero_grains += u64::from(!place && entry != ENTRY_ABSENT);
                    tell(&mut scan.check.proven, || {
                        format!(
                            "the copies of the table have grain {number} at sectors {one} and {other}: {entry} is right"
                        )
                    });
                }
                None => {
                    scan.in_doubt = true;
                    for entry in doubt.entries.into_iter().filter(|entry| rules.is_place(*entry)) {
                        scan.grains.mark(u64::from(entry), grain);
                    }
                    let bytes = self.bytes_of(number..number + 1);
                    let impossible = doubt.possible == [false; 2];
                    let mut places = doubt.entries.into_iter().filter(|entry| rules.is_place(*entry));
                    scan.check.outside += u64::from(places.any(|entry| u64::from(entry) >= scan.sectors));
                    *(if impossible { &mut scan.check.bad } else { &mut scan.check.unproven }) += 1;
                    tell(&mut scan.check.doubts, || match impossible {
                        true => format!("grain {number} ({bytes}): no copy of its table names a valid sector"),
                        false => format!(
                            "grain {number} ({bytes}): the copies of its table name sectors {one} and {other}, and \
                             neither is provably wrong, so reading the grain fails"
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether the last writer did not close the file: then differing copies need not be damage.
    fn has_crashed(&self) -> bool {
        self.header.unclean && self.writer.is_none()
    }

    /// The right entry, if it is proven, or if both entries have the same effect; `None` otherwise.
    fn settle(&self, rules: &Rules, doubt: &Doubt, tidy: bool) -> Result<Option<u32>> {
        let [primary, redundant] = doubt.entries;
        match doubt.possible {
            [true, false] => return Ok(Some(primary)),
            [false, true] => return Ok(Some(redundant)),
            [false, false] => return Ok(None),
            [true, true] => {}
        }
        let rules = Rules { lenient: self.has_crashed(), ..*rules };
        if let Some(entry) = same_or_lenient(&rules, doubt.entries) {
            return Ok(Some(entry));
        }
        let places = doubt.entries.map(|entry| rules.is_place(entry));
        let mut data = [false; 2];
        for (data, (entry, place)) in data.iter_mut().zip(doubt.entries.into_iter().zip(places)) {
            *data = place && self.holds_data(entry)?;
        }
        Ok(match data {
            [true, false] if tidy => Some(primary),
            [false, true] if tidy => Some(redundant),
            // Both entries read as zeros and hide the parent alike.
            [false, false] if !doubt.entries.contains(&ENTRY_ABSENT) || !rules.parent => Some(primary),
            _ => None,
        })
    }

    /// Whether every unused part of the file is a hole.
    fn is_tidy(&self, scan: &Scan) -> bool {
        let end = scan.dead_runs().map(|run| run.start..run.start + run.sectors);
        for dead in end.chain(std::iter::once(scan.named_end()..u64::MAX / SECTOR)) {
            match self.file.next_allocated(dead.start * SECTOR) {
                Ok(found) if found.as_ref().is_none_or(|found| found.start >= dead.end * SECTOR) => {}
                // If the holes are unknown, the proof is not possible.
                _ => return false,
            }
        }
        true
    }

    fn holds_data(&self, place: u32) -> Result<bool> {
        let mut bytes = vec![0; self.grain_bytes() as usize];
        let read = self.file.read_at(&mut bytes, u64::from(place) * SECTOR);
        read.during(|| format!("{}: cannot read the grain at sector {place}", self.image))?;
        Ok(bytes.iter().any(|byte| *byte != 0))
    }

    /// Makes both copies of the differing tables equal, durably, except for entries in doubt. A table that is missing
    /// in one directory is allocated there.
    pub(super) fn mend(&self, scan: &Scan, space: &Space) -> Result<()> {
        let flush = || self.file.sync().during(|| format!("{}: cannot flush", self.image));
        let directories = self.tables.directories().strict();
        let mut moved: Vec<(usize, Places)> = Vec::new();
        let mut written = 0;
        for &index in &scan.differing {
            let Some(mut table) = self.look_at(&directories, index)? else { continue };
            for &(at, entry) in scan.settled.get(&index).into_iter().flatten() {
                table.entries[at] = entry;
                table.doubts.retain(|doubt| doubt.at != at);
            }
            let mut places = table.places;
            for (copy, place) in places.iter_mut().enumerate() {
                if *place == 0 && directories.has(copy) {
                    let laid = directories.laid_out(copy, index);
                    *place = match self.is_free_for_table(scan, laid) {
                        true => laid,
                        false => space.allocate_table(self.file.as_ref(), self.header.table_sectors())?,
                    };
                }
            }
            for (copy, place) in places.into_iter().enumerate().filter(|(_, place)| *place != 0) {
                let mut entries = table.entries.clone();
                for doubt in &table.doubts {
                    entries[doubt.at] = doubt.entries[copy];
                }
                let bytes: Vec<u8> = entries.into_iter().flat_map(u32::to_le_bytes).collect();
                self.file
                    .write_at(&[&bytes], u64::from(place) * SECTOR, false)
                    .during(|| format!("{}: cannot repair grain table {index}", self.image))?;
            }
            if places != table.places {
                moved.push((index, places));
            }
            self.tables.replace(index, table.entries, places, !table.doubts.is_empty());
            written += 1;
        }
        flush()?;
        self.write_directories(moved.into_iter())?;
        flush()?;
        let mut mended = self.mended.lock();
        mended.tables += written;
        for sentence in &scan.check.proven {
            tell(&mut mended.sentences, || sentence.clone());
        }
        Ok(())
    }

    /// Whether a table can be at its usual location `place`: before the grains, and not overlapping other metadata.
    fn is_free_for_table(&self, scan: &Scan, place: u32) -> bool {
        let (start, end) = (u64::from(place), u64::from(place) + self.header.table_sectors());
        let apart = |area: &(u64, u64)| end <= area.0 || area.0.saturating_add(area.1) <= start;
        place > 1 && end <= self.header.overhead.min(scan.sectors) && scan.areas.iter().all(apart)
    }
}
