//! The persistent record of a migration: a file that says which of the two copies, source or target, is the current
//! disk.
//!
//! ```text
//!                  begin                    commit                   end
//!   (no file) ------------> copying -------------------> committed -------> (no file)
//!                              \-- end: the target is removed first --------^
//! ```
//!
//! 1. The file is durable before any part of the target is created, and is removed after every step that its stage
//!    requires is completed. So as long as parts of both copies exist, the file exists too.
//! 2. The file is replaced atomically (temporary name, flush, rename, flush of the folder).
//! 3. The steps that a stage requires are idempotent, and are applied to the copies by the names in the file. So while
//!    the file exists, no other disk gets the folder of a copy ([`is_folder_recorded`]).
//! 4. If the target is in another datastore, that datastore also has a file, with stage `arriving`. This file names the
//!    source's datastore, and the file there decides: if it has the stage `committed`, the target is kept; otherwise,
//!    or if it does not exist, the target is removed. So the source's file is removed last.
//!
//! The layout is in `docs/format/migration-intent.md`.

use crate::location::{Location, holds_datastore};
use crate::sealed::{self, Kind, TEMPORARY};
use crate::spare::Spare;
use backend::local::LocalQueues;
use backend::{Access, Directory, IoMode};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;

/// Prefix of the files' names.
const PREFIX: &str = "migration-";
/// Kind of the files. Their content is small: names and paths.
const KIND: Kind = Kind { word: "migration", version: 1, length_max: 64 << 10 };
/// Limit of the number of migrations that a datastore records.
pub(crate) const INTENTS_MAX: usize = 256;
/// Prefix of the names of hidden overlays above images.
pub(crate) const OVERLAY: &str = ".overlay-";

/// Stage of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stage {
    /// The source is the current disk.
    Copying,
    /// The target is the current disk.
    Committed,
    /// The target is in this datastore. The file with the same name in the source's datastore decides which copy is the
    /// current disk.
    Arriving,
}

/// A copy, by its location in its datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Copy {
    /// A native disk: a source by its number in the store, a target by its hidden name.
    Native {
        /// The number of the source in the store; `None` for a target.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        object: Option<u64>,
    },
    /// A disk in one of VMware's formats, by its folder.
    Images {
        /// Name of the folder.
        folder: String,
    },
    /// A target: the overlay of the source, a hidden native disk that has all content of the source already.
    Overlay {},
}

/// The record of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Intent {
    /// Identity of the migration, part of the file's name.
    pub id: String,
    /// The migration's stage.
    pub stage: Stage,
    /// The name of the disk.
    pub disk: String,
    /// The source of the migration. `None` in an `arriving` file.
    pub source: Option<Copy>,
    /// The target of the migration.
    pub target: Copy,
    /// Identity of the disk, which the migration does not change.
    pub uuid: String,
    /// When the disk was created, in seconds since 1970.
    pub created: u64,
    /// Location of the other datastore; `None` if the migration is within one datastore.
    pub peer: Option<Location>,
}

/// A record that cannot be read, so that it is not known which of the two copies is the current disk.
pub(crate) struct DamagedIntent {
    /// The name of the record's file.
    pub file: String,
    /// The disk that the record's text names, if that part is readable.
    pub disk: Option<String>,
    /// Why the record cannot be read.
    pub error: Error,
}

impl DamagedIntent {
    /// The hidden name of the migration's target, if the target is a native disk of this datastore.
    pub fn hidden(&self) -> String {
        hidden_name(self.file.trim_start_matches(PREFIX))
    }

    /// The problem, for users.
    pub fn problem(&self) -> String {
        let disk = self.disk.as_ref().map(|disk| format!(" of disk '{disk}'")).unwrap_or_default();
        format!(
            "the record '{}' of a migration{disk} is damaged ({}): it is not known which of the two copies is the disk",
            self.file, self.error
        )
    }
}

/// The migration records of one datastore.
pub(crate) struct Intents {
    directory: Arc<dyn Directory>,
}

fn file_name(id: &str) -> Result<String> {
    let plain = id.len() == 36 && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if !plain {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{}' is not the id of a migration", id.escape_debug())));
    }
    Ok(format!("{PREFIX}{id}"))
}

impl Intent {
    /// The hidden name of a native target, which cannot be the name of a user's disk.
    pub fn hidden(&self) -> String {
        match self.target {
            Copy::Overlay {} => format!("{OVERLAY}{}", self.id),
            Copy::Native { .. } | Copy::Images { .. } => hidden_name(&self.id),
        }
    }
}

fn hidden_name(id: &str) -> String {
    format!(".migrating-{id}")
}

impl Intents {
    /// The records in the folder of a datastore.
    pub fn new(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Writes a record durably, replacing an earlier one with the same identity. On a full file system, the space that
    /// the datastore reserves for its owner is used, because a migration to another datastore frees space.
    pub fn put(&self, intent: &Intent) -> Result<()> {
        let (name, bytes) = (file_name(&intent.id)?, KIND.encode(intent)?);
        Spare::of(Arc::clone(&self.directory)).lend(|| {
            sealed::put(&*self.directory, &name, &bytes)
                .during(|| format!("recording the migration of disk '{}'", intent.disk))
        })
    }

    /// Removes a record durably.
    pub fn remove(&self, id: &str) -> Result<()> {
        KIND.remove(&*self.directory, &file_name(id)?)
    }

    /// All records by identity, and those that cannot be read. Incomplete temporary files are removed.
    ///
    /// # Errors
    /// `Unsupported` for a record of a later version.
    pub fn all(&self) -> Result<(Vec<Intent>, Vec<DamagedIntent>)> {
        let names = self.directory.list().during(|| "looking for migrations under way".into())?;
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        for name in names.iter().filter(|name| name.starts_with(PREFIX)) {
            if name.ends_with(TEMPORARY) {
                sealed::remove_if_there(&*self.directory, name).during(|| format!("removing '{name}'"))?;
                continue;
            }
            if found.len() + damaged.len() >= INTENTS_MAX {
                let text = format!("there are more than {INTENTS_MAX} records of migrations");
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            match KIND.read(&*self.directory, name) {
                Ok(None) => {}
                Ok(Some(bytes)) => match self.understand(name, &bytes) {
                    Ok(intent) => found.push(intent),
                    Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error.context(name)),
                    Err(error) => damaged.push(DamagedIntent { file: name.clone(), disk: named_disk(&bytes), error }),
                },
                Err(error) => damaged.push(DamagedIntent { file: name.clone(), disk: None, error }),
            }
        }
        Ok((found, damaged))
    }

    /// Decodes the record in the content of the file `name`. A single damaged byte is mended.
    fn understand(&self, name: &str, bytes: &[u8]) -> Result<Intent> {
        let (intent, mended) = KIND.decode_mending(bytes, |bytes| decode_as(name, bytes))?;
        if let Some(error) = mended {
            tracing::warn!(record = name, %error, "mended a damaged byte of the record of a migration");
            if let Err(error) = self.put(&intent) {
                tracing::warn!(record = name, %error, "the mended record was not written");
            }
        }
        Ok(intent)
    }
}

/// Whether the record of a migration in the folder of a datastore names this folder of images. A record that is damaged
/// has no effect on folders, so it is left out here.
pub(crate) fn is_folder_recorded(directory: &Arc<dyn Directory>, folder: &str) -> Result<bool> {
    let names = directory.list().during(|| "looking for records of migrations".into())?;
    for name in names.iter().filter(|name| name.starts_with(PREFIX) && !name.ends_with(TEMPORARY)) {
        let Some(bytes) = KIND.read(&**directory, name)? else { continue };
        match KIND.decode_mending(&bytes, |bytes| decode_as(name, bytes)) {
            Ok((intent, _)) => {
                let copies = intent.source.iter().chain([&intent.target]);
                if copies.into_iter().any(|copy| matches!(copy, Copy::Images { folder: named } if named == folder)) {
                    return Ok(true);
                }
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Decodes the record in the content of the file `name`.
fn decode_as(name: &str, bytes: &[u8]) -> Result<Intent> {
    let intent = decode(bytes)?;
    match file_name(&intent.id)? == name {
        true => Ok(intent),
        false => Err(Error::new(ErrorKind::Corrupt, format!("'{name}' is the record of another migration"))),
    }
}

/// Finds the name of the disk in the text of a damaged record.
fn named_disk(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().find_map(|line| line.strip_prefix("  \"disk\": "))?;
    serde_json::from_str(line.trim_end_matches(',')).ok()
}

/// The record of a migration in another datastore that is not open here.
pub(crate) fn peek(datastore: &Location, id: &str) -> Result<Option<Intent>> {
    let name = file_name(id)?;
    let directory = datastore.connect(LocalQueues::Threads)?;
    let file = match directory.open_foreign(&name, IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && holds_datastore(&*directory) => return Ok(None),
        opened => opened.during(|| format!("opening the record '{name}' of a migration in {datastore}"))?,
    };
    let bytes = KIND.read_from(&*file, &name);
    let intent = bytes.and_then(|bytes| KIND.decode_mending(&bytes, |bytes| decode_as(&name, bytes)));
    intent.map(|(intent, _)| Some(intent)).map_err(|error| error.context(datastore))
}

fn decode(bytes: &[u8]) -> Result<Intent> {
    let intent: Intent = KIND.decode(bytes)?;
    // Recovery may remove the folder that the record names, so the name must not lead out of the datastore.
    let leads_out = |copy: &Copy| {
        matches!(copy, Copy::Images { folder }
            if folder.contains(['/', '\0']) || matches!(folder.as_str(), "" | "." | ".."))
    };
    let away = intent.source.iter().chain([&intent.target]).any(leads_out);
    match away {
        true => Err(KIND.corrupt("names a folder outside the datastore")),
        false => Ok(intent),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};
    use std::path::Path;

    fn encode(intent: &Intent) -> Result<Vec<u8>> {
        KIND.encode(intent)
    }

    fn intent(stage: Stage) -> Intent {
        Intent {
            id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
            stage,
            disk: "größe".into(),
            source: Some(Copy::Native { object: Some(7) }),
            target: Copy::Images { folder: "größe".into() },
            uuid: "0f0e0d0c-0b0a-4908-8706-050403020101".into(),
            created: 1_795_000_000,
            peer: Some(Path::new("/srv/other").into()),
        }
    }

    #[test]
    fn the_format_page_shows_the_encoded_record() {
        let page = include_str!("../../../../docs/format/migration-intent.md");
        let example = String::from_utf8(encode(&intent(Stage::Copying)).unwrap()).unwrap();
        assert!(page.contains(&example), "docs/format/migration-intent.md should show:\n{example}");
    }

    #[test]
    fn the_format_page_shows_the_target_of_a_disk_whose_content_has_arrived() {
        let page = include_str!("../../../../docs/format/migration-intent.md");
        let arrived = Intent { target: Copy::Overlay {}, peer: None, ..intent(Stage::Committed) };
        let text = String::from_utf8(encode(&arrived).unwrap()).unwrap();
        assert!(text.contains("\"target\": {\n    \"overlay\": {}\n  }"), "{text}");
        assert!(page.contains("`{ \"overlay\": {} }`"));
        assert_eq!(decode(text.as_bytes()).unwrap(), arrived);
        assert_eq!(arrived.hidden(), ".overlay-0f0e0d0c-0b0a-4908-8706-050403020100");
    }

    #[test]
    fn after_any_power_cut_each_stage_is_recorded_completely_or_not() {
        for cut in 0..40 {
            for seed in 0..8 {
                let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
                disk.cut_after(cut);
                let intents = Intents::new(disk.directory());
                let mut reached = 0;
                for step in 0..3 {
                    let done = match step {
                        0 => intents.put(&intent(Stage::Copying)),
                        1 => intents.put(&intent(Stage::Committed)),
                        _ => intents.remove(&intent(Stage::Copying).id),
                    };
                    if done.is_err() {
                        break;
                    }
                    reached += 1;
                }
                let disk = disk.crash();
                let (all, damaged) = Intents::new(disk.directory()).all().unwrap();
                assert!(damaged.is_empty());
                let stages: Vec<Stage> = all.iter().map(|intent| intent.stage).collect();
                let expected: [&[Stage]; 4] = [&[], &[Stage::Copying], &[Stage::Committed], &[]];
                let allowed = [expected[reached], expected[(reached + 1).min(3)]];
                assert!(allowed.contains(&&stages[..]), "cut {cut} seed {seed}: {stages:?} after {reached} steps");
                assert!(disk.directory().list().unwrap().len() == stages.len(), "nothing else is left");
            }
        }
    }

    #[test]
    fn one_damaged_byte_is_mended_and_more_are_not() {
        let good = encode(&intent(Stage::Committed)).unwrap();
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let intents = Intents::new(disk.directory());
        let name = file_name(&intent(Stage::Committed).id).unwrap();
        let version = good.iter().position(|byte| *byte == b'1').unwrap();
        for at in 0..good.len() {
            for change in [1, 4, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= change;
                sealed::put(&*intents.directory, &name, &bad).unwrap();
                match intents.all() {
                    Err(error) => assert_eq!((error.kind(), at), (ErrorKind::Unsupported, version)),
                    Ok((found, damaged)) => {
                        assert_eq!(found, [intent(Stage::Committed)], "byte {at}");
                        assert!(damaged.is_empty());
                        assert_eq!(
                            KIND.read(&*intents.directory, &name).unwrap().unwrap(),
                            good,
                            "it is written again"
                        );
                    }
                }
            }
            let mut bad = good.clone();
            bad[at] ^= 1;
            bad[(at + 7) % good.len()] ^= 2;
            sealed::put(&*intents.directory, &name, &bad).unwrap();
            if let Ok((found, damaged)) = intents.all() {
                assert!(found.is_empty() && damaged.len() == 1, "byte {at}");
            }
        }
        let text = String::from_utf8(good).unwrap();
        assert_eq!(named_disk(text.replace("committed", "com").as_bytes()).unwrap(), "größe");
        assert_eq!(named_disk(text.replace("disk", "dusk").as_bytes()), None);
    }

    #[test]
    fn damage_is_found() {
        let good = encode(&intent(Stage::Committed)).unwrap();
        assert_eq!(decode(&good).unwrap(), intent(Stage::Committed));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(decode(&bad).is_err(), "byte {at}");
            assert!(decode(&good[..at]).is_err());
        }
        let newer = String::from_utf8(good).unwrap().replace("migration 1", "migration 2");
        assert_eq!(decode(newer.as_bytes()).unwrap_err().kind(), ErrorKind::Unsupported);
        assert!(file_name("../../etc/passwd").is_err());
        for folder in ["", "..", ".", "../../etc", "/etc", "a/b"] {
            let away = Intent { target: Copy::Images { folder: folder.into() }, ..intent(Stage::Copying) };
            assert_eq!(decode(&encode(&away).unwrap()).unwrap_err().kind(), ErrorKind::Corrupt, "{folder}");
        }
    }
}
