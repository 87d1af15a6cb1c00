//! Lines of bounded length from a stream.
//!
//! A read that times out or would block loses no bytes: the bytes received so far are kept for the next call.

use std::io::{self, Read};

/// Bytes per read.
const READ_SIZE: usize = 16 << 10;

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
}

impl<R: Read> LineReader<R> {
    /// Reads lines of at most `limit` bytes from `stream`.
    pub fn new(stream: R, limit: usize) -> Self {
        Self { stream, limit, pending: Vec::new(), searched: 0 }
    }

    /// Whether bytes of an incomplete line have been received.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
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
                Ok(count) => self.pending.extend_from_slice(&chunk[..count]),
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
}
