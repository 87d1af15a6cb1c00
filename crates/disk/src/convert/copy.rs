//! The copy loop: one thread reads parts of the disk and finds the zeros in them, and the caller's thread writes the
//! parts.
//!
//! Buffers are reused: after a part is written, the next part is read into its buffer. So memory is limited and stays
//! in the processor's caches. When one of the threads ends, the other one ends too: the reader ends at the next part
//! that it cannot send, and the writer detects a channel that closes without an end mark as a failed reader.

use backend::{BLOCK_SIZE, Buffer};
use error::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use work::Progress;
use work::Throttle;

/// Bytes of a part. Parts begin at multiples of this size.
pub const PIECE: u64 = 1 << 20;

/// Most parts in memory at a time: one is being read, one is being written, the others wait between the two threads.
pub const PIECES: usize = 8;

/// The smallest run of zeros that is not written.
const ZERO_UNIT: u64 = BLOCK_SIZE as u64;

/// A range of the source whose content is either all zeros or data; its start is the argument of [`Source::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRun {
    /// The range's length in bytes; not 0.
    pub length: u64,
    /// Whether the source's map shows that the range reads as zeros, so that it need not be read.
    pub zero: bool,
}

/// The source of a copy. One thread calls the methods, from the beginning of the disk to its end.
pub trait Source: Send {
    /// Capacity in bytes.
    fn capacity(&self) -> u64;

    /// The range that begins at `start`, which is lower than the capacity.
    fn next(&mut self, start: u64) -> Result<SourceRun>;

    /// Reads a range that [`Source::next`] did not return as zeros.
    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()>;
}

/// The target of a copy. All of it reads as zeros before anything is written.
pub trait Sink: Send {
    /// Data is written in whole units of this many bytes, a power of two, except at the end of the disk.
    fn unit(&self) -> u64;

    /// Writes all parts of the copy.
    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()>;

    /// Makes the target durable and gives it its name. After an error the target does not exist.
    fn finish(self: Box<Self>, progress: &dyn Progress) -> Result<()>;

    /// Removes the unfinished target.
    fn abandon(self: Box<Self>);
}

/// A part of the disk: a megabyte with data in it, or a run of zeros of any length.
pub struct CopyPiece {
    /// The first byte of the part.
    pub start: u64,
    /// The length of the part in bytes.
    pub length: u64,
    /// Ranges that are not zeros, relative to `start`: in order, not adjacent, in units of [`Sink::unit`] except at the
    /// end of the disk.
    pub runs: Vec<Range<usize>>,
    /// The bytes of the part, padded with zeros to a whole block at the end of the disk.
    buffer: Option<Buffer>,
}

impl CopyPiece {
    /// The bytes of a run.
    pub fn bytes(&self, run: &Range<usize>) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[run.clone()])
    }

    /// The bytes of a run, padded with zeros to whole blocks where the disk ends within a block.
    pub fn blocks(&self, run: &Range<usize>) -> &[u8] {
        self.bytes(&(run.start..run.end.next_multiple_of(BLOCK_SIZE)))
    }

    /// The ranges between the runs of data, as byte ranges of the disk.
    pub fn zeros(&self) -> Zeros<'_> {
        Zeros { piece: self, at: 0, next: 0 }
    }
}

/// The ranges of a part that are zeros.
pub struct Zeros<'a> {
    piece: &'a CopyPiece,
    at: u64,
    next: usize,
}

impl Iterator for Zeros<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.piece.length {
            let run = self.piece.runs.get(self.next);
            let (to, after) = match run {
                Some(run) => (run.start as u64, run.end as u64),
                None => (self.piece.length, self.piece.length),
            };
            let from = std::mem::replace(&mut self.at, after);
            self.next += 1;
            if from < to {
                return Some(self.piece.start + from..self.piece.start + to);
            }
        }
        None
    }
}

enum Message {
    CopyPiece(CopyPiece),
    Failed(Error),
    End,
}

/// The parts of a copy in order, as the writing thread receives them.
pub struct Pieces<'a> {
    full: Receiver<Message>,
    empty: Sender<Buffer>,
    held: Option<Buffer>,
    progress: &'a dyn Progress,
    total: u64,
    copied: u64,
    throttle: Throttle<&'a dyn Progress>,
    ended: bool,
}

impl Pieces<'_> {
    /// Passes the next part to `take`; false after the last. Reports the bytes copied so far to `progress`.
    pub fn next(&mut self, take: impl FnOnce(&CopyPiece) -> Result<()>) -> Result<bool> {
        if self.ended {
            return Ok(false);
        }
        self.check()?;
        if let Some(buffer) = self.held.take() {
            // Sending fails if the reader has ended; then it needs no buffer.
            let _ = self.empty.send(buffer);
        }
        let mut piece = match self.full.recv() {
            Ok(Message::CopyPiece(piece)) => piece,
            Ok(Message::Failed(error)) => return Err(error),
            Ok(Message::End) => {
                self.ended = true;
                return Ok(false);
            }
            Err(_) => return Err(Error::new(ErrorKind::Io, "the thread that reads has ended")),
        };
        take(&piece)?;
        let copied = piece.runs.iter().map(|run| run.len() as u64).sum::<u64>();
        self.copied += copied;
        self.progress.update((piece.start + piece.length).min(self.total), self.total);
        self.held = piece.buffer.take();
        if !self.throttle.wait(copied) {
            self.check()?;
        }
        Ok(true)
    }

    /// Returns an error once the conversion is cancelled.
    fn check(&self) -> Result<()> {
        match self.progress.cancelled() {
            true => {
                Err(Error::new(ErrorKind::Interrupted, "the conversion was stopped; nothing of the target is left"))
            }
            false => Ok(()),
        }
    }
}

/// Copies all of a source to a sink; returns the number of bytes that were not zeros.
pub fn copy(source: Box<dyn Source + '_>, mut sink: Box<dyn Sink + '_>, progress: &dyn Progress) -> Result<u64> {
    let total = source.capacity();
    let unit = sink.unit().max(ZERO_UNIT);
    debug_assert!(unit.is_power_of_two() && unit <= PIECE);
    let outcome = thread::scope(|scope| {
        let (to_writer, full) = sync_channel(PIECES);
        let (empty, to_reader) = channel();
        for _ in 0..PIECES {
            // The receiver of the channel exists, so sending cannot fail.
            let _ = empty.send(Buffer::recycled((PIECE / BLOCK_SIZE as u64) as usize));
        }
        let reader = Reader { source, unit, to_writer, to_reader };
        let spawned = thread::Builder::new().name("convert-read".to_owned()).spawn_scoped(scope, || reader.run());
        spawned.map_err(|error| Error::io("starting a thread to read", error))?;
        let throttle = Throttle::new(progress);
        let mut pieces = Pieces { full, empty, held: None, progress, total, copied: 0, throttle, ended: false };
        // Afterwards the ends of the channel are dropped, which makes the reader end.
        sink.fill(&mut pieces).map(|()| pieces.copied)
    });
    match outcome {
        Ok(copied) => sink.finish(progress).map(|()| copied),
        Err(error) => {
            sink.abandon();
            Err(error)
        }
    }
}

/// The reading thread.
struct Reader<'a> {
    source: Box<dyn Source + 'a>,
    unit: u64,
    to_writer: SyncSender<Message>,
    to_reader: Receiver<Buffer>,
}

impl Reader<'_> {
    /// Reads until the end of the source, until an error, or until the writer has ended.
    fn run(mut self) {
        let last = match self.read_all() {
            Ok(()) => Message::End,
            Err(error) => Message::Failed(error),
        };
        // Sending fails only if the writer has ended; then it needs no message.
        let _ = self.to_writer.send(last);
    }

    fn read_all(&mut self) -> Result<()> {
        let capacity = self.source.capacity();
        let mut start = 0;
        while start < capacity {
            let zeros = self.zeros_from(start, capacity)?;
            let piece = match zeros - start {
                // Zeros that fill at least one part, or reach the end of the disk, are passed on without a buffer, cut
                // at the end of a part.
                length if zeros == capacity || length >= PIECE => {
                    let end = if zeros == capacity { capacity } else { zeros / PIECE * PIECE };
                    CopyPiece { start, length: end - start, runs: Vec::new(), buffer: None }
                }
                _ => {
                    let Ok(buffer) = self.to_reader.recv() else { return Ok(()) };
                    self.read_piece(start, (start + PIECE).min(capacity), buffer)?
                }
            };
            start += piece.length;
            if self.to_writer.send(Message::CopyPiece(piece)).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The end of the zeros that begin at `start`, according to the source's map.
    fn zeros_from(&mut self, start: u64, capacity: u64) -> Result<u64> {
        let mut at = start;
        while at < capacity {
            let run = self.next(at, capacity)?;
            if !run.zero {
                break;
            }
            at += run.length;
        }
        Ok(at)
    }

    fn next(&mut self, at: u64, capacity: u64) -> Result<SourceRun> {
        let run = self.source.next(at)?;
        if run.length == 0 {
            return Err(Error::new(ErrorKind::Corrupt, format!("the source's map returns no extent for byte {at}")));
        }
        Ok(SourceRun { length: run.length.min(capacity - at), ..run })
    }

    fn read_piece(&mut self, start: u64, end: u64, mut buffer: Buffer) -> Result<CopyPiece> {
        let length = (end - start) as usize;
        let mut at = start;
        while at < end {
            let run = self.next(at, end)?;
            let part = (at - start) as usize..(at - start + run.length) as usize;
            match run.zero {
                true => buffer[part].fill(0),
                false => self.source.read(at, &mut buffer[part])?,
            }
            at += run.length;
        }
        // Block devices write the last block whole, so its padding is zeroed.
        let padded = length.next_multiple_of(BLOCK_SIZE);
        buffer[length..padded].fill(0);
        // Sinks write whole sectors, also where the source ends within one.
        let sectors = length.next_multiple_of(layer::SECTOR as usize);
        let runs = runs(&buffer[..sectors], self.unit as usize);
        Ok(CopyPiece { start, length: sectors as u64, runs, buffer: Some(buffer) })
    }
}

/// The ranges of `bytes` that are not zeros, in multiples of `unit`; adjacent ranges are joined.
fn runs(bytes: &[u8], unit: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, part) in bytes.chunks(unit).enumerate() {
        if is_zero(part) {
            continue;
        }
        let from = number * unit;
        match runs.last_mut() {
            Some(last) if last.end == from => last.end = from + part.len(),
            _ => runs.push(from..from + part.len()),
        }
    }
    runs
}

/// Whether all bytes are zero. Compares blocks of bytes, which the compiler vectorises, and stops at the first block
/// that is not zero.
fn is_zero(bytes: &[u8]) -> bool {
    const STRIDE: usize = 256;
    let zero = |part: &[u8]| part.iter().fold(0, |sum, byte| sum | byte) == 0;
    bytes.chunks(STRIDE).all(zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_nonzero_ranges() {
        let mut bytes = vec![0; 5 * 4096 + 512];
        assert!(runs(&bytes, 4096).is_empty());
        bytes[4096] = 1;
        bytes[3 * 4096 - 1] = 1;
        assert_eq!(runs(&bytes, 4096), std::slice::from_ref(&(4096..3 * 4096)));
        bytes[5 * 4096 + 511] = 1;
        assert_eq!(runs(&bytes, 4096), [4096..3 * 4096, 5 * 4096..5 * 4096 + 512]);
        assert_eq!(runs(&bytes, 16384), std::slice::from_ref(&(0..5 * 4096 + 512)));
        let length = bytes.len() as u64;
        let piece =
            CopyPiece { start: 1 << 20, length, runs: runs(&bytes, 4096), buffer: Some(Buffer::copy_of(&bytes)) };
        let zeros: Vec<Range<u64>> =
            piece.zeros().map(|range| range.start - (1 << 20)..range.end - (1 << 20)).collect();
        assert_eq!(zeros, [0..4096, 3 * 4096..5 * 4096]);
        assert_eq!(piece.blocks(&piece.runs[1]).len(), 4096);
    }
}
