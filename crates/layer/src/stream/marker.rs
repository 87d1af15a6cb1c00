//! Markers: a sector, or its first bytes, before every part of a stream.

/// Bytes of a marker before the compressed data of a grain.
pub(super) const GRAIN_MARKER_SIZE: usize = 12;

/// The kinds of markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// Compressed data follows directly.
    Grain {
        /// First sector of the grain, counted in the content of the extent, not in the file.
        sector: u64,
        /// Bytes of compressed data.
        size: u32,
    },
    /// The last sector of a stream.
    End,
    /// `sectors` sectors of metadata follow the marker's sector.
    Metadata {
        /// The kind of the metadata.
        kind: Kind,
        /// The number of sectors of metadata.
        sectors: u64,
    },
}

/// Kinds of metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A grain table.
    Table = 1,
    /// The grain directory.
    Directory = 2,
    /// The footer.
    Footer = 3,
    /// A progress mark of the writer.
    Progress = 4,
}

impl Marker {
    /// Reads a marker; `None` if the bytes are not one.
    pub(super) fn decode(bytes: &[u8; 16]) -> Option<Self> {
        let value = u64::from_le_bytes(bytes[..8].try_into().ok()?);
        let size = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
        if size != 0 {
            return Some(Self::Grain { sector: value, size });
        }
        let kind = match u32::from_le_bytes(bytes[12..].try_into().ok()?) {
            0 => return Some(Self::End),
            1 => Kind::Table,
            2 => Kind::Directory,
            3 => Kind::Footer,
            4 => Kind::Progress,
            _ => return None,
        };
        Some(Self::Metadata { kind, sectors: value })
    }

    /// Encodes a marker; for a grain, only the first [`GRAIN_MARKER_SIZE`] bytes are used.
    pub(super) fn encode(&self) -> [u8; 16] {
        let (value, size, kind) = match *self {
            Self::Grain { sector, size } => (sector, size, 0),
            Self::End => (0, 0, 0),
            Self::Metadata { kind, sectors } => (sectors, 0, kind as u32),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&value.to_le_bytes());
        bytes[8..12].copy_from_slice(&size.to_le_bytes());
        bytes[12..].copy_from_slice(&kind.to_le_bytes());
        bytes
    }
}
