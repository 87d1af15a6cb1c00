//! Both copies of the grain directory, and reading a grain table from an undamaged copy.
//!
//! A file has two directories, each with its own tables, which name the same grains. The primary is used. If the
//! primary is invalid (its location or an entry lies outside the file, or reading fails) and the redundant copy is
//! valid, that copy is used, with a warning in the log and in [`Warnings`].

use super::copies::{Doubt, Merged, Rules, alone, merge};
use super::header::{FLAG_COMPRESSED, FLAG_REDUNDANT, FLAG_ZERO_GRAINS, Header};
use crate::aligned::read_sectors;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;
use parking_lot::Mutex;

/// The most warnings kept per image.
const WARNINGS_MAX: usize = 16;

/// Entry of a grain table or directory: absent.
pub(crate) const ENTRY_ABSENT: u32 = 0;
/// Entry of a grain table: zeros, if [`FLAG_ZERO_GRAINS`] is set.
pub(crate) const ENTRY_ZERO: u32 = 1;

/// In memory only, for an invalid entry or one in doubt. No grain can begin at this sector.
pub(crate) const ENTRY_BAD: u32 = u32::MAX;

/// Warnings about an image that could be read in spite of damage.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Vec<String>>);

impl Warnings {
    /// Logs a warning, and keeps it; only the first [`WARNINGS_MAX`] are kept, each once.
    pub(crate) fn add(&self, image: &str, sentence: String) {
        let mut kept = self.0.lock();
        if kept.len() < WARNINGS_MAX && !kept.contains(&sentence) {
            tracing::warn!(image, "{sentence}");
            kept.push(sentence);
        }
    }

    /// The warnings so far.
    pub(crate) fn list(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

/// First sectors of the two copies of a table, primary first; 0 for a copy that is missing or at an impossible sector.
pub(crate) type Places = [u32; 2];

/// A grain table as read from the file.
#[derive(Debug)]
pub(crate) struct ReadTable {
    /// The table's entries, always as many as the header states. Invalid entries, and those for which neither copy is
    /// proven, are [`ENTRY_BAD`].
    pub(crate) entries: Vec<u32>,
    /// The first sectors of its copies.
    pub(crate) places: Places,
    /// The entries that are [`ENTRY_BAD`].
    pub(super) doubts: Vec<Doubt>,
    /// Whether the two copies of the table differ.
    pub(crate) differ: bool,
    /// Number of wrong entries in the primary and in the redundant copy, as the other copy proves.
    pub(super) wrong: [usize; 2],
}

impl ReadTable {
    /// A table without damage.
    pub(super) fn whole(entries: Vec<u32>, places: Places) -> Self {
        Self { entries, places, doubts: Vec::new(), differ: false, wrong: [0, 0] }
    }

    /// Whether the copies of a table differ or are invalid.
    pub(super) fn is_doubtful(read: &Option<Self>) -> bool {
        read.as_ref().is_some_and(|table| table.differ || !table.doubts.is_empty())
    }
}

/// The grain directories of a file.
#[derive(Clone)]
pub(crate) struct Directories {
    copies: [Vec<u32>; 2],
    /// The first sector after each directory: in the usual layout, the tables begin there.
    laid: [u64; 2],
    /// Whether most tables are where the usual layout has them.
    regular: bool,
    table_entries: usize,
    table_sectors: u64,
    rules: Rules,
}

impl Directories {
    /// Reads the directories at the sectors in `header`. `image` is for messages. If the file has two directories, an
    /// image that is opened for writing needs both. If it were opened without a directory whose read fails only
    /// temporarily, changes would be missing from the tables of that directory, and the two copies of a table would
    /// differ later.
    pub(crate) fn read(
        file: &dyn File,
        header: &Header,
        writable: bool,
        image: &str,
        warnings: &Warnings,
    ) -> Result<Self> {
        let primary = read_directory(file, header, header.directory_offset, writable);
        let redundant = match header.has(FLAG_REDUNDANT) && header.redundant_offset != 0 {
            true => Some(read_directory(file, header, header.redundant_offset, writable)),
            false => None,
        };
        let copies = match (primary, redundant) {
            (Ok(primary), None) => [primary, Vec::new()],
            (Ok(primary), Some(Ok(redundant))) => [primary, redundant],
            (Ok(_), Some(Err(error))) | (Err(error), Some(Ok(_))) if writable && error.kind() == ErrorKind::Io => {
                return Err(error.context("an image whose two directories cannot both be read is not changed"));
            }
            (Ok(primary), Some(Err(error))) => {
                warnings.add(image, format!("the redundant grain directory is lost, the primary is used: {error}"));
                [primary, Vec::new()]
            }
            (Err(error), Some(Ok(redundant))) => {
                warnings.add(image, format!("the primary grain directory is lost, the redundant one is used: {error}"));
                [Vec::new(), redundant]
            }
            (Err(error), _) => return Err(error),
        };
        let compressed = header.has(FLAG_COMPRESSED);
        let behind = |offset: u64| offset.saturating_add(header.directory_sectors());
        let mut directories = Self {
            copies,
            regular: false,
            laid: [behind(header.directory_offset), behind(header.redundant_offset)],
            table_entries: header.table_entries as usize,
            table_sectors: header.table_sectors(),
            rules: Rules {
                // The grains of a stream begin after its first marker, whatever its header states.
                first: if compressed { 1 } else { header.overhead.max(1) },
                zero_grains: header.has(FLAG_ZERO_GRAINS),
                alignment: if !compressed && header.overhead.is_multiple_of(header.grain) { header.grain } else { 1 },
                compare: !compressed,
                parent: true,
                lenient: header.unclean,
            },
        };
        let tables = || (0..2).flat_map(|copy| (0..directories.copies[copy].len()).map(move |index| (copy, index)));
        let named = tables().filter(|(copy, index)| directories.copies[*copy][*index] != 0).count();
        let laid =
            |(copy, index): &(usize, usize)| directories.copies[*copy][*index] == directories.laid_out(*copy, *index);
        directories.regular = tables().filter(laid).count() * 2 >= named.max(1);
        Ok(directories)
    }

    /// Sets whether absent grains are read from a parent, and whether the primary is used if neither copy is proven.
    pub(super) fn set_rules(&mut self, parent: bool, force: bool) {
        self.rules.parent = parent;
        self.rules.lenient |= force;
    }

    /// Called after the effects of a crash are repaired: from now on, differing copies count as damage.
    pub(super) fn judge_strictly(&mut self, force: bool) {
        self.rules.lenient = force;
    }

    /// A copy of the directories that does not choose between two possible entries.
    pub(super) fn strict(&self) -> Self {
        Self { rules: Rules { lenient: false, ..self.rules }, ..self.clone() }
    }

    pub(super) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The sector of table `index` of a copy in the usual layout, in which all tables follow their directory.
    pub(super) fn laid_out(&self, copy: usize, index: usize) -> u32 {
        let place = (index as u64).checked_mul(self.table_sectors).and_then(|by| self.laid[copy].checked_add(by));
        place.and_then(|place| u32::try_from(place).ok()).unwrap_or(0)
    }

    /// Number of tables.
    pub(crate) fn len(&self) -> usize {
        self.copies[0].len().max(self.copies[1].len())
    }

    /// The sectors of table `index` in both directories, unchecked; 0 for a lost directory.
    pub(crate) fn named(&self, index: usize) -> Places {
        [0, 1].map(|copy: usize| self.copies[copy].get(index).copied().unwrap_or(0))
    }

    /// Whether a copy of the directory could be read.
    pub(crate) fn has(&self, copy: usize) -> bool {
        !self.copies[copy].is_empty()
    }

    /// Sets the locations of a new table in both directories.
    pub(crate) fn set(&mut self, index: usize, places: Places) {
        for (copy, place) in self.copies.iter_mut().zip(places) {
            if let Some(entry) = copy.get_mut(index) {
                *entry = place;
            }
        }
    }

    /// The number and the bytes of the directory sector with entry `index`, in copy `copy`.
    pub(crate) fn sector_of(&self, copy: usize, index: usize) -> (u64, Vec<u8>) {
        let per_sector = SECTOR as usize / 4;
        let first = index / per_sector * per_sector;
        let last = (first + per_sector).min(self.copies[copy].len());
        let mut bytes: Vec<u8> = self.copies[copy][first..last].iter().flat_map(|entry| entry.to_le_bytes()).collect();
        bytes.resize(SECTOR as usize, 0);
        ((index / per_sector) as u64, bytes)
    }

    /// Reads table `index` from a valid copy; `None` if the directory has no such table.
    pub(crate) fn read_table(
        &self,
        file: &dyn File,
        index: usize,
        image: &str,
        warnings: &Warnings,
    ) -> Result<Option<ReadTable>> {
        let named = self.named(index);
        // Entry 1 in a directory would mean a table of zero grains; no known program writes it, and sector 1 contains
        // the descriptor or a directory.
        let lost = [0, 1].map(|copy: usize| !self.has(copy) || named[copy] == ENTRY_BAD);
        if named == [0, 0] || (named[0] == 0 && lost[1]) || (named[1] == 0 && lost[0]) {
            return Ok(None);
        }
        let length = file.len().during(|| format!("{image}: cannot find out the length"))?;
        let file_sectors = length / SECTOR;
        let mut places = named.map(|place| match u64::from(place) + self.table_sectors <= file_sectors {
            true if place > 1 => place,
            _ => 0,
        });
        let mut failure = None;
        let mut read = |place: u32| match self.read_copy(file, place, image) {
            Ok(entries) => Some(entries),
            Err(error) => {
                failure = Some(error);
                None
            }
        };
        let allowed = |entries: &[u32]| entries.iter().all(|entry| self.rules.allow(*entry, file_sectors));
        let primary = (places[0] != 0).then(|| read(places[0])).flatten();
        if let Some(entries) = primary.as_deref().filter(|entries| !self.rules.compare && allowed(entries)) {
            let entries = entries.to_vec();
            return Ok(Some(ReadTable::whole(entries, places)));
        }
        let redundant = (places[1] != 0).then(|| read(places[1])).flatten();
        let both = self.has(0) && self.has(1);
        let mut copies = [primary, redundant];
        // New tables are after `overHead`, outside the usual layout.
        let before_grains = places.iter().all(|place| u64::from(*place) < self.rules.first);
        if (self.regular && before_grains || copies[0] != copies[1]) && copies.iter().all(Option::is_some) {
            // A wrong directory entry leads to sectors without a table. If the other directory's entry leads to the
            // usual location of the table, that entry is right, and nothing may be written where the wrong entry leads.
            let laid = [0, 1].map(|copy| places[copy] == self.laid_out(copy, index));
            if laid[0] != laid[1] {
                let astray = usize::from(laid[0]);
                (copies[astray], places[astray]) = (None, 0);
            }
        }
        let (missing, one_copy) = (copies.each_ref().map(Option::is_none), copies.iter().flatten().count() == 1);
        let merged = match copies {
            [Some(one), Some(other)] => merge(&self.rules, &one, &other, file_sectors),
            [Some(entries), None] | [None, Some(entries)] => alone(&self.rules, entries, file_sectors),
            [None, None] => {
                return Err(failure.unwrap_or_else(|| {
                    let sentence = format!("{image}: grain table {index} lies outside the file, in both directories");
                    Error::new(ErrorKind::Corrupt, sentence)
                }));
            }
        };
        let Merged { entries, doubts, wrong, taken } = merged;
        if both && (missing[0] || wrong[0] > 0) {
            warnings.add(image, format!("grain table {index} is damaged, its redundant copy is used"));
        }
        if both && (missing[1] || wrong[1] > 0) {
            warnings.add(image, format!("the redundant copy of grain table {index} is damaged, the primary is used"));
        }
        if taken > 0 || doubts.iter().any(|doubt| doubt.possible == [true; 2]) {
            let sentence = format!("the two copies of grain table {index} differ, and neither is provably wrong");
            warnings.add(image, sentence);
        }
        let differ = wrong != [0, 0] || taken > 0 || doubts.iter().any(|doubt| doubt.entries[0] != doubt.entries[1]);
        Ok(Some(ReadTable { entries, places, doubts, differ: differ || (both && one_copy), wrong }))
    }

    fn read_copy(&self, file: &dyn File, place: u32, image: &str) -> Result<Vec<u32>> {
        let mut bytes = vec![0; self.table_entries * 4];
        file.read_at(&mut bytes, u64::from(place) * SECTOR)
            .during(|| format!("{image}: cannot read the grain table at sector {place}"))?;
        Ok(words(&bytes))
    }
}

/// Reads one of the directories. For an extent that is only read, the entries in unreadable sectors become
/// [`ENTRY_BAD`], unless no sector can be read.
fn read_directory(file: &dyn File, header: &Header, offset: u64, writable: bool) -> Result<Vec<u32>> {
    let length = file.len().during(|| "cannot find out the length".to_owned())?;
    let bytes = header.directory_entries() * 4;
    let start = offset.checked_mul(SECTOR).filter(|start| *start > 0);
    let Some(start) = start.filter(|start| start.checked_add(bytes).is_some_and(|end| end <= length)) else {
        let sentence =
            format!("the grain directory at sector {offset} lies outside the file, which was truncated, or is damaged");
        return Err(Error::new(ErrorKind::Corrupt, sentence));
    };
    let mut buffer = vec![0; bytes as usize];
    let read = file.read_at(&mut buffer, start);
    if read.is_err() && !writable && read_sectors(file, &mut buffer, start) {
        return Ok(words(&buffer));
    }
    read.during(|| format!("cannot read the grain directory at sector {offset}"))?;
    Ok(words(&buffer))
}

/// Decodes little-endian words.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}
