//! Sources in files: images with their parents, and disks in archives.

use super::copy::{Source, SourceRun};
use super::{ImageOptions, SourceFormat};
use crate::images::unread_snapshots_of;
use crate::stride::Stride;
use backend::{Access, File, IoMode};
use chain::{Chain, Condition, Span};
use error::{Error, ErrorKind, IoContext, Result};
use layer::Layer;
use layer::image::{self, Image, OpenOptions, Place, Signature, open_chain};
use layer::ova::{Disk, Ova};
use layer::sesparse::DirtyJournal;
use layer::stream::Stream;
use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use work::Progress;

/// Most spans that one query of the chain's map returns.
const ASK_SPANS: usize = 1024;

/// Bytes of an archive's member that are hashed between two checks for cancellation.
const DIGEST_PIECE: usize = 1 << 20;

/// Offset of the magic number of a tar archive.
const TAR_MAGIC: (u64, &[u8]) = (257, b"ustar");

/// A chain of images as a source.
pub struct ChainSource {
    chain: Arc<Chain>,
    /// Spans that the map returned, from the position that is read next.
    spans: VecDeque<Span>,
    stride: Stride,
}

impl ChainSource {
    /// Reads the current content of the chain, which should not be written during the copy.
    pub fn new(chain: Arc<Chain>) -> Self {
        Self { chain, spans: VecDeque::new(), stride: Stride::default() }
    }
}

impl Source for ChainSource {
    fn capacity(&self) -> u64 {
        self.chain.capacity()
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        while self.spans.front().is_some_and(|span| span.start + span.length <= start) {
            self.spans.pop_front();
        }
        if self.spans.front().is_none_or(|span| span.start > start) {
            let rest = self.chain.capacity().saturating_sub(start);
            self.spans = self.stride.ask(rest, |length| self.chain.status(start, length, ASK_SPANS))?.into();
        }
        let Some(span) = self.spans.front() else { return Ok(SourceRun { length: 0, zero: false }) };
        let length = (span.start + span.length).saturating_sub(start);
        Ok(SourceRun { length, zero: span.condition != Condition::Data })
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        self.chain.read(start, out)
    }
}

impl ImageOptions {
    /// These options in the form of [`layer::image`].
    pub(crate) fn opening(&self, writable: bool) -> OpenOptions {
        OpenOptions {
            writable,
            format: self.format.and_then(SourceFormat::of_image),
            force: self.force_parent,
            journal: if self.replay_journal { DirtyJournal::Replay } else { DirtyJournal::Refuse },
            levels_max: chain::limits::LEVELS_MAX - 1,
            ..OpenOptions::default()
        }
    }

    /// The file at a path that a user or a description of a machine gave.
    pub(crate) fn place(&self, path: &Path) -> Result<Place> {
        match self.resolved {
            true => Place::resolved(path, &self.permitted),
            false => Place::local(path, &self.permitted),
        }
    }
}

/// Opens a path as a source: an archive or an image with its parents.
pub(super) fn open(
    path: &Path,
    options: &ImageOptions,
    progress: &dyn Progress,
    warnings: &mut Vec<String>,
) -> Result<Box<dyn Source>> {
    let place = options.place(path)?;
    if is_archive(&place, options.format)? {
        return open_archive(&place, options, progress, warnings);
    }
    if let Some(member) = &options.member {
        let text = format!("'{}' is no archive: there is no '{member}' in it", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let opened = open_chain(place, &options.opening(false))?;
    if options.force_parent {
        warnings.push("parents may have changed since their children were made: the data read may be wrong".to_owned());
    }
    let newest = &opened.images()[0];
    warnings.extend(unread_snapshots_of(newest)?);
    let label = newest.place().label();
    Ok(Box::new(ChainSource::new(Arc::new(whole_chain(&label, &opened)?))))
}

/// The chain of the opened images, read-only.
pub(crate) fn whole_chain(label: &str, opened: &image::Chain) -> Result<Chain> {
    let levels_max = chain::limits::LEVELS_MAX;
    let options = chain::Options { read_only: true, levels_max, ..chain::Options::default() };
    Chain::open(label, opened.layers(), options)
}

/// Whether the file is read as an archive. If the user has given a format, this format decides. Otherwise the file must
/// have the suffix `.ova` and begin like a tar archive. The first bytes alone are not sufficient, because a guest can
/// write the first bytes of a raw disk.
///
/// # Errors
/// `Corrupt` if no format is given, and the file has the suffix but begins neither like an archive nor like an image.
pub(crate) fn is_archive(place: &Place, format: Option<SourceFormat>) -> Result<bool> {
    if format.is_some() || !place.name.to_ascii_lowercase().ends_with(".ova") {
        return Ok(format == Some(SourceFormat::Ova));
    }
    let file = place.open(IoMode::Buffered, Access::Read)?;
    let (at, magic) = TAR_MAGIC;
    let mut bytes = vec![0; magic.len()];
    file.read_at(&mut bytes, at).during(|| format!("reading the beginning of '{}'", place.label()))?;
    if bytes != magic && Image::probe(place)? == Signature::Raw {
        let text = "is called like an archive and does not begin like one: it is damaged or no archive";
        return Err(Error::new(ErrorKind::Corrupt, format!("'{}' {text}", place.label())));
    }
    Ok(bytes == magic)
}

/// The OVF descriptor in the archive at a path.
pub fn descriptor_of(path: &Path) -> Result<Vec<u8>> {
    let place = Place::local(path, &[])?;
    Ova::open(place.open(IoMode::Buffered, Access::Read)?, &place.label())?.descriptor()
}

/// Opens the file of one disk in an archive, after verifying its digest.
pub(crate) fn open_member(
    place: &Place,
    options: &ImageOptions,
    progress: &dyn Progress,
    warnings: &mut Vec<String>,
) -> Result<(Disk, Arc<dyn File>)> {
    let label = place.label();
    let ova = Ova::open(place.open(IoMode::Buffered, Access::Read)?, &label)?;
    warnings.extend(ova.warnings().iter().map(|warning| format!("'{label}': {warning}")));
    let disk = disk_of(&ova, &label, options.member.as_deref())?;
    // The digest in the archive's manifest is verified before anything is created from the file.
    let mut reader = ova.reader(&disk.file)?;
    let mut buffer = vec![0; DIGEST_PIECE];
    loop {
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "stopped while the archive was checked"));
        }
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                return Err(Error::new(ErrorKind::Corrupt, error.to_string()));
            }
            Err(error) => return Err(Error::io(format!("reading '{}' of '{label}'", disk.file), error)),
        }
    }
    let file = ova.file(&disk.file)?;
    Ok((disk.clone(), file))
}

/// The disk in an archive that has the file `member`, or the only disk.
fn disk_of<'a>(ova: &'a Ova, label: &str, member: Option<&str>) -> Result<&'a Disk> {
    let names: Vec<&str> = ova.disks().iter().map(|disk| disk.file.as_str()).collect();
    let disk = match (member, ova.disks()) {
        (Some(member), disks) => disks.iter().find(|disk| disk.file == member).ok_or_else(|| {
            let text = format!("'{label}' has no disk '{member}': it has {}", names.join(", "));
            Error::new(ErrorKind::NotFound, text)
        })?,
        (None, [disk]) => disk,
        (None, []) => return Err(Error::new(ErrorKind::Invalid, format!("'{label}' describes no disk"))),
        (None, _) => {
            let text = format!("'{label}' has several disks: choose one with --member: {}", names.join(", "));
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    if disk.parent.is_some() {
        let text = format!("'{}' of '{label}' is a delta of another disk; unpack the archive first", disk.file);
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    Ok(disk)
}

/// The stream of a disk in an archive. Importers create the disk with the capacity in the stream's header, so a header
/// with another capacity than the one in the description is refused.
fn stream_of(disk: &Disk, file: Arc<dyn File>, label: &str) -> Result<Arc<Stream>> {
    let stream = Arc::new(Stream::open(file, label)?);
    disk.check_capacity(stream.capacity()).map_err(|error| error.context(format_args!("'{label}'")))?;
    Ok(stream)
}

/// The capacity in bytes of the disk `member` in the archive at a path. The digest of the disk is not verified.
///
/// # Errors `Corrupt` if the archive's description states another capacity than that of the disk; the errors of opening
/// the archive and the disk.
pub fn member_capacity(path: &Path, member: &str) -> Result<u64> {
    let place = Place::local(path, &[])?;
    let label = place.label();
    let ova = Ova::open(place.open(IoMode::Buffered, Access::Read)?, &label)?;
    let disk = disk_of(&ova, &label, Some(member))?;
    Ok(stream_of(disk, ova.file(member)?, &format!("{label}:{member}"))?.capacity())
}

fn open_archive(
    place: &Place,
    options: &ImageOptions,
    progress: &dyn Progress,
    warnings: &mut Vec<String>,
) -> Result<Box<dyn Source>> {
    let (disk, file) = open_member(place, options, progress, warnings)?;
    let label = format!("{}:{}", place.label(), disk.file);
    let stream = stream_of(&disk, file, &label)?;
    let chain = Chain::open(label, vec![stream], chain::Options { read_only: true, ..chain::Options::default() })?;
    Ok(Box::new(ChainSource::new(Arc::new(chain))))
}
