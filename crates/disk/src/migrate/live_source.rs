//! Where the content of a disk is that is used before its content is in the datastore: a source outside the datastore,
//! as a layer of a chain below the disk's overlay.
//!
//! 1. A kind of source is registered by one call of [`register_live_source`]. No other code depends on the set of
//!    kinds.
//! 2. A source is opened when a range is first read from it. So a disk whose source is missing can be opened, and
//!    ranges that are in the datastore can be read.
//! 3. A range that cannot be looked up in the source is reported as data, so reading it fails, and a range of a level
//!    above hides it as ever.
//! 4. Every failure of the source is an error of the medium for clients (`Io`, or `Corrupt` for damage of a part),
//!    whatever its cause: `NotFound` would mean that the disk does not exist. A source that cannot be opened is `Io`,
//!    because each grain of a damaged source would be tried and left out.

use error::{Error, ErrorKind, Result};
use layer::{Content, Extent, Layer, Usage};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Unit in which a layer over a source maps: the block size of native disks.
pub(super) const GRAIN: u64 = backend::BLOCK_SIZE as u64;

/// The registered kinds of sources.
static KINDS: RwLock<Vec<LiveSourceKind>> = RwLock::new(Vec::new());

/// The content of a disk outside the datastore. It never changes. All methods may be called from any thread at once.
pub trait LiveSource: Send + Sync {
    /// Capacity in bytes.
    fn capacity(&self) -> u64;

    /// The runs of bytes with data and without, from `range.start` on: at least one and at most `most`. They may end
    /// before or after `range` does. Bytes without data are zero.
    fn runs(&self, range: Range<u64>, most: usize) -> Result<Vec<DataRun>>;

    /// Reads verified bytes.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// The end of the range around byte `at` that is stored together: damage of one byte of it makes all of it
    /// unreadable.
    fn unit_end(&self, at: u64) -> u64;
}

/// A run of bytes of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRun {
    /// Length in bytes.
    pub length: u64,
    /// Whether the bytes are data; otherwise they are zero.
    pub data: bool,
}

/// A kind of source.
#[derive(Clone, Copy)]
pub struct LiveSourceKind {
    /// The kind's name in records.
    pub name: &'static str,
    /// Opens the source that the text in a record describes.
    pub open: fn(&str) -> Result<Arc<dyn LiveSource>>,
    /// Called when a disk no longer needs its source, because all content is in the datastore or the disk was deleted.
    pub release: fn(&str) -> Result<()>,
}

/// Registers a kind of source in this process. The caller does this before the first datastore is opened.
///
/// # Errors
/// `Exists` if the kind is registered already.
pub fn register_live_source(kind: LiveSourceKind) -> Result<()> {
    let mut kinds = KINDS.write();
    if kinds.iter().any(|known| known.name == kind.name) {
        return Err(Error::new(ErrorKind::Exists, format!("source '{}' is registered already", kind.name)));
    }
    kinds.push(kind);
    Ok(())
}

/// The description of a source in the record of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveSourceRecord {
    /// The name of the kind.
    pub kind: String,
    /// The source, for messages.
    pub title: String,
    /// What the kind needs to open the source.
    pub place: String,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
}

impl LiveSourceRecord {
    fn kind(&self) -> Result<LiveSourceKind> {
        KINDS.read().iter().find(|kind| kind.name == self.kind).copied().ok_or_else(|| {
            let text = format!("content of kind '{}' is not known to this program", self.kind.escape_debug());
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    fn open(&self) -> Result<Arc<dyn LiveSource>> {
        let source = (self.kind()?.open)(&self.place)?;
        match source.capacity() == self.capacity {
            true => Ok(source),
            false => {
                let text = format!("it has {} bytes, and the disk has {}", source.capacity(), self.capacity);
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// Reports to the source that the disk does not need it any more. A failure of the source is logged: the disk is
    /// complete or gone.
    pub(super) fn release(&self, disk: &str) -> Result<()> {
        if let Err(error) = (self.kind()?.release)(&self.place) {
            tracing::warn!(disk, "{} is not needed any more, which could not be recorded there: {error}", self.title);
        }
        Ok(())
    }
}

/// Where a source is. The number grows when the place changes.
struct CurrentPlace {
    number: u64,
    record: LiveSourceRecord,
}

/// A source that was opened at the place with this number.
struct OpenedSource {
    number: u64,
    source: Arc<dyn LiveSource>,
}

/// A source as a layer of a chain.
pub(crate) struct SourceLayer {
    capacity: u64,
    /// Never locked while the source is opened: a place that does not answer can be changed.
    place: Mutex<CurrentPlace>,
    opened: Mutex<Option<OpenedSource>>,
}

impl SourceLayer {
    /// The layer of a source, which is opened when it is first needed.
    pub fn new(record: LiveSourceRecord) -> Self {
        let capacity = record.capacity;
        Self { capacity, place: Mutex::new(CurrentPlace { number: 0, record }), opened: Mutex::default() }
    }

    /// Changes the place of the source; the content there is the same. Later requests use the new place.
    pub fn move_to(&self, record: LiveSourceRecord) {
        let mut place = self.place.lock();
        *place = CurrentPlace { number: place.number + 1, record };
    }

    fn title(&self) -> String {
        self.place.lock().record.title.clone()
    }

    fn source(&self) -> Result<Arc<dyn LiveSource>> {
        // The lock is held while the source is opened, so that only one request opens it.
        let mut opened = self.opened.lock();
        let (number, record) = {
            let place = self.place.lock();
            (place.number, place.record.clone())
        };
        if let Some(known) = opened.as_ref().filter(|known| known.number == number) {
            return Ok(Arc::clone(&known.source));
        }
        let source = record.open()?;
        *opened = Some(OpenedSource { number, source: Arc::clone(&source) });
        Ok(source)
    }

    /// The error of a read, for the client. After an error that is no damage, the source is opened again by the next
    /// request: it may have been replaced, as by a mount.
    fn failed(&self, error: &Error) -> Error {
        if error.kind() == ErrorKind::Corrupt {
            return self.medium(ErrorKind::Corrupt, error);
        }
        *self.opened.lock() = None;
        self.medium(ErrorKind::Io, error)
    }

    fn medium(&self, kind: ErrorKind, error: &Error) -> Error {
        Error::new(kind, format!("{}: {error}", self.title()))
    }
}

impl Layer for SourceLayer {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn grain(&self) -> u64 {
        GRAIN
    }

    fn format(&self) -> &'static str {
        "source"
    }

    fn writable(&self) -> bool {
        false
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        let found = self.source().and_then(|source| source.runs(range.clone(), most.max(1)));
        let runs = found.ok().filter(|runs| !runs.is_empty()).unwrap_or_else(|| {
            // Reading the range tells why it could not be looked up.
            vec![DataRun { length: range.end - range.start, data: true }]
        });
        let mut at = range.start;
        for run in runs {
            let length = run.length.min(range.end - at);
            if length == 0 {
                break;
            }
            let content = if run.data { Content::Encoded } else { Content::Zero };
            out.push(Extent { start: at, length, content });
            at += length;
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn backend::File>> {
        Err(Error::new(ErrorKind::Invalid, format!("{} has no file {index}", self.title())))
    }

    fn damage_end(&self, at: u64) -> u64 {
        let unit_end = self.opened.lock().as_ref().map(|opened| opened.source.unit_end(at));
        unit_end.unwrap_or((at / GRAIN + 1) * GRAIN).clamp(at + 1, self.capacity.max(at + 1))
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let source = self.source().map_err(|error| self.medium(ErrorKind::Io, &error))?;
        source.read(start, out).map_err(|error| self.failed(&error))
    }

    fn usage(&self) -> Result<Usage> {
        // The content takes no space in the datastore.
        Ok(Usage::default())
    }
}
