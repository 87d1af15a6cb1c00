//! Writing an OVA. Descriptor and manifest precede the disks in the archive, but their text is known only after the
//! disks are written. So space is reserved for both, and they are written at the end. The first header of the archive
//! is written last.

use super::archive::plain_name;
use super::digest::{Algorithm, Hasher};
use super::envelope::{self, DescribedDisk, Machine};
use super::manifest::Manifest;
use super::{DESCRIPTOR_MAX, MEMBERS_MAX};
use crate::stream::{StreamOptions, StreamWriter};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use std::io::{self, Seek, SeekFrom, Write};

/// Bytes of a tar header, and of a tar block.
const BLOCK: u64 = 512;

/// A disk that will be added to the archive.
#[derive(Clone, Debug)]
pub struct PlannedDisk {
    /// The member's name: `machine-disk1.vmdk`.
    pub file: String,
    /// Capacity in bytes, a multiple of 512.
    pub capacity: u64,
    /// The VMDK descriptor to embed, of createType streamOptimized.
    pub descriptor: Vec<u8>,
}

/// Options for writing an archive.
#[derive(Clone, Debug)]
pub struct OvaOptions {
    /// The digest algorithm of the manifest; SHA-256 is usual, SHA-1 is for importers from before 2016.
    pub algorithm: Algorithm,
    /// Compression level, 0 to 9.
    pub level: u32,
    /// The number of compressing threads.
    pub threads: usize,
    /// The modification time in the archive's headers, in seconds since 1970.
    pub time: u64,
}

struct Finished {
    size: u64,
    digest: Vec<u8>,
}

/// An archive being written.
pub struct OvaWriter<W: Write + Seek> {
    out: W,
    start: u64,
    machine: Machine,
    planned: Vec<PlannedDisk>,
    finished: Vec<Finished>,
    options: OvaOptions,
    descriptor_name: String,
    descriptor_size: u64,
    manifest_name: String,
}

impl<W: Write + Seek> OvaWriter<W> {
    /// Begins an archive at the current position of `out`; `stem` is the common beginning of its file names.
    pub fn new(mut out: W, stem: &str, machine: Machine, disks: Vec<PlannedDisk>, options: OvaOptions) -> Result<Self> {
        let invalid = |what: String| Error::new(ErrorKind::Invalid, what);
        if disks.is_empty() || disks.len() > MEMBERS_MAX - 2 {
            return Err(invalid(format!("an archive of {} disks cannot be made", disks.len())));
        }
        let (descriptor_name, manifest_name) = (format!("{stem}.ovf"), format!("{stem}.mf"));
        let mut names = vec![plain_name(&descriptor_name)?, plain_name(&manifest_name)?];
        for disk in &disks {
            names.push(plain_name(&disk.file)?);
        }
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0].eq_ignore_ascii_case(pair[1])) {
            return Err(invalid("two members of the archive would have one name".to_owned()));
        }
        for name in names {
            header(name, 0, options.time)?;
        }
        // With the largest sizes the text has its greatest possible length.
        let longest = described(&disks, |_| u64::MAX);
        let descriptor_size = envelope::text(&machine, &longest).len() as u64;
        if descriptor_size > DESCRIPTOR_MAX {
            return Err(invalid(format!("a descriptor of {descriptor_size} bytes is too long")));
        }
        let context = || "cannot write the archive".to_owned();
        let start = out.stream_position().during(context)?;
        let lines = manifest_lines(&descriptor_name, &disks, options.algorithm);
        let room = 2 * BLOCK + descriptor_size.next_multiple_of(BLOCK) + lines.next_multiple_of(BLOCK);
        io::copy(&mut io::Read::take(io::repeat(0), room), &mut out).during(context)?;
        let finished = Vec::new();
        Ok(Self {
            out,
            start,
            machine,
            planned: disks,
            finished,
            options,
            descriptor_name,
            descriptor_size,
            manifest_name,
        })
    }

    /// Adds the next disk; `fill` writes its grains.
    pub fn add_disk(&mut self, fill: impl FnOnce(&mut StreamWriter<Hashed<&mut W>>) -> Result<()>) -> Result<()> {
        let context = || "cannot write the archive".to_owned();
        let Some(disk) = self.planned.get(self.finished.len()) else {
            return Err(Error::new(ErrorKind::Invalid, "the archive has all of its disks already"));
        };
        let head = self.out.stream_position().during(context)?;
        self.out.write_all(&[0; BLOCK as usize]).during(context)?;
        let stream = StreamOptions {
            capacity: disk.capacity,
            descriptor: &disk.descriptor,
            level: self.options.level,
            threads: self.options.threads,
        };
        let hashed = Hashed { out: &mut self.out, hasher: Hasher::new(self.options.algorithm), size: 0 };
        let mut writer = StreamWriter::new(hashed, &stream)?;
        fill(&mut writer)?;
        let Hashed { size, hasher, .. } = writer.finish()?;
        // A stream consists of whole sectors, so the next header follows without padding.
        debug_assert!(size.is_multiple_of(SECTOR));
        let end = self.out.stream_position().during(context)?;
        self.out.seek(SeekFrom::Start(head)).during(context)?;
        self.out.write_all(&header(&disk.file, size, self.options.time)?).during(context)?;
        self.out.seek(SeekFrom::Start(end)).during(context)?;
        self.finished.push(Finished { size, digest: hasher.finish() });
        Ok(())
    }

    /// Completes the archive, and returns the flushed output, positioned at its end.
    pub fn finish(mut self) -> Result<W> {
        if self.finished.len() < self.planned.len() {
            let what = format!("the archive has {} of {} disks", self.finished.len(), self.planned.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let context = || "cannot write the archive".to_owned();
        let algorithm = self.options.algorithm;
        self.out.write_all(&[0; 2 * BLOCK as usize]).during(context)?;
        let end = self.out.stream_position().during(context)?;

        let disks = described(&self.planned, |at| self.finished[at].size);
        let mut text = envelope::text(&self.machine, &disks).into_bytes();
        // Blank lines after the last element fill the reserved space.
        text.resize(self.descriptor_size as usize, b'\n');
        let mut hasher = Hasher::new(algorithm);
        hasher.update(&text);
        let mut manifest = Manifest::line(&self.descriptor_name, algorithm, &hasher.finish());
        for (disk, finished) in self.planned.iter().zip(&self.finished) {
            manifest.push_str(&Manifest::line(&disk.file, algorithm, &finished.digest));
        }

        let descriptor_end = self.start + BLOCK + self.descriptor_size.next_multiple_of(BLOCK);
        self.out.seek(SeekFrom::Start(descriptor_end)).during(context)?;
        let head = header(&self.manifest_name, manifest.len() as u64, self.options.time)?;
        self.out.write_all(&head).during(context)?;
        self.out.write_all(manifest.as_bytes()).during(context)?;
        self.out.seek(SeekFrom::Start(self.start + BLOCK)).during(context)?;
        self.out.write_all(&text).during(context)?;
        self.out.flush().during(context)?;
        self.out.seek(SeekFrom::Start(self.start)).during(context)?;
        let head = header(&self.descriptor_name, self.descriptor_size, self.options.time)?;
        self.out.write_all(&head).during(context)?;
        self.out.seek(SeekFrom::Start(end)).during(context)?;
        self.out.flush().during(context)?;
        Ok(self.out)
    }
}

fn described(disks: &[PlannedDisk], size: impl Fn(usize) -> u64) -> Vec<DescribedDisk<'_>> {
    let numbered = disks.iter().enumerate();
    numbered.map(|(at, disk)| DescribedDisk { file: &disk.file, size: size(at), capacity: disk.capacity }).collect()
}

/// Length of the manifest in bytes.
fn manifest_lines(descriptor: &str, disks: &[PlannedDisk], algorithm: Algorithm) -> u64 {
    let digest = vec![0; algorithm.length()];
    let names = std::iter::once(descriptor).chain(disks.iter().map(|disk| disk.file.as_str()));
    names.map(|name| Manifest::line(name, algorithm, &digest).len() as u64).sum()
}

/// A tar header; names longer than 100 bytes are refused, because OVF requires the plain ustar form.
fn header(name: &str, size: u64, time: u64) -> Result<[u8; BLOCK as usize]> {
    let mut header = tar::Header::new_ustar();
    header.set_path(name).during(|| format!("{name} cannot be a member of the archive"))?;
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(time);
    header.set_size(size);
    header.set_cksum();
    Ok(*header.as_bytes())
}

/// Counts and digests the bytes that are written through it.
pub struct Hashed<W> {
    out: W,
    hasher: Hasher,
    size: u64,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
