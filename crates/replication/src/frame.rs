//! Frames: a header of 32 bytes, followed by a payload whose length is in the header.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic `LMRP` |
//! | 4 | 2 | kind |
//! | 6 | 2 | disk: its index in the offer; 0 in messages |
//! | 8 | 8 | offset in bytes; the number of the segment at a segment's end; 0 in messages |
//! | 16 | 4 | length of the payload |
//! | 20 | 4 | CRC32C of the payload |
//! | 24 | 4 | zero |
//! | 28 | 4 | CRC32C of the 28 bytes before |
//!
//! Numbers are little-endian.

use crate::limits::{MESSAGE_MAX, PIECE_MAX};
use checksums::checksum;
use error::{Error, ErrorKind, Result};

/// Bytes of a header.
pub const HEAD: usize = 32;

const MAGIC: [u8; 4] = *b"LMRP";

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message, as JSON.
    Message,
    /// Data of a disk, at an offset.
    Data,
    /// Zeros of a disk, at an offset. The payload is the length of the range, eight bytes.
    Zero,
    /// A segment of a disk is complete. The payload is the sum of the lengths of its data, eight bytes.
    Segment,
    /// No further frames are sent on this connection.
    End,
}

const KINDS: [(Kind, u16); 5] =
    [(Kind::Message, 1), (Kind::Data, 2), (Kind::Zero, 3), (Kind::Segment, 4), (Kind::End, 5)];

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The kind of the frame.
    pub kind: Kind,
    /// The index of the disk.
    pub disk: u16,
    /// Byte offset; in a `Segment` frame the number of the segment.
    pub offset: u64,
    /// Bytes of payload.
    pub length: u32,
    /// Checksum of the payload.
    pub checksum: u32,
}

fn malformed(what: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("the peer sent {what}: the peer is not lamina, or the connection corrupts data"),
    )
}

impl Head {
    /// The header of a frame with that payload.
    pub fn of(kind: Kind, disk: u16, offset: u64, payload: &[u8]) -> Self {
        Self { kind, disk, offset, length: payload.len() as u32, checksum: checksum(payload) }
    }

    /// The encoded header.
    pub fn encode(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        let kind = KINDS.iter().find(|(kind, _)| *kind == self.kind).map_or(0, |(_, code)| *code);
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&kind.to_le_bytes());
        out[6..8].copy_from_slice(&self.disk.to_le_bytes());
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..20].copy_from_slice(&self.length.to_le_bytes());
        out[20..24].copy_from_slice(&self.checksum.to_le_bytes());
        let sum = checksum(&out[..28]);
        out[28..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes a header, and checks it against the limits of its kind.
    pub fn decode(bytes: &[u8; HEAD]) -> Result<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[..4] != MAGIC {
            return Err(malformed("bytes that are not a frame"));
        }
        if word(28) != checksum(&bytes[..28]) {
            return Err(malformed("a head that fails its checksum"));
        }
        let code = half(4);
        let kind = KINDS.iter().find(|(_, known)| *known == code).map(|(kind, _)| *kind);
        let kind = kind.ok_or_else(|| malformed(&format!("a frame of the unknown kind {code}")))?;
        let offset = u64::from(word(8)) | u64::from(word(12)) << 32;
        let head = Self { kind, disk: half(6), offset, length: word(16), checksum: word(20) };
        let length = head.length as usize;
        let fits = match kind {
            Kind::Message => head.disk == 0 && offset == 0 && (1..=MESSAGE_MAX).contains(&length),
            Kind::Data => (1..=PIECE_MAX).contains(&length),
            Kind::Zero | Kind::Segment => length == 8,
            Kind::End => head.disk == 0 && offset == 0 && length == 0,
        };
        match fits && word(24) == 0 {
            true => Ok(head),
            false => Err(malformed(&format!("an invalid frame: {kind:?} of {length} bytes at {offset}"))),
        }
    }

    /// Checks the payload against the checksum in the header.
    pub fn verify(&self, payload: &[u8]) -> Result<()> {
        self.verify_sum(payload.len(), checksum(payload))
    }

    /// Checks length and checksum of a payload.
    pub fn verify_sum(&self, length: usize, sum: u32) -> Result<()> {
        match length == self.length as usize && sum == self.checksum {
            true => Ok(()),
            false => Err(malformed("a payload that fails its checksum")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn frame_heads_are_decoded_as_encoded_and_damage_is_detected() {
        for (kind, length) in
            [(Kind::Message, 7), (Kind::Data, 4096), (Kind::Zero, 8), (Kind::Segment, 8), (Kind::End, 0)]
        {
            let payload = vec![3; length];
            let plain = matches!(kind, Kind::Message | Kind::End);
            let (disk, offset) = if plain { (0, 0) } else { (5, 1 << 40) };
            let head = Head::of(kind, disk, offset, &payload);
            let bytes = head.encode();
            assert_eq!(Head::decode(&bytes).unwrap(), head);
            head.verify(&payload).unwrap();
            for at in 0..HEAD {
                let mut bad = bytes;
                bad[at] ^= 0x10;
                assert_eq!(Head::decode(&bad).unwrap_err().kind(), ErrorKind::Corrupt, "byte {at}");
            }
            if length > 0 {
                let mut bad = payload.clone();
                bad[length - 1] ^= 1;
                assert!(head.verify(&bad).is_err());
            }
        }
    }

    #[test]
    fn frames_with_lengths_out_of_bounds_are_refused() {
        let base = Head { kind: Kind::Data, disk: 0, offset: 0, length: 1, checksum: 0 };
        for head in [
            Head { length: 0, ..base },
            Head { length: PIECE_MAX as u32 + 1, ..base },
            Head { kind: Kind::Message, length: MESSAGE_MAX as u32 + 1, ..base },
            Head { kind: Kind::Message, disk: 1, ..base },
            Head { kind: Kind::Zero, length: 7, ..base },
            Head { kind: Kind::End, length: 1, ..base },
        ] {
            assert!(Head::decode(&head.encode()).is_err(), "{head:?}");
        }
    }

    #[test]
    fn the_protocol_page_describes_the_layout_of_frames() {
        let page = include_str!("../../../docs/protocol/replication.md");
        let here = include_str!("frame.rs");
        for line in here.lines().filter_map(|line| line.strip_prefix("//! |")).map(|line| format!("|{line}")) {
            assert!(page.contains(&line), "docs/protocol/replication.md lacks: {line}");
        }
    }
}
