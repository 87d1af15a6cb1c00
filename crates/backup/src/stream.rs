//! A backup as one sequence of bytes, for a file or a pipe.
//!
//! ```text
//! part LAMBHEAD: description | pack 0 | pack 1 | ... | part LAMBTAIL: manifest | length of that part | LAMB-END
//! ```
//!
//! A part begins with 16 bytes: its magic, the length of the record that follows as a number of 4 bytes, and the CRC32C
//! of these 12 bytes. The last 16 bytes of the stream are the length of the part with the manifest, as a number of 8
//! bytes, and the magic `LAMB-END`: so the manifest of a file is found from the file's end, and each pack by the
//! manifest.
//!
//! 1. Every byte is covered by a checksum or a fixed value, so that a damaged byte is found without the disk.
//! 2. A stream that was cut anywhere continues after its last complete pack.
//! 3. One writer at a time changes a file. A backup in a file is reported as complete after the file and its name are
//!    durable, also if an earlier attempt wrote it and was killed before it flushed the file.

use crate::create::{CreateOptions, Created, Sink, Written, describe, is_same, run};
use crate::level::{Level, check_head, record_of};
use crate::manifest::{Description, Manifest, Parent, segments};
use crate::pack::{Content, HEAD, Head, Index};
use crate::seal::{Key, PackReader};
use backend::private;
use backend::replace::sync_folder_of;
use checksums::checksum;
use disk::transfer::{Outgoing, SnapshotIdentity};
use error::{Error, ErrorKind, IoContext, Result};
use std::borrow::Cow;
use std::fs::{File, Metadata, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use work::Progress;

const BEGIN: [u8; 8] = *b"LAMBHEAD";
const FINISH: [u8; 8] = *b"LAMBTAIL";
const END: [u8; 8] = *b"LAMB-END";
/// Bytes before the record of a part.
const PART: usize = 16;
/// Bytes of the end of a stream.
const TAIL: usize = 16;
/// Most memory that is allocated for a record before its bytes were read.
const STEP: usize = 1 << 20;

fn part(magic: [u8; 8], record: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PART + record.len());
    out.extend_from_slice(&magic);
    out.extend_from_slice(&(record.len() as u32).to_le_bytes());
    let sum = checksum(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(record);
    out
}

fn last_part(manifest: &Manifest) -> Result<Vec<u8>> {
    let mut out = part(FINISH, &manifest.encode()?);
    let length = out.len() as u64;
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&END);
    Ok(out)
}

/// The length of the record of a part; `None` if the bytes begin no part with that magic.
fn record_length(magic: [u8; 8], head: &[u8; PART], limit: u64) -> Option<usize> {
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let fits = head[..8] == magic && word(12) == checksum(&head[..12]) && u64::from(word(8)) <= limit;
    fits.then(|| word(8) as usize)
}

/// A stream that is being read.
pub struct StreamReader<R> {
    reader: R,
    name: String,
    description: Description,
    id: [u8; 16],
    /// The key, if the backup is encrypted and the key was given.
    key: Option<Arc<Key>>,
    written: Written,
    /// Bytes read so far.
    at: u64,
}

/// What follows in a stream.
pub enum Next {
    /// A pack: its head, its index and its decrypted body.
    Pack(Head, Index, Vec<u8>),
    /// The manifest, and with it the end of the stream.
    End(Box<Manifest>),
}

impl<R: Read> StreamReader<R> {
    /// Begins to read a stream; `name` is for messages.
    ///
    /// # Errors
    /// `Invalid` without the key of an encrypted stream.
    pub fn new(reader: R, name: &str, key: Option<&Arc<Key>>) -> Result<Self> {
        let mut stream = Self::without_key(reader, name)?;
        stream.key = stream.description.choose_key(key)?;
        Ok(stream)
    }

    /// As [`StreamReader::new`], for callers that need only the description.
    fn without_key(mut reader: R, name: &str) -> Result<Self> {
        let mut head = [0; PART];
        let mut at = 0;
        fill(&mut reader, &mut head, name, &mut at)?;
        let Some(length) = record_length(BEGIN, &head, Description::LENGTH_MAX) else {
            let text = format!("{name} is not a backup made by 'lamina backup create'");
            return Err(Error::new(ErrorKind::Corrupt, text));
        };
        let record = record(&mut reader, length, name, &mut at)?;
        let description = Description::decode(&record).map_err(|error| error.context(name))?;
        let id = description.id_bytes()?;
        Ok(Self { reader, name: name.to_owned(), description, id, key: None, written: Written::default(), at })
    }

    /// The description of the backup.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Reads and verifies the next pack, or the end.
    ///
    /// # Errors
    /// `Corrupt` for damaged bytes, `Io` if the stream ends before its end.
    #[allow(clippy::should_implement_trait, reason = "an iterator could not fail with the context of the stream")]
    pub fn next(&mut self) -> Result<Next> {
        let name = self.name.clone();
        let number = self.written.packs.len();
        let context = |error: Error| error.context(format!("pack {number} of {name}"));
        let mut head = [0; HEAD];
        let (start, rest) = head.split_at_mut(PART);
        fill(&mut self.reader, start, &name, &mut self.at)?;
        if self.written.end() == segments(self.description.capacity) {
            let start: [u8; PART] = std::array::from_fn(|at| start[at]);
            return self.end(&start).map(|manifest| Next::End(Box::new(manifest)));
        }
        fill(&mut self.reader, rest, &name, &mut self.at)?;
        let decoded = Head::decode(&head).map_err(context)?;
        let expected = (self.id, number as u32, self.written.end());
        if (decoded.backup, decoded.number, decoded.first) != expected
            || decoded.end > segments(self.description.capacity)
        {
            return Err(context(Error::new(ErrorKind::Corrupt, "the pack belongs to another place or backup")));
        }
        let stored = record(&mut self.reader, decoded.stored_body() as usize, &name, &mut self.at)?;
        let opened = decoded.decode_body(&stored, self.key.as_deref()).map_err(context)?;
        let (index, decrypted) = match opened {
            (index, Cow::Borrowed(_)) => (index, None),
            (index, Cow::Owned(body)) => (index, Some(body)),
        };
        let body = decrypted.unwrap_or(stored);
        self.written.add(record_of(&decoded, &head), &index);
        Ok(Next::Pack(decoded, index, body))
    }

    fn end(&mut self, start: &[u8; PART]) -> Result<Manifest> {
        let name = self.name.clone();
        let wrong = |what: &str| Error::new(ErrorKind::Corrupt, format!("the end of {name} {what}"));
        let length = record_length(FINISH, start, Manifest::LENGTH_MAX).ok_or_else(|| wrong("is damaged"))?;
        let bytes = record(&mut self.reader, length, &name, &mut self.at)?;
        let manifest = Manifest::decode(&bytes).map_err(|error| error.context(&name))?;
        let mut tail = [0; TAIL];
        fill(&mut self.reader, &mut tail, &name, &mut self.at)?;
        if tail[..8] != ((PART + length) as u64).to_le_bytes() || tail[8..] != END {
            return Err(wrong("is damaged"));
        }
        let written = &self.written;
        let same = manifest.backup == self.description
            && manifest.packs == written.packs
            && (manifest.data, manifest.zeros) == (written.data, written.zeros);
        if !same {
            return Err(wrong("does not list what the stream contains"));
        }
        if self.reader.read(&mut [0]).during(|| format!("reading {name}"))? > 0 {
            return Err(wrong("is followed by other bytes"));
        }
        Ok(manifest)
    }
}

fn cut(name: &str, at: u64) -> Error {
    let text =
        format!("{name} ends after {at} bytes, before the end of the backup: it was cut, or is not complete yet");
    Error::new(ErrorKind::Io, text)
}

fn fill(reader: &mut dyn Read, into: &mut [u8], name: &str, at: &mut u64) -> Result<()> {
    match reader.read_exact(into) {
        Ok(()) => {
            *at += into.len() as u64;
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(cut(name, *at)),
        Err(error) => Err(Error::io(format!("reading {name}"), error)),
    }
}

/// Reads `length` bytes. Memory grows with the bytes read, because the length is not trusted.
fn record(reader: &mut dyn Read, length: usize, name: &str, at: &mut u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let have = bytes.len();
        bytes.resize(length.min(have + STEP), 0);
        fill(reader, &mut bytes[have..], name, at)?;
    }
    Ok(bytes)
}

/// The level of a stream, whose segments are read in ascending order.
pub struct StreamLevel<R> {
    stream: StreamReader<R>,
    current: Option<(Head, Index, Vec<u8>)>,
    manifest: Option<Manifest>,
}

impl<R: Read> StreamLevel<R> {
    /// The level of a stream of which only the description was read.
    pub fn new(stream: StreamReader<R>) -> Self {
        Self { stream, current: None, manifest: None }
    }

    fn step(&mut self) -> Result<()> {
        match self.stream.next()? {
            Next::Pack(head, index, body) => self.current = Some((head, index, body)),
            Next::End(manifest) => {
                self.current = None;
                self.manifest = Some(*manifest);
            }
        }
        Ok(())
    }
}

impl<R: Read> Level for StreamLevel<R> {
    fn capacity(&self) -> u64 {
        self.stream.description.capacity
    }

    fn content(&mut self, segment: u32) -> Result<Option<Content>> {
        while self.manifest.is_none() && self.current.as_ref().is_none_or(|(head, ..)| head.end <= segment) {
            self.step()?;
        }
        let content = |(head, index, _): &(Head, Index, Vec<u8>)| match head.first <= segment {
            true => Ok(index.get(&segment).cloned()),
            false => Err(Error::new(ErrorKind::Invalid, "a stream can only be read forwards")),
        };
        self.current.as_ref().map_or(Ok(None), content)
    }

    fn read(&mut self, range: Range<u64>) -> Result<Vec<u8>> {
        let body = self.current.as_ref().map_or(&[][..], |(_, _, body)| body);
        let place = |offset: u64| (offset as usize).saturating_sub(HEAD);
        let bytes = body.get(place(range.start)..place(range.end));
        bytes.map(<[u8]>::to_vec).ok_or_else(|| Error::new(ErrorKind::Invalid, "a read beyond the end of a pack"))
    }

    fn finish(&mut self) -> Result<()> {
        while self.manifest.is_none() {
            self.step()?;
        }
        Ok(())
    }
}

/// Writes packs to a stream.
struct StreamSink<'a> {
    writer: &'a mut dyn Write,
    name: &'a str,
}

impl Sink for StreamSink<'_> {
    fn pack(&mut self, _: &Head, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).during(|| format!("writing {}", self.name))
    }

    fn finish(&mut self, manifest: &Manifest) -> Result<()> {
        let bytes = last_part(manifest)?;
        let written = self.writer.write_all(&bytes).and_then(|()| self.writer.flush());
        written.during(|| format!("writing {}", self.name))
    }
}

fn parent_of(from: Option<&SnapshotIdentity>, outgoing: &Outgoing) -> Result<Option<Parent>> {
    let Some(point) = from else { return Ok(None) };
    if !outgoing.bases().contains(&point.uuid) || point.uuid == outgoing.point().uuid {
        let text = format!("the changes of '{}' since snapshot '{}' cannot be found", outgoing.name(), point.name);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(Some(Parent { backup: None, point: point.clone() }))
}

/// Writes a backup of a snapshot to a stream: all data, or the differences from the snapshot `from`.
pub fn create_stream(
    writer: &mut dyn Write,
    name: &str,
    (outgoing, disk): (&Outgoing, &str),
    from: Option<&SnapshotIdentity>,
    options: CreateOptions<'_>,
    progress: &dyn Progress,
) -> Result<Created> {
    let description = describe(outgoing, disk, parent_of(from, outgoing)?, options)?;
    let writer = &mut BufWriter::new(writer);
    writer.write_all(&part(BEGIN, &description.encode()?)).during(|| format!("writing {name}"))?;
    run(outgoing, &description, Written::default(), &mut StreamSink { writer, name }, options, progress)
}

/// As [`create_stream`], to a file. A file that an interrupted attempt has left continues after its last complete pack.
///
/// # Errors
/// `Exists` if the file has another content; `Busy` while another command writes it.
pub fn create_file(
    path: &Path,
    (outgoing, disk): (&Outgoing, &str),
    from: Option<&SnapshotIdentity>,
    options: CreateOptions<'_>,
    progress: &dyn Progress,
) -> Result<Created> {
    let name = format!("'{}'", path.display());
    let during = || format!("writing {name}");
    let parent = parent_of(from, outgoing)?;
    let mut file = match private::create_new(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            File::options().read(true).write(true).open(path).during(during)?
        }
        Err(error) => return Err(Error::io(during(), error)),
    };
    check_regular(&file.metadata().during(during)?, &name)?;
    lock(&file, &name)?;
    // The length is read after the lock was acquired, because another command may have completed the file before.
    let length = file.metadata().during(during)?.len();
    let (description, written, at) = match resume(&mut file, length, &name, (outgoing, from), options)? {
        Resumed::Complete(manifest) => {
            flush(&file, path).during(|| format!("flushing {name}"))?;
            return Ok(Created::already(&manifest));
        }
        Resumed::Partial(description, written, at) => (*description, written, at),
        Resumed::Nothing => {
            let description = describe(outgoing, disk, parent, options)?;
            let bytes = part(BEGIN, &description.encode()?);
            file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&bytes)).during(during)?;
            (description, Written::default(), bytes.len() as u64)
        }
    };
    file.set_len(at).and_then(|()| file.seek(SeekFrom::Start(at))).during(during)?;
    let created = {
        let writer = &mut file;
        run(outgoing, &description, written, &mut StreamSink { writer, name: &name }, options, progress)?
    };
    flush(&file, path).during(|| format!("flushing {name}"))?;
    Ok(created)
}

fn check_regular(metadata: &Metadata, name: &str) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let text = format!("{name} is a folder, a pipe or a device, and not a file: give '-' for a pipe");
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Excludes other writers of a file until it is closed.
fn lock(file: &File, name: &str) -> Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let text = format!("another command writes {name}: wait until that command ends");
            Err(Error::new(ErrorKind::Busy, text))
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(Error::io(format!("locking {name}"), error)),
    }
}

/// Makes a file and its name durable.
fn flush(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    match sync_folder_of(path) {
        // The user may create files in the folder, but not list them. Then the folder cannot be flushed.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    }
}

/// What an earlier attempt has left in a file.
enum Resumed {
    /// A complete backup of the snapshot.
    Complete(Box<Manifest>),
    /// The description and some packs, and the offset after them.
    Partial(Box<Description>, Written, u64),
    /// Less than a description.
    Nothing,
}

fn resume(
    file: &mut File,
    length: u64,
    name: &str,
    (outgoing, from): (&Outgoing, Option<&SnapshotIdentity>),
    options: CreateOptions<'_>,
) -> Result<Resumed> {
    let exists = || {
        let text = format!("{name} exists and is not a backup of '{}': give the name of a new file", outgoing.name());
        Error::new(ErrorKind::Exists, text)
    };
    let mut start = Vec::new();
    (&mut *file).take(BEGIN.len() as u64).read_to_end(&mut start).during(|| format!("reading {name}"))?;
    if !BEGIN.starts_with(&start) {
        return Err(exists());
    }
    file.seek(SeekFrom::Start(0)).during(|| format!("reading {name}"))?;
    let mut stream = match StreamReader::without_key(io::BufReader::new(&mut *file), name) {
        Ok(stream) => stream,
        // The description of the stream was cut, and nothing follows it.
        Err(error) if error.kind() == ErrorKind::Io && length < Description::LENGTH_MAX => return Ok(Resumed::Nothing),
        Err(error) => return Err(error),
    };
    if !is_same(&stream.description, outgoing, from, options) {
        return Err(exists());
    }
    stream.key = stream.description.choose_key(options.key)?;
    loop {
        let (at, written) = (stream.at, stream.written.clone());
        match stream.next() {
            Ok(Next::Pack(..)) => {}
            Ok(Next::End(manifest)) => return Ok(Resumed::Complete(manifest)),
            // After a power cut, the last bytes may be damaged and not only missing.
            Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt) => {
                return Ok(Resumed::Partial(Box::new(stream.description), written, at));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Opens the file of a backup for reading.
pub(crate) fn open(path: &Path, name: &str) -> Result<File> {
    let during = || format!("reading {name}");
    // Checked before the file is opened, because opening a pipe waits for the other end of the pipe.
    check_regular(&std::fs::metadata(path).during(during)?, name)?;
    File::open(path).during(during)
}

/// The manifest of the backup in a file, which is read from the end of the file.
pub fn manifest_of(path: &Path) -> Result<Manifest> {
    let name = format!("'{}'", path.display());
    let during = || format!("reading {name}");
    let mut file = open(path, &name)?;
    let length = file.metadata().during(during)?.len();
    let mut at = length.saturating_sub(TAIL as u64);
    file.seek(SeekFrom::Start(at)).during(during)?;
    let mut tail = [0; TAIL];
    let found = length > TAIL as u64 && file.read_exact(&mut tail).is_ok() && tail[8..] == END;
    let part = u64::from_le_bytes(std::array::from_fn(|place| tail[place]));
    if !found || part > at {
        // The beginning of the file shows whether the file is an unfinished backup.
        file.seek(SeekFrom::Start(0)).during(during)?;
        StreamReader::without_key(&mut file, &name)?;
        return Err(cut(&name, length));
    }
    at -= part;
    file.seek(SeekFrom::Start(at)).during(during)?;
    let mut head = [0; PART];
    fill(&mut file, &mut head, &name, &mut at)?;
    let damaged = || Error::new(ErrorKind::Corrupt, format!("the end of {name} is damaged"));
    let length = record_length(FINISH, &head, Manifest::LENGTH_MAX).ok_or_else(damaged)?;
    let bytes = record(&mut file, length, &name, &mut at)?;
    Manifest::decode(&bytes).map_err(|error| error.context(&name))
}

/// A backup in a file, read at any place.
pub struct FileLevel {
    file: File,
    name: String,
    manifest: Manifest,
    id: [u8; 16],
    /// Offset of each pack.
    starts: Vec<u64>,
    key: Option<Arc<Key>>,
    current: Option<(usize, PackReader, Index)>,
}

impl FileLevel {
    /// Opens a complete backup.
    ///
    /// # Errors
    /// `Invalid` without the key of an encrypted backup.
    pub fn open(path: &Path, key: Option<&Arc<Key>>) -> Result<Self> {
        let name = format!("'{}'", path.display());
        let manifest = manifest_of(path)?;
        let file = open(path, &name)?;
        let mut start = [0; PART];
        let mut at = 0;
        fill(&mut &file, &mut start, &name, &mut at)?;
        let damaged = || Error::new(ErrorKind::Corrupt, format!("the beginning of {name} is damaged"));
        at += record_length(BEGIN, &start, Description::LENGTH_MAX).ok_or_else(damaged)? as u64;
        let starts = manifest.packs.iter().map(|pack| {
            let start = at;
            at += pack.length;
            start
        });
        let starts = starts.collect();
        let id = manifest.backup.id_bytes()?;
        let key = manifest.backup.choose_key(key)?;
        Ok(Self { file, name, manifest, id, starts, key, current: None })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn bytes(&self, pack: usize, range: Range<u64>) -> Result<Vec<u8>> {
        let start = self.starts.get(pack).copied().unwrap_or_default();
        let mut at = start + range.start;
        let mut file = &self.file;
        file.seek(SeekFrom::Start(at)).during(|| format!("reading {}", self.name))?;
        record(&mut file, (range.end - range.start) as usize, &self.name, &mut at)
    }

    fn load(&self, pack: usize) -> Result<(usize, PackReader, Index)> {
        let head = self.bytes(pack, 0..HEAD as u64)?;
        let head = check_head(&self.manifest.packs, pack, self.id, &head)?;
        let mut fetch = |range| self.bytes(pack, range);
        let reader = PackReader::new(head, self.key.as_ref(), &mut fetch)?;
        let index = head.decode_index(&reader.read(head.index_range(), &mut fetch)?)?;
        Ok((pack, reader, index))
    }
}

impl Level for FileLevel {
    fn capacity(&self) -> u64 {
        self.manifest.backup.capacity
    }

    fn content(&mut self, segment: u32) -> Result<Option<Content>> {
        let Some(pack) = self.manifest.pack_of(segment) else { return Ok(None) };
        if self.current.as_ref().is_none_or(|(current, ..)| *current != pack) {
            let loaded = self.load(pack).map_err(|error| error.context(format!("pack {pack} of {}", self.name)))?;
            self.current = Some(loaded);
        }
        Ok(self.current.as_ref().and_then(|(.., index)| index.get(&segment).cloned()))
    }

    fn read(&mut self, range: Range<u64>) -> Result<Vec<u8>> {
        match &self.current {
            Some((pack, reader, _)) => reader.read(range, &mut |range| self.bytes(*pack, range)),
            None => Err(Error::new(ErrorKind::Invalid, "no pack was read yet")),
        }
    }
}
