//! The operations that are tested with every client on a small disk, and the content of the disk afterwards.

/// Capacity of the disk on which a client carries out an operation.
pub const SIZE: usize = 4 << 20;

/// Content of the disk before any operation: two runs of one byte value each, then a hole.
const FIRST: (usize, u8) = (1 << 20, 0x11);
const SECOND: (usize, u8) = (1 << 20, 0x22);

/// First byte of the hole after the initial data.
pub const DATA_END: usize = FIRST.0 + SECOND.0;

/// Value of the bytes that operations write.
pub const WRITTEN: u8 = 0x33;

/// Style of requests and replies on the connection to lamina.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Simple,
    Structured,
    Extended,
}

pub const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// An operation of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Fua,
    Trim,
    Zero,
    FastZero,
    BlockStatus,
    Cache,
    Resize,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Fua => "FUA",
            Self::Trim => "trim",
            Self::Zero => "zero",
            Self::FastZero => "fast zero",
            Self::BlockStatus => "block status",
            Self::Cache => "cache",
            Self::Resize => "resize",
        }
    }

    /// Offset and length of the operation.
    pub fn range(self) -> (usize, usize) {
        match self {
            Self::Read | Self::BlockStatus => (0, SIZE),
            // The range crosses the end of the first run, and its length is not a multiple of a block.
            Self::Write | Self::Fua => (FIRST.0 - 1024, (64 << 10) + 512),
            Self::Trim => (128 << 10, 64 << 10),
            Self::Zero => (FIRST.0 - 1000, 70_000),
            Self::FastZero => (256 << 10, 128 << 10),
            Self::Cache => (0, 1 << 20),
            Self::Resize => (0, SIZE),
        }
    }

    /// All bytes of the disk after the operation.
    pub fn content(self) -> Vec<u8> {
        let mut content = base();
        let (offset, length) = self.range();
        let changed = &mut content[offset..offset + length];
        match self {
            Self::Write | Self::Fua => changed.fill(WRITTEN),
            Self::Trim | Self::Zero | Self::FastZero => changed.fill(0),
            Self::Read | Self::BlockStatus | Self::Cache | Self::Resize => (),
        }
        content
    }
}

/// All bytes of the disk before any operation.
pub fn base() -> Vec<u8> {
    let mut content = vec![0; SIZE];
    content[..FIRST.0].fill(FIRST.1);
    content[FIRST.0..DATA_END].fill(SECOND.1);
    content
}
