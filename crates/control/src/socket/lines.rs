//! Lines of bounded length from a stream.
//!
//! A read that times out or would block loses no bytes: the bytes received so far are kept for the next call.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes per read.
const READ_SIZE: usize = 16 << 10;

/// Length of an incomplete line up to which it needs no shared memory, so that long lines do not prevent short ones.
const FREE_LENGTH: usize = 64 << 10;

/// The memory of a line that is received is up to this many times its length, because a vector doubles its memory.
const GROWTH: usize = 2;

/// Memory that the incomplete lines of several readers share.
#[derive(Debug)]
pub struct LineMemory {
    most: usize,
    used: AtomicUsize,
}

impl LineMemory {
    /// Memory of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { most, used: AtomicUsize::new(0) }
    }

    /// Takes this many bytes of the memory; false if they are not free.
    fn take(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Result of [`LineReader::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line without its line end.
    Complete(Vec<u8>),
    /// The stream ended; bytes after the last line end were dropped.
    End,
    /// A line exceeds the limit. The stream cannot be used any further.
    TooLong,
}

/// Splits a stream into lines.
pub struct LineReader<R> {
    stream: R,
    limit: usize,
    pending: Vec<u8>,
    /// Number of bytes of `pending` that are known to contain no line end.
    searched: usize,
    memory: Option<Arc<LineMemory>>,
    /// Bytes of `memory` that `pending` has.
    taken: usize,
}

impl<R> Drop for LineReader<R> {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            memory.give_back(self.taken);
        }
    }
}

impl<R: Read> LineReader<R> {
    /// Reads lines of at most `limit` bytes from `stream`.
    pub fn new(stream: R, limit: usize) -> Self {
        Self { stream, limit, pending: Vec::new(), searched: 0, memory: None, taken: 0 }
    }

    /// As [`LineReader::new`], with memory that other readers use too. If a line needs more than is free,
    /// [`LineReader::next`] returns an error of the kind `OutOfMemory`, and the stream cannot be used any further.
    pub fn sharing(stream: R, limit: usize, memory: &Arc<LineMemory>) -> Self {
        let mut reader = Self::new(stream, limit);
        reader.memory = Some(Arc::clone(memory));
        reader
    }

    /// Takes or gives back shared memory, so that it suffices for `length` pending bytes; false if it is not free.
    fn share(&mut self, length: usize) -> bool {
        let Some(memory) = &self.memory else { return true };
        let needed = length.saturating_sub(FREE_LENGTH).saturating_mul(GROWTH);
        if needed > self.taken && !memory.take(needed - self.taken) {
            return false;
        }
        memory.give_back(self.taken.saturating_sub(needed));
        self.taken = needed;
        true
    }

    /// Whether bytes of an incomplete line have been received.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether a complete line has been received, so that [`LineReader::next`] returns without reading.
    pub fn has_line(&self) -> bool {
        self.pending[self.searched..].contains(&b'\n')
    }

    /// The stream from which the lines are read.
    pub fn stream(&self) -> &R {
        &self.stream
    }

    /// The next line, if it has been received completely.
    fn take(&mut self) -> Option<Line> {
        match self.pending[self.searched..].iter().position(|b| *b == b'\n') {
            Some(at) => {
                let end = self.searched + at;
                let rest = self.pending.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.pending, rest);
                line.truncate(end);
                self.searched = 0;
                self.share(self.pending.len());
                Some(if line.len() > self.limit { Line::TooLong } else { Line::Complete(line) })
            }
            None => {
                self.searched = self.pending.len();
                (self.searched > self.limit).then_some(Line::TooLong)
            }
        }
    }

    /// The next line.
    pub fn next(&mut self) -> io::Result<Line> {
        loop {
            if let Some(line) = self.take() {
                return Ok(line);
            }
            let mut chunk = [0; READ_SIZE];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(Line::End),
                Ok(count) if self.share(self.pending.len() + count) => self.pending.extend_from_slice(&chunk[..count]),
                Ok(_) => return Err(io::ErrorKind::OutOfMemory.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A stream that returns its bytes in pieces, with a timeout between them.
    struct Pieces {
        bytes: Vec<u8>,
        piece: usize,
        due: bool,
    }

    impl Read for Pieces {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.due = !self.due;
            if self.due {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = self.piece.min(self.bytes.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes.drain(..count);
            Ok(count)
        }
    }

    fn lines(bytes: &[u8], piece: usize, limit: usize) -> Vec<Line> {
        let mut reader = LineReader::new(Pieces { bytes: bytes.to_vec(), piece, due: false }, limit);
        let mut out = Vec::new();
        loop {
            match reader.next() {
                Ok(line) => {
                    let more = matches!(line, Line::Complete(_));
                    out.push(line);
                    if !more {
                        return out;
                    }
                }
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn lines_do_not_depend_on_how_their_bytes_are_split() {
        for piece in 1..40 {
            let complete = |text: &str| Line::Complete(text.into());
            assert_eq!(
                lines(b"one\n\nthree three\nrest", piece, 11),
                [complete("one"), complete(""), complete("three three"), Line::End]
            );
            assert_eq!(lines(b"one\nthree three\n", piece, 10), [complete("one"), Line::TooLong]);
            assert_eq!(lines(&[b'x'; 1000], piece, 10), [Line::TooLong]);
        }
    }

    #[test]
    fn a_line_without_end_takes_bounded_memory() {
        let mut reader = LineReader::new(io::repeat(b'x'), 1 << 20);
        assert_eq!(reader.next().unwrap(), Line::TooLong);
        assert!(reader.pending.len() <= (1 << 20) + READ_SIZE);
    }

    #[test]
    fn incomplete_lines_share_their_memory() {
        let memory = Arc::new(LineMemory::new(8 << 20));
        let long = |length: usize| LineReader::sharing(io::repeat(b'x').take(length as u64), 16 << 20, &memory);
        let mut first = long(3 << 20);
        assert_eq!(first.next().unwrap(), Line::End);
        let mut second = long(3 << 20);
        assert_eq!(second.next().unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        // A short line needs none of the memory.
        let mut short = LineReader::sharing(&b"short\n"[..], 16 << 20, &memory);
        assert_eq!(short.next().unwrap(), Line::Complete(b"short".to_vec()));
        drop((first, second));
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
        // A complete line gives its memory back.
        let text = [vec![b'x'; 3 << 20], b"\nrest".to_vec()].concat();
        let mut third = LineReader::sharing(&text[..], 16 << 20, &memory);
        assert!(matches!(third.next().unwrap(), Line::Complete(line) if line.len() == 3 << 20));
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }
}
