//! Both copies of the grain directory, and reading a grain table from whichever copy is whole.
//!
//! A file has two directories, each with tables of its own, that name the same grains. The primary counts. Where it
//! cannot be (a place outside the file, an entry that names one, a failed read) and the redundant copy can, that one is
//! used and it is said, in the log and in [`Warnings`].

use super::header::{FLAG_COMPRESSED, FLAG_REDUNDANT, FLAG_ZERO_GRAINS, Header};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;
use parking_lot::Mutex;

/// Most warnings kept per image.
const WARNINGS_MAX: usize = 16;

/// Entry of a grain table or directory: nothing here.
pub(crate) const ENTRY_ABSENT: u32 = 0;
/// Entry of a grain table: zeros, where [`FLAG_ZERO_GRAINS`] says so.
pub(crate) const ENTRY_ZERO: u32 = 1;

/// In memory, in place of an entry that names no place in the file. No grain can begin at this sector.
pub(crate) const ENTRY_BAD: u32 = u32::MAX;

/// What a person should know about an image that could be read all the same.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Vec<String>>);

impl Warnings {
    /// Logs and keeps a sentence; only the first [`WARNINGS_MAX`] are kept, each once.
    pub(crate) fn add(&self, image: &str, sentence: String) {
        let mut kept = self.0.lock();
        if kept.len() < WARNINGS_MAX && !kept.contains(&sentence) {
            tracing::warn!(image, "{sentence}");
            kept.push(sentence);
        }
    }

    /// The sentences so far.
    pub(crate) fn list(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

/// Places of the two copies of a table, primary first; 0 where a copy has none or an impossible one.
pub(crate) type Places = [u32; 2];

/// A grain table as read.
#[derive(Debug)]
pub(crate) struct ReadTable {
    /// Its entries, always as many as the header says; those that name no place in the file are [`ENTRY_BAD`].
    pub(crate) entries: Vec<u32>,
    /// Where it lies.
    pub(crate) places: Places,
    /// Entries that name places outside the file.
    pub(crate) bad: usize,
    /// The copies could both be read and are not the same.
    pub(crate) differ: bool,
}

/// The grain directories of a file.
#[derive(Clone)]
pub(crate) struct Directories {
    copies: [Vec<u32>; 2],
    table_entries: usize,
    table_sectors: u64,
    rules: EntryRules,
}

/// Which entries of a grain table can be.
#[derive(Clone, Copy)]
struct EntryRules {
    first: u64,
    zero_grains: bool,
}

impl EntryRules {
    fn allow(&self, entry: u32, file_sectors: u64) -> bool {
        match entry {
            ENTRY_ABSENT => true,
            ENTRY_ZERO if self.zero_grains => true,
            ENTRY_BAD => false,
            // The last grain may be cut short at the end of the file: what is missing reads as zeros.
            place => u64::from(place) >= self.first && u64::from(place) < file_sectors,
        }
    }
}

impl Directories {
    /// Reads the directories that `header` names. `image` is for messages.
    pub(crate) fn read(file: &dyn File, header: &Header, image: &str, warnings: &Warnings) -> Result<Self> {
        let primary = read_directory(file, header, header.directory_offset);
        let redundant = match header.has(FLAG_REDUNDANT) && header.redundant_offset != 0 {
            true => Some(read_directory(file, header, header.redundant_offset)),
            false => None,
        };
        let copies = match (primary, redundant) {
            (Ok(primary), None) => [primary, Vec::new()],
            (Ok(primary), Some(Ok(redundant))) => [primary, redundant],
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
        Ok(Self {
            copies,
            table_entries: header.table_entries as usize,
            table_sectors: header.table_sectors(),
            rules: EntryRules {
                // The grains of a stream begin behind its first marker, wherever its header says.
                first: if header.has(FLAG_COMPRESSED) { 1 } else { header.overhead.max(1) },
                zero_grains: header.has(FLAG_ZERO_GRAINS),
            },
        })
    }

    /// Number of tables.
    pub(crate) fn len(&self) -> usize {
        self.copies[0].len().max(self.copies[1].len())
    }

    /// What the copies say where table `index` lies, unchecked; a lost copy says 0.
    pub(crate) fn named(&self, index: usize) -> Places {
        [0, 1].map(|copy: usize| self.copies[copy].get(index).copied().unwrap_or(0))
    }

    /// Which copies are there.
    pub(crate) fn has(&self, copy: usize) -> bool {
        !self.copies[copy].is_empty()
    }

    /// Enters a new table.
    pub(crate) fn set(&mut self, index: usize, places: Places) {
        for (copy, place) in self.copies.iter_mut().zip(places) {
            if let Some(entry) = copy.get_mut(index) {
                *entry = place;
            }
        }
    }

    /// The bytes of the sector of copy `copy` that holds entry `index`, and which sector of the directory it is.
    pub(crate) fn sector_of(&self, copy: usize, index: usize) -> (u64, Vec<u8>) {
        let per_sector = SECTOR as usize / 4;
        let first = index / per_sector * per_sector;
        let last = (first + per_sector).min(self.copies[copy].len());
        let mut bytes: Vec<u8> = self.copies[copy][first..last].iter().flat_map(|entry| entry.to_le_bytes()).collect();
        bytes.resize(SECTOR as usize, 0);
        ((index / per_sector) as u64, bytes)
    }

    /// Reads table `index` from the copy that is whole; `None` when the directory has no such table.
    pub(crate) fn read_table(
        &self,
        file: &dyn File,
        index: usize,
        image: &str,
        warnings: &Warnings,
    ) -> Result<Option<ReadTable>> {
        let named = self.named(index);
        // Entry 1 in a directory would be a table of zero grains; nobody is known to write it, and the sector holds the
        // descriptor or a directory.
        if named == [0, 0] || (named[0] == 0 && !self.has(1)) || (named[1] == 0 && !self.has(0)) {
            return Ok(None);
        }
        let length = file.len().during(|| format!("{image}: cannot find out the length"))?;
        let file_sectors = length / SECTOR;
        let places = named.map(|place| match u64::from(place) + self.table_sectors <= file_sectors {
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
        let primary = (places[0] != 0).then(|| read(places[0])).flatten();
        let bad = |entries: &[u32]| entries.iter().filter(|entry| !self.rules.allow(**entry, file_sectors)).count();
        let primary_bad = primary.as_deref().map(bad);
        let primary = match (primary, primary_bad) {
            (Some(entries), Some(0)) => return Ok(Some(ReadTable { entries, places, bad: 0, differ: false })),
            (primary, _) => primary,
        };
        let redundant = (places[1] != 0).then(|| read(places[1])).flatten();
        let redundant_bad = redundant.as_deref().map(bad);
        let mut table = match (primary, primary_bad, redundant, redundant_bad) {
            (Some(entries), Some(bad), None, _) => ReadTable { entries, places, bad, differ: false },
            (Some(entries), Some(bad), Some(_), Some(other)) if bad <= other => {
                ReadTable { entries, places, bad, differ: true }
            }
            (_, _, Some(entries), Some(bad)) => {
                let sentence = format!("grain table {index} is damaged, its redundant copy is used");
                warnings.add(image, sentence);
                ReadTable { entries, places, bad, differ: true }
            }
            _ => {
                return Err(failure.unwrap_or_else(|| {
                    let sentence = format!("{image}: grain table {index} lies outside the file, in both directories");
                    Error::new(ErrorKind::Corrupt, sentence)
                }));
            }
        };
        if table.bad > 0 {
            for entry in table.entries.iter_mut().filter(|entry| !self.rules.allow(**entry, file_sectors)) {
                *entry = ENTRY_BAD;
            }
        }
        Ok(Some(table))
    }

    /// Whether the two copies of a table hold the same.
    pub(crate) fn copies_agree(&self, file: &dyn File, places: Places, image: &str) -> Result<bool> {
        if places[0] == 0 || places[1] == 0 {
            return Ok(self.has(0) != self.has(1));
        }
        Ok(self.read_copy(file, places[0], image)? == self.read_copy(file, places[1], image)?)
    }

    fn read_copy(&self, file: &dyn File, place: u32, image: &str) -> Result<Vec<u32>> {
        let mut bytes = vec![0; self.table_entries * 4];
        file.read_at(&mut bytes, u64::from(place) * SECTOR)
            .during(|| format!("{image}: cannot read the grain table at sector {place}"))?;
        Ok(words(&bytes))
    }
}

/// Reads one directory of a header.
fn read_directory(file: &dyn File, header: &Header, offset: u64) -> Result<Vec<u32>> {
    let length = file.len().during(|| "cannot find out the length".to_owned())?;
    let bytes = header.directory_entries() * 4;
    let start = offset.checked_mul(SECTOR).filter(|start| *start > 0);
    let Some(start) = start.filter(|start| start.checked_add(bytes).is_some_and(|end| end <= length)) else {
        let sentence =
            format!("the grain directory at sector {offset} lies outside the file: it was cut, or is damaged");
        return Err(Error::new(ErrorKind::Corrupt, sentence));
    };
    let mut buffer = vec![0; bytes as usize];
    file.read_at(&mut buffer, start).during(|| format!("cannot read the grain directory at sector {offset}"))?;
    Ok(words(&buffer))
}

/// Little-endian words.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}
