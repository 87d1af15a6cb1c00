//! Writing a stream: grains in ascending order, each table after its grains, directory and footer at the end.

use super::deflate::{Deflaters, Packed};
use super::marker::{Kind, Marker};
use crate::hosted::header::{
    DESCRIPTOR_SECTORS_MAX, DIRECTORY_AT_END, FLAG_COMPRESSED, FLAG_MARKERS, FLAG_NEWLINES, Header, TABLE_ENTRIES_MAX,
};
use crate::{CAPACITY_MAX, Error, ErrorKind, IoContext, Result, SECTOR};
use std::io::Write;

/// The usual grain in sectors: 64 KiB.
const GRAIN_SECTORS: u64 = 128;
/// Sectors reserved for the descriptor; for a longer text more are reserved.
const DESCRIPTOR_SECTORS: u64 = 20;

/// Parameters of a stream.
#[derive(Clone, Debug)]
pub struct StreamOptions<'a> {
    /// Capacity in bytes, a multiple of 512.
    pub capacity: u64,
    /// The descriptor to embed.
    pub descriptor: &'a [u8],
    /// 0 (stored) to 9 (smallest); 6 is usual.
    pub level: u32,
    /// The number of compressing threads; with 0 or 1, the caller's thread compresses.
    pub threads: usize,
}

/// Writes a streamOptimized extent to any [`std::io::Write`].
pub struct StreamWriter<W: Write> {
    out: W,
    header: Header,
    deflaters: Deflaters,
    /// Sectors written so far.
    position: u64,
    /// The lowest grain that may be added next.
    next: u64,
    table: Vec<u32>,
    table_index: u64,
    directory: Vec<u32>,
    failed: bool,
}

impl<W: Write> StreamWriter<W> {
    /// Begins a stream: writes header and descriptor.
    pub fn new(out: W, options: &StreamOptions<'_>) -> Result<Self> {
        let capacity = options.capacity;
        if capacity == 0 || capacity > CAPACITY_MAX || !capacity.is_multiple_of(SECTOR) {
            let what = format!("a stream cannot have {capacity} bytes: 512 bytes to 64 TiB, a multiple of 512");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let text = options.descriptor;
        let descriptor_size = DESCRIPTOR_SECTORS.max((text.len() as u64).div_ceil(SECTOR));
        if descriptor_size > DESCRIPTOR_SECTORS_MAX {
            let what = format!("a descriptor of {} bytes is too long to embed", text.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let header = Header {
            version: 3,
            flags: FLAG_NEWLINES | FLAG_COMPRESSED | FLAG_MARKERS,
            capacity: capacity / SECTOR,
            grain: GRAIN_SECTORS,
            descriptor_offset: 1,
            descriptor_size,
            table_entries: TABLE_ENTRIES_MAX,
            redundant_offset: 0,
            directory_offset: DIRECTORY_AT_END,
            overhead: (1 + descriptor_size).next_multiple_of(GRAIN_SECTORS),
            unclean: false,
            compression: 1,
        };
        let mut writer = Self {
            out,
            deflaters: Deflaters::new(options.level, options.threads),
            position: 0,
            next: 0,
            table: vec![0; header.table_entries as usize],
            table_index: 0,
            directory: vec![0; header.directory_entries() as usize],
            failed: false,
            header,
        };
        let mut head = writer.header.encode().to_vec();
        head.extend_from_slice(text);
        head.resize((writer.header.overhead * SECTOR) as usize, 0);
        writer.put(&head)?;
        Ok(writer)
    }

    /// The unit of [`StreamWriter::write`], in bytes.
    pub fn grain(&self) -> u64 {
        self.header.grain * SECTOR
    }

    /// Bytes written so far. With several threads, grains that were added may still be in compression and not be
    /// counted.
    pub fn position(&self) -> u64 {
        self.position * SECTOR
    }

    /// Adds whole grains at `start`, after all grains added before; the capacity may cut the last grain of the disk.
    /// Grains that are never added, and grains of zeros, are not stored: they read as zeros.
    pub fn write(&mut self, start: u64, data: &[u8]) -> Result<()> {
        self.check()?;
        let (grain, capacity) = (self.grain(), self.header.capacity * SECTOR);
        let end = start.saturating_add(data.len() as u64);
        let aligned = start.is_multiple_of(grain) && (end.is_multiple_of(grain) || end == capacity);
        if !aligned || end > capacity || start / grain < self.next {
            let what = format!("bytes {start} to {end} cannot be added to a stream that is at {}", self.next * grain);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        for (number, bytes) in (start / grain..).zip(data.chunks(grain as usize)) {
            self.next = number + 1;
            if is_zero(bytes) {
                continue;
            }
            let packed = self.deflaters.push(number, number * self.header.grain, bytes, grain as usize);
            if let Some(packed) = packed.inspect_err(|_| self.failed = true)? {
                self.put_grain(&packed)?;
            }
        }
        Ok(())
    }

    /// Completes the stream and returns its output, flushed.
    pub fn finish(mut self) -> Result<W> {
        self.check()?;
        while let Some(packed) = self.deflaters.pop()? {
            self.put_grain(&packed)?;
        }
        self.put_table()?;
        let mut directory: Vec<u8> = self.directory.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        directory.resize((self.header.directory_sectors() * SECTOR) as usize, 0);
        self.put_marked(Kind::Directory, &directory)?;
        let mut footer = self.header.clone();
        footer.directory_offset = self.position - self.header.directory_sectors();
        self.put_marked(Kind::Footer, &footer.encode())?;
        self.put(&padded(&Marker::End))?;
        self.out.flush().during(|| "cannot write the end of the stream".to_owned())?;
        Ok(self.out)
    }

    fn check(&self) -> Result<()> {
        match self.failed {
            true => Err(Error::new(ErrorKind::Stopped, "the stream has failed before; begin it again")),
            false => Ok(()),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .during(|| "cannot write the stream".to_owned())
            .inspect_err(|_| self.failed = true)?;
        self.position += bytes.len() as u64 / SECTOR;
        Ok(())
    }

    /// The sector at which the next part of the stream begins, as a table entry.
    fn place(&mut self) -> Result<u32> {
        u32::try_from(self.position).map_err(|_| {
            self.failed = true;
            Error::new(ErrorKind::NoSpace, "the stream has reached 2 TiB, the limit of its 32-bit sector numbers")
        })
    }

    fn put_grain(&mut self, packed: &Packed) -> Result<()> {
        let per_table = u64::from(self.header.table_entries);
        let (index, entry) = (packed.grain / per_table, (packed.grain % per_table) as usize);
        if index != self.table_index {
            self.put_table()?;
            self.table_index = index;
        }
        self.table[entry] = self.place()?;
        self.put(&packed.bytes)
    }

    /// Writes the current table, if it has any entry.
    fn put_table(&mut self) -> Result<()> {
        if self.table.iter().all(|entry| *entry == 0) {
            return Ok(());
        }
        let bytes: Vec<u8> = self.table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        // The table follows the sector of its marker.
        let place = self.place()?.saturating_add(1);
        self.put_marked(Kind::Table, &bytes)?;
        self.directory[self.table_index as usize] = place;
        self.table.fill(0);
        Ok(())
    }

    fn put_marked(&mut self, kind: Kind, bytes: &[u8]) -> Result<()> {
        let sectors = bytes.len() as u64 / SECTOR;
        self.put(&padded(&Marker::Metadata { kind, sectors }))?;
        self.put(bytes)
    }
}

fn padded(marker: &Marker) -> [u8; SECTOR as usize] {
    let mut sector = [0; SECTOR as usize];
    sector[..16].copy_from_slice(&marker.encode());
    sector
}

/// Whether all bytes are zero: the first is, and each equals the one before it.
fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && *rest == bytes[..rest.len()],
    }
}
