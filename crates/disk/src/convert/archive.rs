//! Sinks that are written sequentially: streamOptimized disks, as files of their own and in OVA archives.

use super::copy::{Pieces, Sink};
use backend::{Access, File, IoMode, Lock};
use error::{Error, ErrorKind, IoContext, Result};
use layer::SECTOR;
use layer::descriptor::storage::{self, NEW_SUFFIX};
use layer::descriptor::{self, Adapter, ContentId, CreateType, Descriptor, ExtentKind, ExtentLine, Uuid};
use layer::image::{Folder, system_entropy};
use layer::ova::{Algorithm, Controller, Machine, OvaOptions, OvaWriter, PlannedDisk};
use layer::stream::{StreamOptions, StreamWriter};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::sync::Arc;
use work::Progress;

/// Compression level: the default of zlib, which VMware uses too.
const LEVEL: u32 = 6;
/// Bytes collected for one write.
pub(super) const BUFFER: usize = 1 << 20;
/// Memory of the virtual machine in the archive's OVF description: the source of a conversion has no machine, and so no
/// memory size.
const MEMORY_MIB: u64 = 1024;
/// Virtual hardware version of that machine: the version of ESXi 6.7, as in the descriptors that lamina writes.
pub(super) const HARDWARE: &str = "vmx-14";
/// Operating system "Other" in the CIM numbering that OVF uses.
pub(super) const SYSTEM: u32 = 1;

/// A new file under a temporary name.
pub(super) struct NewFile {
    pub(super) folder: Folder,
    pub(super) name: String,
}

impl NewFile {
    fn temporary(&self) -> String {
        format!("{}{NEW_SUFFIX}", self.name)
    }

    fn refuse_existing(&self) -> Result<()> {
        match self.folder.directory().open_foreign(&self.name, IoMode::Buffered, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            _ => Err(Error::new(ErrorKind::Exists, format!("there is a file '{}' already", self.name))),
        }
    }

    pub(super) fn create(&self) -> Result<(Arc<dyn File>, Box<dyn Lock>)> {
        self.refuse_existing()?;
        storage::create_unfinished(&**self.folder.directory(), &self.name, IoMode::Buffered)
    }

    /// Renames the temporary file to its final name, durably.
    pub(super) fn finish(&self, file: &dyn File) -> Result<()> {
        let directory = self.folder.directory();
        let during = || format!("making '{}' durable", self.name);
        let renamed = file
            .sync()
            .during(during)
            .and_then(|()| self.refuse_existing())
            .and_then(|()| directory.rename(&self.temporary(), &self.name).during(during));
        match renamed {
            Ok(()) => directory.sync().during(during),
            Err(error) => {
                self.abandon();
                Err(error)
            }
        }
    }

    pub(super) fn abandon(&self) {
        if let Err(error) = self.folder.directory().remove(&self.temporary()) {
            tracing::warn!("'{}' stays: {error}", self.temporary());
        }
    }
}

/// Implements [`std::io::Write`] for a file.
pub(super) struct Output {
    pub(super) file: Arc<dyn File>,
    pub(super) position: u64,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(&[bytes], self.position, false)?;
        self.file.write_out(self.position, bytes.len() as u64, false);
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Output {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let moved = |from: u64, by: i64| from.checked_add_signed(by);
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => moved(self.position, by),
            SeekFrom::End(by) => moved(self.file.len()?, by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// A streamOptimized disk that is being written, to a file of its own or into an archive.
pub(super) struct StreamSink {
    new: NewFile,
    file: Arc<dyn File>,
    capacity: u64,
    archive: bool,
    /// While this lock is held, the removal of files that crashes left does not touch this file.
    _lock: Box<dyn Lock>,
}

impl StreamSink {
    /// Creates the empty file.
    pub(super) fn new(folder: &Folder, name: &str, capacity: u64, archive: bool) -> Result<Self> {
        if !archive {
            storage::check_name(name)?;
        } else if stem(name).is_none() {
            let text = format!("'{}' is not the name of an archive: use NAME.ova", name.escape_debug());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let new = NewFile { folder: folder.clone(), name: name.to_owned() };
        let (file, lock) = new.create()?;
        Ok(Self { new, file, capacity, archive, _lock: lock })
    }

    fn write_stream(&self, out: impl Write, pieces: &mut Pieces<'_>) -> Result<()> {
        let text = embedded(&self.new.name, self.capacity)?;
        let options = StreamOptions { capacity: self.capacity, descriptor: &text, level: LEVEL, threads: threads() };
        let mut writer = StreamWriter::new(out, &options)?;
        take_all(&mut writer, pieces)?;
        writer.finish().map(drop)
    }

    fn write_archive(&self, out: impl Write + Seek, pieces: &mut Pieces<'_>) -> Result<()> {
        let stem = stem(&self.new.name).unwrap_or(&self.new.name);
        let member = format!("{stem}-disk1.vmdk");
        let machine = Machine {
            name: stem.to_owned(),
            processors: 1,
            memory_mib: MEMORY_MIB,
            hardware: HARDWARE.to_owned(),
            system: SYSTEM,
            controller: Controller::LsiLogic,
            networks: Vec::new(),
            settings: Vec::new(),
        };
        let options = archive_options();
        let descriptor = embedded(&member, self.capacity)?;
        let disk = PlannedDisk { file: member, capacity: self.capacity, descriptor };
        let mut writer = OvaWriter::new(out, stem, machine, vec![disk], options)?;
        writer.add_disk(|disk| take_all(disk, pieces))?;
        writer.finish().map(drop)
    }
}

impl Sink for StreamSink {
    fn unit(&self) -> u64 {
        // The grain size of streamOptimized disks.
        64 << 10
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        let mut out = BufWriter::with_capacity(BUFFER, Output { file: Arc::clone(&self.file), position: 0 });
        match self.archive {
            true => self.write_archive(&mut out, pieces)?,
            false => self.write_stream(&mut out, pieces)?,
        }
        out.flush().during(|| format!("writing '{}'", self.new.name))
    }

    fn finish(self: Box<Self>, _: &dyn Progress) -> Result<()> {
        self.new.finish(&*self.file)
    }

    fn abandon(self: Box<Self>) {
        self.new.abandon();
    }
}

/// How archives are written.
pub(super) fn archive_options() -> OvaOptions {
    OvaOptions { algorithm: Algorithm::Sha256, level: LEVEL, threads: threads(), time: backend::clock::seconds() }
}

pub(super) fn take_all<W: Write>(writer: &mut StreamWriter<W>, pieces: &mut Pieces<'_>) -> Result<()> {
    let mut take = |piece: &super::CopyPiece| {
        piece.runs.iter().try_for_each(|run| writer.write(piece.start + run.start as u64, piece.bytes(run)))
    };
    while pieces.next(&mut take)? {}
    Ok(())
}

/// The part `NAME` of a file name `NAME.ova`.
pub(super) fn stem(name: &str) -> Option<&str> {
    let split = name.len().checked_sub(4).filter(|at| name.is_char_boundary(*at))?;
    let (stem, ending) = name.split_at(split);
    (ending.eq_ignore_ascii_case(".ova") && !stem.is_empty()).then_some(stem)
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The descriptor that is embedded in a streamOptimized disk with the file name `name`.
pub(super) fn embedded(name: &str, capacity: u64) -> Result<Vec<u8>> {
    let entropy = system_entropy();
    let random = &mut || entropy();
    let sectors = capacity / SECTOR;
    let extent = ExtentLine {
        access: descriptor::Access::ReadOnly,
        ..ExtentLine::whole(ExtentKind::Sparse, sectors.max(1), name)
    };
    let mut text = Descriptor::base(CreateType::StreamOptimized, vec![extent]);
    text.content = ContentId::random(random);
    text.database.set_disk(Adapter::default(), sectors, Uuid::random(random));
    text.database.set_long_content(text.content, random);
    text.to_bytes()
}
