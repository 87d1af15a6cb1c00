//! Options for opening VMFSsparse and vsanSparse images.

/// The default memory for the mapping of one image: 8 MiB are enough for a million fragments.
pub const CACHE_BYTES: usize = 8 << 20;

/// Options for opening an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The name of the image in messages.
    pub image: String,
    /// Whether the image is opened for writing.
    pub writable: bool,
    /// Whether ranges that the image does not store are read from a parent. Without a parent, zeros need no entry.
    pub parent: bool,
    /// Bytes of memory for cached parts of the mapping.
    pub cache_bytes: usize,
    /// Whether an image that is opened for reading is opened although a part of its directory or root is lost: reading
    /// the ranges of that part fails.
    pub salvage: bool,
}

impl OpenOptions {
    /// Options for reading an image over a parent.
    pub fn reading(image: impl Into<String>) -> Self {
        Self { image: image.into(), writable: false, parent: true, cache_bytes: CACHE_BYTES, salvage: false }
    }

    /// Options for writing an image over a parent.
    pub fn writing(image: impl Into<String>) -> Self {
        Self { writable: true, ..Self::reading(image) }
    }
}
