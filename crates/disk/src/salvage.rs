//! Reading disks and snapshots out of a datastore that cannot be opened, into images or another datastore.
//!
//! What holds:
//!
//! 1. Nothing is written to the datastore. It is locked like any other by its folder, where it has one and the file
//!    system locks folders: no process writes it meanwhile.
//! 2. Every range that is not what was written is named, and reads as zeros in the target. The target is made whole all
//!    the same.
//! 3. The ways of a conversion are used for everything else: formats, progress, interruption, all or nothing.

use crate::convert::{Address, Source, SourceRun, TargetFormat, copy_into};
use crate::location::Location;
use crate::{Datastore, Error, ErrorKind, OpenOptions, QueueChoice, Result};
use backend::local::LocalQueues;
use backend::{BLOCK_SIZE, Buffer, IoMode, Lock};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use store::engine::{Salvage, SalvageVerdict, Salvaged, SalvagedPiece, merge_ranges};
use work::Progress;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks asked about at a time (64 MiB).
const ASK_BLOCKS: u64 = 1 << 14;

/// What to read out of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SalvageRequest {
    /// Where it is.
    pub datastore: Location,
    /// What to read, and where to; otherwise what there is is listed.
    pub extract: Option<Extract>,
}

/// One disk or snapshot, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extract {
    /// The disk.
    pub disk: String,
    /// A snapshot of it.
    pub snapshot: Option<String>,
    /// A file that is not there yet, or the location of another datastore.
    pub to: Location,
    /// The format of a file.
    pub format: Option<TargetFormat>,
    /// The name of the disk in another datastore.
    pub name: Option<String>,
    /// Most bytes a second; 0 for as fast as it goes.
    pub rate: u64,
}

/// A range of bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// Where it begins.
    pub start: u64,
    /// Its length.
    pub length: u64,
}

/// What can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageList {
    /// Disks and snapshots.
    pub objects: Vec<SalvageObject>,
    /// Acknowledged changes at the end of the journal are lost.
    pub behind: bool,
    /// What is wrong with the datastore as a whole.
    pub notes: Vec<String>,
}

/// A disk or snapshot that can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageObject {
    /// The disk; of a snapshot whose disk is not known, `#` and its number.
    pub disk: String,
    /// The snapshot.
    pub snapshot: Option<String>,
    /// Capacity in bytes.
    pub capacity: u64,
    /// False where name and capacity come from a damaged page.
    pub proven: bool,
    /// Bytes whose place is not known; what blocks are worth is found out when they are read.
    pub lost: u64,
}

/// What was read out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageReport {
    /// `DISK` or `DISK@SNAPSHOT`.
    pub source: String,
    /// A file, or a disk of another datastore.
    pub target: String,
    /// Its format.
    pub format: TargetFormat,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes that were not zeros.
    pub copied: u64,
    /// What is lost: zeros in the target.
    pub lost: Vec<ByteRange>,
    /// What was being overwritten when the datastore stopped, and no flush ever covered.
    pub unverified: Vec<ByteRange>,
    /// False where name and capacity come from a damaged page.
    pub proven: bool,
    /// Acknowledged changes at the end of the journal are lost.
    pub behind: bool,
    /// What is wrong with the datastore as a whole.
    pub notes: Vec<String>,
}

/// A datastore that is read, and its lock.
struct Opened {
    salvage: Arc<Salvage>,
    _lock: Option<Box<dyn Lock>>,
}

impl SalvageRequest {
    fn open(&self) -> Result<Opened> {
        let location = &self.datastore;
        let directory = location.connect(LocalQueues::Threads)?;
        let lock = directory.lock_folder().map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::new(
                ErrorKind::Busy,
                format!("{location} is open in another process: stop that, or read disks through it"),
            ),
            _ => Error::io(format!("locking {location}"), error),
        })?;
        let salvage = Salvage::open(directory).map_err(|error| error.context(location))?;
        Ok(Opened { salvage: Arc::new(salvage), _lock: lock })
    }

    /// Lists what can be read.
    pub fn list(&self) -> Result<SalvageList> {
        let opened = self.open()?;
        let salvage = &opened.salvage;
        let all = salvage.objects();
        let mut objects = Vec::with_capacity(all.len());
        for one in &all {
            let (disk, snapshot) = names(&all, one);
            let lost = salvage.lost(one.object.id)?;
            objects.push(SalvageObject {
                disk,
                snapshot,
                capacity: one.object.capacity,
                proven: one.proven,
                lost: ranges_of(&lost, one.object.capacity).iter().map(|range| range.length).sum(),
            });
        }
        Ok(SalvageList { objects, behind: salvage.is_behind(), notes: salvage.notes().to_vec() })
    }

    /// Reads out what is asked for.
    pub fn extract(&self, extract: &Extract, progress: &dyn Progress) -> Result<SalvageReport> {
        let opened = self.open()?;
        let salvage = &opened.salvage;
        let all = salvage.objects();
        let wanted = (extract.disk.clone(), extract.snapshot.clone());
        let found = all.iter().find(|one| names(&all, one) == wanted).ok_or_else(|| {
            let text = format!(
                "no '{}' can be found in {at}; 'lamina salvage {at} --list' shows what can",
                label(&wanted),
                at = self.datastore
            );
            Error::new(ErrorKind::NotFound, text)
        })?;
        let seen = Arc::<Mutex<Seen>>::default();
        let source = SalvageSource {
            lost: salvage.lost(found.object.id)?,
            salvage: Arc::clone(salvage),
            id: found.object.id,
            capacity: found.object.capacity,
            pieces: VecDeque::new(),
            seen: Arc::clone(&seen),
        };
        let mut lost = source.lost.clone();
        let (converted, target) = self.copy(extract, Box::new(source), progress)?;
        let seen = std::mem::take(&mut *seen.lock());
        lost.extend(seen.lost);
        let capacity = found.object.capacity;
        Ok(SalvageReport {
            source: label(&wanted),
            target,
            format: converted.0,
            capacity,
            copied: converted.1,
            lost: ranges_of(&merge_ranges(lost), capacity),
            unverified: ranges_of(&merge_ranges(seen.unverified), capacity),
            proven: found.proven,
            behind: salvage.is_behind(),
            notes: salvage.notes().to_vec(),
        })
    }

    /// Copies to the target; returns the target's format, bytes and name.
    fn copy(
        &self,
        extract: &Extract,
        source: Box<dyn Source>,
        progress: &dyn Progress,
    ) -> Result<((TargetFormat, u64), String)> {
        if let Some(path) = extract.to.local_path().filter(|path| !path.is_dir()) {
            let format = match extract.format {
                Some(format) => format,
                None => format_of(path)?,
            };
            let to = Address::Path(path.into());
            let made = copy_into(source, &to, format, None, extract.rate, progress)?;
            return Ok(((format, made.copied), made.target));
        }
        let options = OpenOptions {
            mode: IoMode::Buffered,
            queue: QueueChoice::Auto,
            metadata_cache: 64 << 20,
            write_buffer: 64 << 20,
        };
        let datastore = Datastore::open(&extract.to, options)?;
        let name = extract.name.clone().unwrap_or_else(|| match &extract.snapshot {
            Some(snapshot) => format!("{}-{snapshot}", extract.disk),
            None => extract.disk.clone(),
        });
        let format = extract.format.unwrap_or(TargetFormat::Native);
        let copied = copy_into(source, &Address::Disk(name.clone()), format, Some(&*datastore), extract.rate, progress);
        let closed = datastore.close();
        let made = copied?;
        closed?;
        Ok(((format, made.copied), format!("{} of {}", name, extract.to)))
    }
}

/// The format that the name of a file stands for.
fn format_of(path: &Path) -> Result<TargetFormat> {
    let name = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    let format = match name.to_ascii_lowercase().as_str() {
        "raw" | "img" => "raw",
        "vmdk" => "monolithicsparse",
        "ova" => "ova",
        _ => {
            let text = format!("which format is '{}' to have? give --format", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    format.parse()
}

/// How an object is called: its disk, and the snapshot if it is one.
fn names(all: &[Salvaged], one: &Salvaged) -> (String, Option<String>) {
    let object = &one.object;
    if !object.is_snapshot() {
        return (object.name.clone(), None);
    }
    let disk = all.iter().find(|other| other.object.id == object.disk);
    (disk.map_or_else(|| format!("#{}", object.disk), |disk| disk.object.name.clone()), Some(object.name.clone()))
}

fn label((disk, snapshot): &(String, Option<String>)) -> String {
    snapshot.as_ref().map_or_else(|| disk.clone(), |snapshot| format!("{disk}@{snapshot}"))
}

/// Ranges of blocks as bytes of a disk.
fn ranges_of(blocks: &[Range<u64>], capacity: u64) -> Vec<ByteRange> {
    let bytes = blocks.iter().map(|range| (range.start * BLOCK, (range.end * BLOCK).min(capacity)));
    bytes.filter(|(start, end)| start < end).map(|(start, end)| ByteRange { start, length: end - start }).collect()
}

/// What reading has found.
#[derive(Default)]
struct Seen {
    lost: Vec<Range<u64>>,
    unverified: Vec<Range<u64>>,
}

/// A disk or snapshot as the source of a conversion.
struct SalvageSource {
    salvage: Arc<Salvage>,
    id: u64,
    capacity: u64,
    /// Blocks whose place is not known.
    lost: Vec<Range<u64>>,
    /// What is known of the blocks ahead.
    pieces: VecDeque<(Range<u64>, SalvagedPiece)>,
    seen: Arc<Mutex<Seen>>,
}

impl SalvageSource {
    /// What is at a block, and how far.
    fn piece_at(&mut self, block: u64) -> Result<(Range<u64>, SalvagedPiece)> {
        while self.pieces.front().is_some_and(|(range, _)| range.end <= block) {
            self.pieces.pop_front();
        }
        if self.pieces.front().is_none_or(|(range, _)| range.start > block) {
            let end = (block + ASK_BLOCKS).min(self.capacity.div_ceil(BLOCK));
            self.pieces = self.salvage.pieces(self.id, block..end, &self.lost)?.into();
        }
        let nothing = || Error::new(ErrorKind::Corrupt, format!("nothing is known of block {block}"));
        self.pieces.front().cloned().ok_or_else(nothing)
    }
}

impl Source for SalvageSource {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        let (range, piece) = self.piece_at(start / BLOCK)?;
        let zero = !matches!(piece, SalvagedPiece::Data(_));
        Ok(SourceRun { length: range.end * BLOCK - start, zero })
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        let mut at = start;
        let end = start + out.len() as u64;
        while at < end {
            let block = at / BLOCK;
            let (range, piece) = self.piece_at(block)?;
            let until = (range.end * BLOCK).min(end);
            let part = &mut out[(at - start) as usize..(until - start) as usize];
            match piece {
                SalvagedPiece::Data(physical) => {
                    let blocks = until.div_ceil(BLOCK) - block;
                    let mut bytes = Buffer::recycled(blocks as usize);
                    let verdicts = self.salvage.read(physical + (block - range.start), &mut bytes);
                    let from = (at % BLOCK) as usize;
                    part.copy_from_slice(&bytes[from..from + part.len()]);
                    let mut seen = self.seen.lock();
                    for (number, verdict) in (block..).zip(verdicts) {
                        match verdict {
                            SalvageVerdict::Good => {}
                            SalvageVerdict::Lost => seen.lost.push(number..number + 1),
                            SalvageVerdict::Unverified => seen.unverified.push(number..number + 1),
                        }
                    }
                }
                SalvagedPiece::Zero | SalvagedPiece::Lost => part.fill(0),
            }
            at = until;
        }
        Ok(())
    }
}
