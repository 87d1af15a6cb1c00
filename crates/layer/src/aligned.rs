//! Reads and writes of any range, in either I/O mode: direct I/O requires whole, aligned blocks of 4 KiB, which formats
//! with sector granularity cannot always offer.
//!
//! 1. Buffered requests are passed to the file unchanged.
//! 2. A direct write that covers blocks only in part reads them, merges its bytes, and writes whole blocks. Meanwhile
//!    no other write or punch of this file may run, or adjacent bytes in the block would be lost: such a write holds
//!    `blocks` exclusively, every other operation holds it shared.
//! 3. Sectors that a direct write only rewrites, to complete a block, keep their content on the device, whichever part
//!    of the write a power cut leaves.

use crate::SECTOR;
use backend::{BLOCK_SIZE, Buffer, File, IoMode};
use parking_lot::RwLock;
use std::io;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The most bytes that are copied into aligned memory at a time.
const COPY_MAX: u64 = 1 << 20;

/// A file that can be read and written at any offset.
pub(crate) struct AlignedFile {
    file: Arc<dyn File>,
    direct: bool,
    blocks: RwLock<()>,
}

impl AlignedFile {
    pub(crate) fn new(file: Arc<dyn File>) -> Self {
        let direct = file.mode() == IoMode::Direct;
        Self { file, direct, blocks: RwLock::new(()) }
    }

    /// The file without this layer, for operations that need no alignment.
    pub(crate) fn file(&self) -> &Arc<dyn File> {
        &self.file
    }

    /// Whether the file is open for direct I/O.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Fills `out` from `offset`, with zeros past the end of the file.
    pub(crate) fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if !self.direct || is_aligned(offset, out) {
            return self.file.read_at(out, offset);
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let first = at / BLOCK * BLOCK;
            let part = (COPY_MAX - (at - first)).min((out.len() - done) as u64) as usize;
            let skip = (at - first) as usize;
            let mut buffer = Buffer::recycled((skip + part).div_ceil(BLOCK_SIZE));
            self.file.read_at(&mut buffer, first)?;
            out[done..done + part].copy_from_slice(&buffer[skip..skip + part]);
            done += part;
        }
        Ok(())
    }

    /// Writes the slices one after another at `offset`; `durable` as in [`File::write_at`].
    pub(crate) fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        if !self.direct {
            return self.file.write_at(slices, offset, durable);
        }
        if slices.iter().all(|slice| is_aligned(offset, slice)) {
            let _shared = self.blocks.read();
            return self.file.write_at(slices, offset, durable);
        }
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let mut source = Bytes { slices, at: 0 };
        let mut done = 0;
        while done < length {
            let at = offset + done;
            let first = at / BLOCK * BLOCK;
            let part = (COPY_MAX - (at - first)).min(length - done);
            self.write_copied(&mut source, at, part as usize, durable)?;
            done += part;
        }
        Ok(())
    }

    fn write_copied(&self, source: &mut Bytes<'_>, at: u64, length: usize, durable: bool) -> io::Result<()> {
        let first = at / BLOCK * BLOCK;
        let skip = (at - first) as usize;
        let end = skip + length;
        let mut buffer = Buffer::recycled(end.div_ceil(BLOCK_SIZE));
        let size = buffer.len();
        if skip == 0 && end == size {
            source.copy_to(&mut buffer);
            let _shared = self.blocks.read();
            return self.file.write_at(&[&buffer], first, durable);
        }
        let _alone = self.blocks.write();
        if skip > 0 {
            self.file.read_at(&mut buffer[..BLOCK_SIZE], first)?;
        }
        if end < size && (skip == 0 || size > BLOCK_SIZE) {
            self.file.read_at(&mut buffer[size - BLOCK_SIZE..], first + (size - BLOCK_SIZE) as u64)?;
        }
        source.copy_to(&mut buffer[skip..end]);
        self.file.write_at(&[&buffer], first, durable)
    }

    /// As [`File::punch`].
    pub(crate) fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let _shared = self.blocks.read();
        self.file.punch(offset, length)
    }
}

fn is_aligned(offset: u64, memory: &[u8]) -> bool {
    offset.is_multiple_of(BLOCK)
        && memory.len().is_multiple_of(BLOCK_SIZE)
        && memory.as_ptr().addr().is_multiple_of(BLOCK_SIZE)
}

/// The bytes of several slices that are not copied yet.
struct Bytes<'a> {
    slices: &'a [&'a [u8]],
    at: usize,
}

impl Bytes<'_> {
    fn copy_to(&mut self, mut out: &mut [u8]) {
        while let Some((first, rest)) = self.slices.split_first() {
            if out.is_empty() {
                return;
            }
            let part = out.len().min(first.len() - self.at);
            let (now, later) = out.split_at_mut(part);
            now.copy_from_slice(&first[self.at..self.at + part]);
            out = later;
            self.at += part;
            if self.at == first.len() {
                self.slices = rest;
                self.at = 0;
            }
        }
    }
}

/// The part of the concatenated `slices` that begins at byte `from` and has `length` bytes.
pub(crate) fn part_of<'a>(slices: &[&'a [u8]], mut from: usize, mut length: usize) -> Vec<&'a [u8]> {
    let mut out = Vec::with_capacity(slices.len().min(8));
    for slice in slices {
        if length == 0 {
            break;
        }
        if from >= slice.len() {
            from -= slice.len();
            continue;
        }
        let part = &slice[from..slice.len().min(from + length)];
        length -= part.len();
        from = 0;
        out.push(part);
    }
    out
}

/// Reads sector by sector, and sets all bits of unreadable sectors. Returns false if no sector could be read.
pub(crate) fn read_sectors(file: &dyn File, buffer: &mut [u8], start: u64) -> bool {
    let mut any = false;
    for (at, sector) in (start..).step_by(SECTOR as usize).zip(buffer.chunks_mut(SECTOR as usize)) {
        match file.read_at(sector, at) {
            Ok(()) => any = true,
            Err(_) => sector.fill(0xff),
        }
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};

    #[test]
    fn any_range_in_direct_mode_equals_a_model() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file = AlignedFile::new(disk.directory().create("f", IoMode::Direct).unwrap());
        let mut model = vec![0u8; 3 << 20];
        let mut state = 7u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) % bound
        };
        for round in 0..300u64 {
            let offset = next(model.len() as u64 / 512 - 1) * 512;
            let length = ((1 + next(if round % 7 == 0 { 4096 } else { 24 })) * 512).min(model.len() as u64 - offset);
            let bytes: Vec<u8> = (0..length).map(|at| (at * 31 + round) as u8).collect();
            let cut = (next(length / 512) * 512) as usize;
            file.write_at(&[&bytes[..cut], &bytes[cut..]], offset, false).unwrap();
            model[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
            let offset = next(model.len() as u64 / 512) * 512;
            let mut out = vec![1; (model.len() - offset as usize).min(512 * (1 + next(40) as usize))];
            file.read_at(&mut out, offset).unwrap();
            assert_eq!(out, model[offset as usize..][..out.len()], "round {round}");
        }
        let mut out = vec![1; model.len()];
        file.read_at(&mut out, 0).unwrap();
        assert!(out == model);
    }

    #[test]
    fn parts_of_slices_are_found_at_any_offset() {
        let slices: [&[u8]; 3] = [b"abc", b"", b"defgh"];
        for from in 0..8 {
            for length in 0..=8 - from {
                assert_eq!(part_of(&slices, from, length).concat(), b"abcdefgh"[from..from + length]);
            }
        }
    }
}
