//! The receive buffer of a connection.

use super::limits::{INBOX_BYTES, INBOX_BYTES_STREAMING};

/// Received bytes that are not decoded yet. The size is fixed; a message that must be complete to be decoded is far
/// shorter.
pub struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// An empty buffer.
    pub fn new() -> Self {
        Self { bytes: vec![0; INBOX_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The received bytes.
    pub fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Drops `count` bytes from the front.
    pub fn consume(&mut self, count: usize) {
        self.start += count.min(self.end - self.start);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Free space to receive into, limited while `streaming`. Empty only if the buffer is full of bytes that are not
    /// consumed.
    pub fn space(&mut self, streaming: bool) -> &mut [u8] {
        // Moving the remaining bytes to the front costs a copy, so it is done only when the space behind them gets
        // small.
        if self.start > 0 && self.bytes.len() - self.end < self.bytes.len() / 4 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = self.bytes.len() - self.end;
        let room = if streaming { room.min(INBOX_BYTES_STREAMING) } else { room };
        &mut self.bytes[self.end..self.end + room]
    }

    /// Records that `count` bytes were received into [`Inbox::space`].
    pub fn received(&mut self, count: usize) {
        self.end += count.min(self.bytes.len() - self.end);
    }
}
