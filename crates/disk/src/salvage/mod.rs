//! Copying disks and snapshots of a datastore that cannot be opened, and damaged images in any folder, into images or
//! another datastore.
//!
//! ```text
//! levels     a chain of images of which parts are lost, as a source
//! images     images by path, and the disks in VMware's formats of a datastore
//! ```
//!
//! Invariants:
//!
//! 1. Nothing is written to the source. On file systems that can lock a folder, the datastore's folder is locked, so
//!    that no other process writes to the datastore meanwhile. An image by path is not locked.
//! 2. Ranges whose content cannot be recovered are reported, and read as zeros in the target. The target is completed
//!    nevertheless.
//! 3. Formats, progress and cancellation are those of a conversion, and a failure leaves no target.

mod images;
mod levels;

pub(crate) use images::image_source;
pub(crate) use levels::LostRanges;

use crate::convert::{Address, ImageOptions, Source, SourceRun, TargetFormat, copy_into};
use crate::foreign::ImageFolders;
use crate::location::Location;
use crate::{Datastore, Error, ErrorKind, OpenOptions, QueueChoice, Result};
use backend::local::LocalQueues;
use backend::{BLOCK_SIZE, Buffer, IoMode, Lock};
use images::Images;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use store::engine::{Salvage, SalvageVerdict, Salvaged, SalvagedPiece, merge_ranges};
use work::Progress;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Most blocks that one query covers (64 MiB).
const ASK_BLOCKS: u64 = 1 << 14;

/// A request to extract disks from a damaged datastore, or to read a damaged image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SalvageRequest {
    /// Location of the datastore; the file of an image, to read that image with its parents.
    pub datastore: Location,
    /// How images are opened.
    #[serde(default)]
    pub options: ImageOptions,
    /// What to extract; `None` lists what can be extracted.
    pub extract: Option<Extract>,
}

/// A disk or snapshot to extract, and the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extract {
    /// The disk; `None` for an image by path.
    pub disk: Option<String>,
    /// The snapshot of the disk; `None` for its head.
    pub snapshot: Option<String>,
    /// A new file, or the location of another datastore.
    pub to: Location,
    /// The format, if the target is a file.
    pub format: Option<TargetFormat>,
    /// The name of the new disk, if the target is a datastore.
    pub name: Option<String>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// A range of bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// The first byte of the range.
    pub start: u64,
    /// The length of the range.
    pub length: u64,
}

/// What can be extracted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageList {
    /// Disks and snapshots.
    pub objects: Vec<SalvageObject>,
    /// Whether disks and snapshots may be missing from the list, because a page of the catalog is lost.
    pub incomplete: bool,
    /// Whether acknowledged changes at the end of the journal are lost.
    pub behind: bool,
    /// Problems of the datastore as a whole.
    pub notes: Vec<String>,
}

/// A disk or snapshot that can be extracted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageObject {
    /// The disk; `#` and a number for a snapshot whose disk is unknown; the path of an image.
    pub disk: String,
    /// The snapshot; `None` for the head.
    pub snapshot: Option<String>,
    /// Capacity in bytes.
    pub capacity: u64,
    /// False if name and capacity were read from a damaged page, or the record of a disk in VMware's formats is lost.
    pub proven: bool,
    /// Number of bytes whose location is unknown. Blocks with wrong checksums, and unreadable data, are found only when
    /// they are read.
    pub lost: u64,
}

/// Result of an extraction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SalvageReport {
    /// `DISK`, `DISK@SNAPSHOT` or the path of an image.
    pub source: String,
    /// Path of the new file, or name of the new disk.
    pub target: String,
    /// Format of the target.
    pub format: TargetFormat,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes that were not zeros.
    pub copied: u64,
    /// Ranges that are lost and read as zeros in the target.
    pub lost: Vec<ByteRange>,
    /// Ranges that were being overwritten when the datastore stopped, and that no flush has covered.
    pub unverified: Vec<ByteRange>,
    /// False if name and capacity were read from a damaged page, or the record of a disk in VMware's formats is lost.
    pub proven: bool,
    /// Whether acknowledged changes at the end of the journal are lost.
    pub behind: bool,
    /// Problems of the datastore or the images as a whole.
    pub notes: Vec<String>,
}

/// A datastore opened for salvage, and its lock.
struct Opened {
    /// The native disks; `None` if nothing of them can be read.
    salvage: Option<Arc<Salvage>>,
    /// The disks in VMware's formats.
    images: Images,
    /// Problems of the datastore as a whole.
    notes: Vec<String>,
    _lock: Option<Box<dyn Lock>>,
}

/// A source that was read, and what was found.
struct Origin {
    name: String,
    capacity: u64,
    proven: bool,
    behind: bool,
    notes: Vec<String>,
}

impl SalvageRequest {
    /// The path of the image, if the request is about an image.
    fn image(&self) -> Option<&Path> {
        self.datastore.local_path().filter(|path| path.is_file())
    }

    fn open(&self) -> Result<Opened> {
        let location = &self.datastore;
        if let Some(path) = location.local_path().filter(|path| !path.is_dir()) {
            let what = if path.exists() { "is not a folder, as a datastore must be" } else { "does not exist" };
            return Err(Error::new(ErrorKind::NotFound, format!("'{location}' {what}")));
        }
        let directory = location.connect(LocalQueues::Threads)?;
        let lock = directory.lock_folder().map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::new(
                ErrorKind::Busy,
                format!("{location} is open in another process: stop that process, or read the disks through it"),
            ),
            _ => Error::io(format!("locking {location}"), error),
        })?;
        store::engine::wait_until_idle(&*directory);
        let images = Images::look(&ImageFolders::new(Some(location), &directory), &self.options)?;
        let mut notes = Vec::new();
        let salvage = match Salvage::open(directory) {
            Ok(salvage) => {
                notes.extend_from_slice(salvage.notes());
                Some(Arc::new(salvage))
            }
            Err(error) if images.is_empty() => return Err(error.context(location)),
            Err(error) => {
                notes.push(format!("native disks cannot be read: {error}"));
                None
            }
        };
        notes.extend_from_slice(&images.notes);
        Ok(Opened { salvage, images, notes, _lock: lock })
    }

    /// Lists what can be extracted.
    pub fn list(&self, progress: &dyn Progress) -> Result<SalvageList> {
        if let Some(path) = self.image() {
            return images::list_image(path, &self.options, progress);
        }
        let opened = self.open()?;
        let mut list = SalvageList {
            objects: Vec::new(),
            incomplete: opened.salvage.is_none() || opened.images.incomplete,
            behind: false,
            notes: opened.notes.clone(),
        };
        if let Some(salvage) = &opened.salvage {
            list.incomplete |= salvage.is_incomplete();
            list.behind = salvage.is_behind();
            list.objects = native_objects(salvage)?;
        }
        opened.images.list(&mut list, progress)?;
        Ok(list)
    }

    /// Extracts a disk or snapshot, or reads an image.
    pub fn extract(&self, extract: &Extract, progress: &dyn Progress) -> Result<SalvageReport> {
        if let Some(path) = self.image() {
            return self.extract_image(path, extract, progress);
        }
        let opened = self.open()?;
        let disk = extract.disk.clone().ok_or_else(|| {
            let text = format!("{} is a datastore: give --disk NAME", self.datastore);
            Error::new(ErrorKind::Invalid, text)
        })?;
        let wanted = (disk, extract.snapshot.clone());
        if let Some(salvage) = &opened.salvage {
            let all = salvage.objects();
            if let Some(found) = all.iter().find(|one| names(&all, one) == wanted) {
                return self.extract_native(salvage, found, &opened.notes, extract, progress);
            }
        }
        let found = opened.images.open(&wanted.0, wanted.1.as_deref(), progress)?;
        let (line, proven) = found.ok_or_else(|| {
            let text = format!(
                "no '{}' can be found in {at}; 'lamina salvage {at} --list' lists what can be found",
                label(&wanted),
                at = self.datastore
            );
            Error::new(ErrorKind::NotFound, text)
        })?;
        let (lost, notes) = (LostRanges::default(), line.notes.clone());
        let source = line.source(&lost, progress)?;
        let origin = Origin { name: label(&wanted), capacity: source.capacity(), proven, behind: false, notes };
        let made = self.copy(extract, &target_name(extract, &wanted.0), Box::new(source), progress)?;
        Ok(report(origin, made, lost.merged(), Vec::new()))
    }

    fn extract_image(&self, path: &Path, extract: &Extract, progress: &dyn Progress) -> Result<SalvageReport> {
        if let Some(disk) = &extract.disk {
            let text = format!("'{}' is an image, which has no disk '{disk}': leave out --disk", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let (lost, mut notes) = (LostRanges::default(), Vec::new());
        let source = image_source(path, &self.options, &lost, &mut notes, progress)?;
        let name = path.display().to_string();
        let origin = Origin { name, capacity: source.capacity(), proven: true, behind: false, notes };
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("image");
        let made = self.copy(extract, &target_name(extract, stem), Box::new(source), progress)?;
        Ok(report(origin, made, lost.merged(), Vec::new()))
    }

    fn extract_native(
        &self,
        salvage: &Arc<Salvage>,
        found: &Salvaged,
        notes: &[String],
        extract: &Extract,
        progress: &dyn Progress,
    ) -> Result<SalvageReport> {
        let all = salvage.objects();
        let wanted = names(&all, found);
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
        let made = self.copy(extract, &target_name(extract, &wanted.0), Box::new(source), progress)?;
        let seen = std::mem::take(&mut *seen.lock());
        lost.extend(seen.lost);
        let capacity = found.object.capacity;
        let (name, behind) = (label(&wanted), salvage.is_behind());
        let origin = Origin { name, capacity, proven: found.proven, behind, notes: notes.to_vec() };
        let lost = ranges_of(&merge_ranges(lost), capacity);
        Ok(report(origin, made, lost, ranges_of(&merge_ranges(seen.unverified), capacity)))
    }

    /// Copies to the target, which is called `name` if it is a disk.
    fn copy(
        &self,
        extract: &Extract,
        name: &str,
        source: Box<dyn Source + '_>,
        progress: &dyn Progress,
    ) -> Result<Copied> {
        if let Some(path) = extract.to.local_path().filter(|path| !path.is_dir()) {
            let format = match extract.format {
                Some(format) => format,
                None => format_of(path)?,
            };
            let to = Address::Path(path.into());
            let made = copy_into(source, &to, format, None, extract.rate, progress)?;
            return Ok(Copied { format, bytes: made.copied, target: made.target });
        }
        if let (Ok(from), Ok(to)) = (self.datastore.resolved(), extract.to.resolved())
            && from == to
        {
            let text = format!("'{to}' is the damaged datastore, which is only read: give another datastore or a file");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let options = OpenOptions {
            mode: IoMode::Buffered,
            queue: QueueChoice::Auto,
            metadata_cache: 64 << 20,
            write_buffer: 64 << 20,
            read_cache: Some(0),
        };
        let datastore = Datastore::open(&extract.to, options)?;
        let format = extract.format.unwrap_or(TargetFormat::Native);
        let to = Address::Disk(name.to_owned());
        let copied = copy_into(source, &to, format, Some(&*datastore), extract.rate, progress);
        let closed = datastore.close();
        let made = copied?;
        closed?;
        Ok(Copied { format, bytes: made.copied, target: format!("{name} of {}", extract.to) })
    }
}

/// What was copied, and to which target.
struct Copied {
    format: TargetFormat,
    bytes: u64,
    target: String,
}

fn report(origin: Origin, made: Copied, lost: Vec<ByteRange>, unverified: Vec<ByteRange>) -> SalvageReport {
    let Origin { name: source, capacity, proven, behind, notes } = origin;
    let Copied { format, bytes: copied, target } = made;
    SalvageReport { source, target, format, capacity, copied, lost, unverified, proven, behind, notes }
}

/// The name of the new disk, if the target is a datastore.
fn target_name(extract: &Extract, source: &str) -> String {
    extract.name.clone().unwrap_or_else(|| match &extract.snapshot {
        Some(snapshot) => format!("{source}-{snapshot}"),
        None => source.to_owned(),
    })
}

/// The native disks and snapshots that can be extracted.
fn native_objects(salvage: &Salvage) -> Result<Vec<SalvageObject>> {
    let all = salvage.objects();
    let mut objects = Vec::with_capacity(all.len());
    for one in &all {
        let (disk, snapshot) = names(&all, one);
        let capacity = one.object.capacity;
        let lost = ranges_of(&salvage.lost(one.object.id)?, capacity).iter().map(|range| range.length).sum();
        objects.push(SalvageObject { disk, snapshot, capacity, proven: one.proven, lost });
    }
    Ok(objects)
}

/// The target format for a file name extension.
fn format_of(path: &Path) -> Result<TargetFormat> {
    let name = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    let format = match name.to_ascii_lowercase().as_str() {
        "raw" | "img" => "raw",
        "vmdk" => "monolithicsparse",
        "ova" => "ova",
        _ => {
            let text = format!("the name '{}' does not tell the format: give --format", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    format.parse()
}

/// The name of an object's disk, and, if the object is a snapshot, its own name.
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

/// Ranges of blocks as ranges of bytes, cut at the capacity.
fn ranges_of(blocks: &[Range<u64>], capacity: u64) -> Vec<ByteRange> {
    let bytes = blocks.iter().map(|range| (range.start * BLOCK, (range.end * BLOCK).min(capacity)));
    bytes.filter(|(start, end)| start < end).map(|(start, end)| ByteRange { start, length: end - start }).collect()
}

/// Ranges with problems that reading has found so far.
#[derive(Default)]
struct Seen {
    lost: Vec<Range<u64>>,
    unverified: Vec<Range<u64>>,
}

/// A disk or snapshot of a damaged datastore as the source of a conversion.
struct SalvageSource {
    salvage: Arc<Salvage>,
    id: u64,
    capacity: u64,
    /// Blocks whose location is unknown.
    lost: Vec<Range<u64>>,
    /// Results of the last query for blocks that are not read yet.
    pieces: VecDeque<(Range<u64>, SalvagedPiece)>,
    seen: Arc<Mutex<Seen>>,
}

impl SalvageSource {
    /// The state of the blocks from `block` on, and the range that has this state.
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
        let zero = matches!(piece, SalvagedPiece::Zero | SalvagedPiece::Lost);
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
                SalvagedPiece::Data(_) | SalvagedPiece::Packed { .. } => {
                    let blocks = until.div_ceil(BLOCK) - block;
                    let mut bytes = Buffer::recycled(blocks as usize);
                    let verdicts = self.salvage.read(piece, block - range.start, &mut bytes);
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
