//! The record of scrubs: schedule, position of an unfinished scrub, result of the last one, and the list of damage.
//!
//! The layout is in `docs/format/scrub.md`.

use crate::sealed::{self, Kind};
use backend::Directory;
use error::{Error, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use store::engine::{DamagedPlace, Reference, ScrubPart, ScrubPosition};
use store::pages::PageFile;

/// Name of the file, in the folder of the datastore.
pub(crate) const FILE: &str = "scrub";
/// The limit is sufficient for [`DAMAGE_MAX`] entries with [`REFERENCES_MAX`] references.
const KIND: Kind = Kind { word: "scrub", version: 1, length_max: 64 << 20 };
/// Most damaged places that are listed; further ones are counted.
pub(crate) const DAMAGE_MAX: usize = 16_384;
/// Most references that are listed for one place.
pub(crate) const REFERENCES_MAX: usize = 64;
/// Most references that are listed for all places.
const ALL_REFERENCES_MAX: usize = 262_144;
/// The value of [`DamageRecord::file`] for disks in VMware's formats.
const IMAGES: &str = "images";

/// Everything that is stored about scrubs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScrubRecord {
    /// When servers start scrubs; `None` if they do not.
    pub schedule: Option<ScrubSchedule>,
    /// The unfinished scrub.
    pub run: Option<ScrubRun>,
    /// The last scrub that reached its end.
    pub last: Option<ScrubResult>,
    /// The damage, in the order in which it was found.
    pub damage: Vec<DamageRecord>,
    /// Number of damaged places beyond those listed.
    pub unlisted: u64,
}

/// When servers start scrubs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScrubSchedule {
    /// Seconds from the start of a scrub to the start of the next one.
    pub every: u64,
    /// Bytes per second that these scrubs may read; 0 for no limit.
    pub rate: u64,
    /// When the schedule was set, in seconds since 1970.
    pub since: u64,
}

/// A scrub that has not reached its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScrubRun {
    /// When the scrub was cancelled; `None` if it runs, or ended with its process. Such a scrub is continued by the
    /// next server.
    pub cancelled: Option<u64>,
    /// Bytes per second that the scrub may read; 0 for no limit.
    pub rate: u64,
    /// The file that the scrub reads next: a file of metadata, `data`, or `images`.
    pub file: String,
    /// The first page of this file that is not read yet. For `data`, the page of `data.table` that describes the
    /// blocks.
    pub next: u64,
    /// The last disk in a VMware format that was examined.
    pub disk: String,
    /// What the scrub has done so far; `ended` is the time at which the record was written.
    pub result: ScrubResult,
}

/// What a scrub has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubResult {
    /// When the scrub began, in seconds since 1970.
    pub started: u64,
    /// When the scrub ended, in seconds since 1970.
    pub ended: u64,
    /// Bytes of the native store that were read.
    pub read: u64,
    /// Metadata pages that were examined.
    pub pages: u64,
    /// Data blocks that were examined.
    pub blocks: u64,
    /// Images that were examined.
    pub images: u64,
    /// Damaged places that were found.
    pub found: u64,
    /// The number of these that were restored from a good copy.
    pub repaired: u64,
    /// Disks in VMware's formats that were not examined, because another operation used them.
    pub skipped: Vec<String>,
}

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DamageRecord {
    /// The file: of metadata, `data`, or `images`.
    pub file: String,
    /// The number of the page or data block; 0 for `superblock` and `images`.
    pub number: u64,
    /// The disk, if it is in a VMware format.
    pub disk: Option<String>,
    /// What is wrong with the place.
    pub problem: String,
    /// When the damage was found, in seconds since 1970.
    pub found: u64,
    /// From what the place was restored; `None` if no good copy exists.
    pub repaired: Option<String>,
    /// The disks and snapshots that refer to the place.
    pub references: Vec<ReferenceRecord>,
    /// Number of references beyond those listed.
    pub unlisted: u64,
}

/// A disk or snapshot that refers to a damaged place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReferenceRecord {
    /// The id of the disk or snapshot in the catalog.
    pub object: u64,
    /// Byte offset in the disk or snapshot.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl ScrubRun {
    /// The record of a scrub that begins.
    pub fn new(now: u64, rate: u64) -> Self {
        let mut run = Self {
            cancelled: None,
            rate,
            file: String::new(),
            next: 0,
            disk: String::new(),
            result: ScrubResult { started: now, ended: now, ..ScrubResult::default() },
        };
        run.set_position(Some(ScrubPosition::START));
        run
    }

    /// The position in the native store; `None` once the store is read.
    pub fn position(&self) -> Option<ScrubPosition> {
        ScrubPart::from_name(&self.file).map(|part| ScrubPosition { part, next: self.next })
    }

    /// Sets the position in the native store.
    pub fn set_position(&mut self, position: Option<ScrubPosition>) {
        (self.file, self.next) = match position {
            Some(position) => (position.part.name().to_owned(), position.next),
            None => (IMAGES.to_owned(), 0),
        };
    }
}

impl DamageRecord {
    /// Damage of a place in the native store.
    pub fn of_place(place: DamagedPlace, problem: String, repaired: Option<String>, now: u64) -> Self {
        let (file, number) = match place {
            DamagedPlace::Superblock => (ScrubPart::Superblock.name(), 0),
            DamagedPlace::Page { file, number } => (file.name(), number),
            DamagedPlace::Block(number) => (ScrubPart::Data.name(), number),
        };
        let file = file.to_owned();
        Self { file, number, disk: None, problem, found: now, repaired, references: Vec::new(), unlisted: 0 }
    }

    /// Damage of a disk in a VMware format; `disk` is `None` if the disk cannot be opened.
    pub fn of_image(disk: Option<String>, problem: String, repaired: Option<String>, now: u64) -> Self {
        let file = IMAGES.to_owned();
        Self { file, number: 0, disk, problem, found: now, repaired, references: Vec::new(), unlisted: 0 }
    }

    /// The place in the native store; `None` for disks in VMware's formats.
    pub fn place(&self) -> Option<DamagedPlace> {
        match ScrubPart::from_name(&self.file)? {
            ScrubPart::Superblock => Some(DamagedPlace::Superblock),
            ScrubPart::Pages(file) => Some(DamagedPlace::Page { file, number: self.number }),
            ScrubPart::Data => Some(DamagedPlace::Block(self.number)),
        }
    }

    /// Whether the damage exists as far as the record says.
    pub fn is_open(&self) -> bool {
        self.repaired.is_none()
    }

    /// Whether only disks and snapshots need the place, so that it does not matter once none of them refers to it.
    pub fn is_content(&self) -> bool {
        matches!(self.place(), Some(DamagedPlace::Block(_) | DamagedPlace::Page { file: PageFile::Map, .. }))
    }
}

impl ScrubRecord {
    /// Reads the record of a datastore. Without a file, the record is empty.
    ///
    /// # Errors
    /// `Corrupt` if the file is damaged, `Unsupported` if a later version wrote it.
    pub fn read(directory: &dyn Directory) -> Result<Self> {
        let Some(bytes) = KIND.read(directory, FILE)? else { return Ok(Self::default()) };
        let (record, mended) = KIND.decode_mending(&bytes, decode)?;
        if let Some(error) = mended {
            tracing::warn!(%error, "one byte of the record of scrubs was wrong and is corrected");
        }
        Ok(record)
    }

    /// Writes the record durably.
    pub fn write(&self, directory: &dyn Directory) -> Result<()> {
        sealed::put(directory, FILE, &KIND.encode(self)?).during(|| "recording the state of the scrub".to_owned())
    }

    /// Adds damage, in place of an earlier entry for the same place or the same problem of an image.
    pub fn add(&mut self, damage: DamageRecord) {
        let same = |known: &DamageRecord| {
            let place = (&known.file, known.number, &known.disk) == (&damage.file, damage.number, &damage.disk);
            place && (damage.place().is_some() || known.problem == damage.problem)
        };
        if let Some(known) = self.damage.iter_mut().find(|known| same(known)) {
            let (references, unlisted) = (std::mem::take(&mut known.references), known.unlisted);
            *known = DamageRecord { references, unlisted, ..damage };
        } else if self.damage.len() < DAMAGE_MAX {
            self.damage.push(damage);
        } else {
            self.unlisted += 1;
        }
    }

    /// Sets the references to places. A place that only disks and snapshots need leaves the list if none of them refers
    /// to it.
    pub fn set_references(&mut self, located: &BTreeMap<DamagedPlace, Vec<Reference>>) {
        let is_other = |damage: &&DamageRecord| damage.place().is_none_or(|place| !located.contains_key(&place));
        let others: usize = self.damage.iter().filter(is_other).map(|damage| damage.references.len()).sum();
        let mut room = ALL_REFERENCES_MAX.saturating_sub(others);
        self.damage.retain_mut(|damage| {
            let Some(references) = damage.place().and_then(|place| located.get(&place)) else { return true };
            let record = |reference: &Reference| ReferenceRecord {
                object: reference.object,
                offset: reference.offset,
                length: reference.length,
            };
            damage.references = references.iter().take(REFERENCES_MAX.min(room)).map(record).collect();
            damage.unlisted = (references.len() - damage.references.len()) as u64;
            room -= damage.references.len();
            !(references.is_empty() && damage.is_content() && damage.is_open())
        });
    }

    /// When a server has to start a scrub, in seconds since 1970; `None` if no scrub is
    /// unfinished and there is no schedule.
    pub fn due(&self) -> Option<u64> {
        let begun = match &self.run {
            // The scrub ended with its process.
            Some(ScrubRun { cancelled: None, .. }) => return Some(0),
            Some(ScrubRun { cancelled: Some(time), .. }) => *time,
            None => self.last.as_ref().map_or(0, |last| last.started),
        };
        let schedule = self.schedule.as_ref()?;
        Some(begun.max(schedule.since).saturating_add(schedule.every))
    }
}

/// Decodes a record, and checks the position.
pub(crate) fn decode(bytes: &[u8]) -> Result<ScrubRecord> {
    let record: ScrubRecord = KIND.decode(bytes)?;
    let known = |file: &str| file == IMAGES || ScrubPart::from_name(file).is_some();
    let wrong = record.run.iter().map(|run| &run.file).chain(record.damage.iter().map(|damage| &damage.file));
    match wrong.into_iter().find(|file| !known(file)) {
        Some(file) => Err(unknown_file(file)),
        None => Ok(record),
    }
}

fn unknown_file(file: &str) -> Error {
    KIND.corrupt(&format!("names a file '{}' that a scrub does not read", file.escape_debug()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn example() -> ScrubRecord {
        let mut run = ScrubRun::new(1_795_000_000, 52_428_800);
        run.set_position(Some(ScrubPosition { part: ScrubPart::Data, next: 4711 }));
        run.result.found = 1;
        let result = ScrubResult {
            started: 1_794_000_000,
            ended: 1_794_003_600,
            read: 1_073_741_824,
            pages: 4096,
            blocks: 258_048,
            images: 2,
            skipped: vec!["größe".into()],
            ..ScrubResult::default()
        };
        let mut record = ScrubRecord {
            schedule: Some(ScrubSchedule { every: 604_800, rate: 52_428_800, since: 1_793_000_000 }),
            run: Some(run),
            last: Some(result),
            damage: Vec::new(),
            unlisted: 0,
        };
        let problem = "data block 1234 fails its checksum (expected 0badcafe, found 0badcaff)".to_owned();
        let place = DamagedPlace::Block(1234);
        record.add(DamageRecord::of_place(place, problem, None, 1_795_000_100));
        let references = vec![Reference { object: 3, offset: 40_960, length: 4096 }];
        record.set_references(&BTreeMap::from([(place, references)]));
        record
    }

    #[test]
    fn the_format_page_shows_the_encoded_record() {
        let page = include_str!("../../../../docs/format/scrub.md");
        let bytes = KIND.encode(&example()).unwrap();
        assert_eq!(decode(&bytes).unwrap(), example());
        let text = String::from_utf8(bytes).unwrap();
        assert!(page.contains(&text), "docs/format/scrub.md should show:\n{text}");
    }

    #[test]
    fn damage_of_the_record_is_found() {
        let good = KIND.encode(&example()).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(decode(&bad).is_err(), "byte {at}");
        }
        let mut wrong = example();
        wrong.run.as_mut().unwrap().file = "data.0000".into();
        assert!(decode(&KIND.encode(&wrong).unwrap()).unwrap_err().to_string().contains("'data.0000'"));
    }

    #[test]
    fn a_place_is_listed_once_and_the_list_is_limited() {
        let mut record = example();
        let again = |number, time| DamageRecord::of_place(DamagedPlace::Block(number), "fails".into(), None, time);
        record.add(again(1234, 7));
        assert_eq!((record.damage.len(), record.damage[0].found, record.damage[0].references.len()), (1, 7, 1));
        (0..DAMAGE_MAX as u64).for_each(|number| record.add(again(number + 10_000, 8)));
        assert_eq!((record.damage.len(), record.unlisted), (DAMAGE_MAX, 1));
        let many: Vec<Reference> = (0..100).map(|object| Reference { object, offset: 0, length: 1 }).collect();
        let none = (DamagedPlace::Block(10_001), Vec::new());
        record.set_references(&BTreeMap::from([(DamagedPlace::Block(10_000), many), none]));
        assert_eq!((record.damage[1].references.len(), record.damage[1].unlisted), (REFERENCES_MAX, 36));
        assert_eq!((record.damage.len(), record.damage[2].number), (DAMAGE_MAX - 1, 10_002), "no disk refers to it");
    }

    #[test]
    fn the_references_of_all_places_are_limited_together() {
        let mut record = ScrubRecord::default();
        let places = ALL_REFERENCES_MAX / REFERENCES_MAX + 2;
        for number in 0..places as u64 {
            let place = DamagedPlace::Block(number);
            record.add(DamageRecord::of_place(place, "fails".into(), None, 7));
            let many = (0..REFERENCES_MAX as u64).map(|object| Reference { object, offset: 0, length: 1 }).collect();
            record.set_references(&BTreeMap::from([(place, many)]));
        }
        let listed: usize = record.damage.iter().map(|damage| damage.references.len()).sum();
        assert_eq!((listed, record.damage.len()), (ALL_REFERENCES_MAX, places));
        assert_eq!(record.damage[places - 1].unlisted, REFERENCES_MAX as u64);
    }

    #[test]
    fn scrubs_are_due_at_their_interval() {
        let mut record = ScrubRecord::default();
        assert_eq!(record.due(), None);
        record.schedule = Some(ScrubSchedule { every: 100, rate: 0, since: 1000 });
        assert_eq!(record.due(), Some(1100), "a new schedule waits for its interval");
        record.last = Some(ScrubResult { started: 1150, ended: 1190, ..ScrubResult::default() });
        assert_eq!(record.due(), Some(1250), "the interval is counted from start to start");
        record.run = Some(ScrubRun::new(1200, 0));
        assert_eq!(record.due(), Some(0), "a scrub that ended with its process continues at once");
        record.run.as_mut().unwrap().cancelled = Some(1220);
        assert_eq!(record.due(), Some(1320), "a cancelled scrub is not started again at once");
        record.schedule = None;
        assert_eq!(record.due(), None);
        record.run.as_mut().unwrap().cancelled = None;
        assert_eq!(record.due(), Some(0));
    }
}
