//! Layers of the real formats, with their files in any directory.

use backend::{Directory, IoMode};
use error::{IoContext, Result};
use layer::Layer;
use layer::flat::{Flat, FlatOptions};
use layer::sesparse::{self, SeSparse};
use layer::vmfssparse::{self, VmfsSparse};
use layer::vsansparse::{self, VsanSparse};
use std::sync::Arc;

/// The formats of levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Flat,
    VmfsSparse,
    SeSparse,
    VsanSparse,
}

impl Format {
    /// The delta formats.
    pub const DELTAS: [Self; 3] = [Self::VmfsSparse, Self::SeSparse, Self::VsanSparse];

    /// Creates an empty image, durable except for its name, and opens it for writing.
    pub fn create(self, directory: &dyn Directory, name: &str, capacity: u64, mode: IoMode) -> Result<Arc<dyn Layer>> {
        let context = || format!("making {name}");
        let file = directory.create(name, mode).during(context)?;
        match self {
            Self::Flat => {
                file.set_len(capacity).during(context)?;
                file.sync().during(context)?;
            }
            Self::VmfsSparse => vmfssparse::create(file, name, &vmfssparse::CreateOptions::new(capacity))?,
            Self::SeSparse => {
                let options = sesparse::Options { write: true, ..sesparse::Options::default() };
                SeSparse::create(file, name, capacity, options)?.close()?;
            }
            Self::VsanSparse => {
                let mut id = [0; 16];
                id.iter_mut().zip(name.bytes().rev()).for_each(|(byte, letter)| *byte = letter);
                vsansparse::create(file, name, &vsansparse::CreateOptions { capacity, id })?;
            }
        }
        self.open(directory, name, mode, true)
    }

    /// Opens an image that is a delta over other images.
    pub fn open(self, directory: &dyn Directory, name: &str, mode: IoMode, writable: bool) -> Result<Arc<dyn Layer>> {
        let file = directory.open(name, mode).during(|| format!("opening {name}"))?;
        Ok(match self {
            Self::Flat => Flat::open(file, name, FlatOptions { offset: 0, capacity: None, writable, thin: true })?,
            Self::VmfsSparse => {
                let options = vmfssparse::OpenOptions { writable, ..vmfssparse::OpenOptions::reading(name) };
                Arc::new(VmfsSparse::open(file, &options)?)
            }
            Self::SeSparse => {
                let options = sesparse::Options { write: writable, ..sesparse::Options::default() };
                Arc::new(SeSparse::open(file, name, options)?)
            }
            Self::VsanSparse => {
                let options = vsansparse::OpenOptions { writable, ..vsansparse::OpenOptions::reading(name) };
                Arc::new(VsanSparse::open(file, &options)?)
            }
        })
    }
}
