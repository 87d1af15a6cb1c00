//! What a redo log and a delta object have alike when they are opened.

/// Memory for the mapping of one image, unless told otherwise: 8 MiB are a million fragments.
pub const CACHE_BYTES: usize = 8 << 20;

/// How an image is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What messages call the image.
    pub image: String,
    /// Open it for writing.
    pub writable: bool,
    /// A parent shows through where the image has nothing. Without one, zeros need no entry.
    pub parent: bool,
    /// Bytes of memory for parts of the mapping that can be read again.
    pub cache_bytes: usize,
}

impl OpenOptions {
    /// For reading an image over a parent.
    pub fn reading(image: impl Into<String>) -> Self {
        Self { image: image.into(), writable: false, parent: true, cache_bytes: CACHE_BYTES }
    }

    /// For writing an image over a parent.
    pub fn writing(image: impl Into<String>) -> Self {
        Self { writable: true, ..Self::reading(image) }
    }
}
