//! Shared by the fuzz targets: an input that is consumed piece by piece; a small datastore; and images of VMware's
//! formats ([`files`], [`images`]), for which [`layers`] checks what must hold after any damage.

#![forbid(unsafe_code)]

pub mod files;
pub mod images;
pub mod layers;

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, IoMode};
use std::sync::Arc;
use std::sync::OnceLock;
use store::EngineOptions;

/// An input, consumed from the front. Past its end all bytes are zero.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next bytes, at most `count`.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(count.min(self.0.len()));
        self.0 = left;
        taken
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// The next `count` bytes, at most eight, as a little-endian number.
    pub fn word(&mut self, count: usize) -> u64 {
        self.bytes(count).iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Whether the input is consumed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Sets the CRC32C of `bytes`, computed with the field at `at` as zero, in that field.
pub fn seal(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let sum = checksums::checksum(bytes);
    bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Sets the right checksums of every batch head in a ring, and of the body after it.
pub fn seal_batches(ring: &mut [u8]) {
    for at in (0..ring.len()).step_by(4096) {
        if ring[at..].starts_with(b"LMJB") {
            let length = u32::from_le_bytes(ring[at + 40..at + 44].try_into().expect("four bytes")) as usize;
            if let Some(batch) = ring.get_mut(at..at + 64 + length) {
                seal(batch, 60);
            }
        }
    }
}

/// A file of the stored datastore: its name, its length, and its nonzero parts.
type ImageFile = (&'static str, u64, Vec<(u64, Vec<u8>)>);

/// A small datastore in format version 1, as made by `crates/store/tests/golden.rs`.
pub struct Image(Vec<ImageFile>);

impl Image {
    /// The datastore after it was closed cleanly.
    pub fn closed() -> &'static Self {
        static IMAGE: OnceLock<Image> = OnceLock::new();
        IMAGE.get_or_init(|| Self::parse(include_str!("../../crates/store/tests/golden/v1-closed.image")))
    }

    /// The datastore after a crash: the journal has to be replayed.
    pub fn crashed() -> &'static Self {
        static IMAGE: OnceLock<Image> = OnceLock::new();
        IMAGE.get_or_init(|| Self::parse(include_str!("../../crates/store/tests/golden/v1-crashed.image")))
    }

    fn parse(text: &'static str) -> Self {
        let mut files: Vec<ImageFile> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split(' ').collect();
            if let ["file", name, length] = words[..] {
                files.push((name, length.parse().expect("the length is a number"), Vec::new()));
                continue;
            }
            let at = u64::from_str_radix(words[0], 16).expect("the offset is a number");
            let byte = |i| u8::from_str_radix(&words[1][i..i + 2], 16).expect("the byte is a number");
            let bytes: Vec<u8> = (0..words[1].len()).step_by(2).map(byte).collect();
            let (_, _, parts) = files.last_mut().expect("a file precedes its bytes");
            match parts.last_mut() {
                Some((start, part)) if *start + part.len() as u64 == at => part.extend(bytes),
                _ => parts.push((at, bytes)),
            }
        }
        Self(files)
    }

    /// Names and lengths of the datastore's files.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, length, _)| (*name, *length))
    }

    /// A simulated disk with these files.
    pub fn restore(&self) -> SimulatedDisk {
        let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        let directory = disk.directory();
        for (name, length, parts) in &self.0 {
            let file = directory.create(name, IoMode::Buffered).expect("a new disk accepts new files");
            file.set_len(*length).expect("a new disk accepts new files");
            for (at, bytes) in parts {
                file.write_at(&[bytes], *at, false).expect("a new disk accepts writes");
            }
        }
        disk
    }
}

/// An engine with little memory that runs its background work on the calling thread.
pub fn options() -> EngineOptions {
    EngineOptions { metadata_cache: 2 << 20, write_buffer: 1 << 20, threads: false, ..EngineOptions::default() }
}

/// Overwrites bytes of a file, up to its end.
pub fn overwrite(directory: &Arc<dyn Directory>, name: &str, at: u64, bytes: &[u8]) {
    if let Ok(file) = directory.open(name, IoMode::Buffered) {
        let length = file.len().unwrap_or(0);
        let count = bytes.len().min(length.saturating_sub(at) as usize);
        let _ = file.write_at(&[&bytes[..count]], at, false);
    }
}
