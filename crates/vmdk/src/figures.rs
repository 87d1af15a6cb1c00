//! Statistics of a disk for users, and its tunables.

use crate::disk::Disk;
use crate::record::{ImageOwnership, Tunables};
use crate::{DeltaFormat, Result};
use chain::Statistics;
use layer::Usage;
use layer::flat::{Counters, Provisioning};
use layer::image::{ImageKind, Place};
use std::sync::Arc;

/// Changes of tunables; `None` keeps the present value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    /// The most extents in the metadata cache.
    pub metadata_entries: Option<usize>,
    /// Bytes around a cache miss that are looked up with it.
    pub prefetch: Option<u64>,
    /// The most extents that one prefetch inserts into the metadata cache.
    pub prefetch_extents: Option<usize>,
    /// Bytes of the read cache; 0 for none.
    pub read_cache: Option<u64>,
    /// The most levels of the chain.
    pub levels_max: Option<usize>,
}

/// A file of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The file's path, or its name on a medium without paths.
    pub path: String,
    /// The ownership of the file's image.
    pub standing: ImageOwnership,
    /// The image to which the file belongs.
    pub node: u32,
}

/// Information about a disk.
#[derive(Clone, Debug)]
pub struct Info {
    /// Name of the disk.
    pub name: String,
    /// The UUID of the disk.
    pub uuid: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Kind of the base, as named by option `-d`.
    pub kind: String,
    /// Format of new deltas.
    pub delta: DeltaFormat,
    /// Provisioning type of the base; `None` if it has none.
    pub provisioning: Option<Provisioning>,
    /// VMware's counters `nb` and `tbz`, if the base is flat.
    pub counters: Option<Counters>,
    /// Number of contiguous runs of the flat base on the device, if known.
    pub fragments: Option<u64>,
    /// Levels of the head's chain.
    pub levels: usize,
    /// The most levels that the chain may have.
    pub levels_max: usize,
    /// Formats of the levels, newest first.
    pub formats: Vec<&'static str>,
    /// Files of all images, other branches included.
    pub files: Vec<FileInfo>,
    /// Time of creation: seconds since 1970.
    pub created: u64,
    /// Space used by the head's chain.
    pub usage: Usage,
    /// The snapshot from which the disk was cloned, as `disk@snapshot`.
    pub origin: Option<String>,
    /// Images that no snapshot needs and that could be merged: VMware's "consolidation needed".
    pub redundant: usize,
}

impl Disk {
    /// Information about the disk and its files.
    pub fn info(&self) -> Result<Info> {
        let line = self.head_line()?;
        let record = self.record();
        let levels = line.levels();
        let base = levels.last().map(|level| Arc::clone(&level.image));
        let mut usage = Usage::default();
        for level in &levels {
            let of = level.image.layer().usage()?;
            usage.allocated += of.allocated;
            usage.mapped += of.mapped;
            usage.dead += of.dead;
        }
        let mut files = Vec::new();
        for node in &record.nodes {
            for file in self.files(&record, node) {
                let path = match self.folder(&record, file.folder.as_deref()) {
                    Ok(folder) => Place { folder, name: file.name }.label(),
                    Err(_) => file.name,
                };
                files.push(FileInfo { path, standing: node.standing, node: node.id });
            }
        }
        let kind = base.as_ref().and_then(|image| ImageKind::of(image)).map(|kind| kind.name().to_owned());
        Ok(Info {
            capacity: line.chain.capacity(),
            kind: kind.unwrap_or_else(|| record.kind.clone()),
            delta: record.delta,
            provisioning: base.as_ref().and_then(|image| image.provisioning()),
            counters: base.as_ref().and_then(|image| image.counters()),
            fragments: base.as_ref().map_or(Ok(None), |image| image.fragments())?,
            levels: levels.len(),
            levels_max: record.tunables.levels_max,
            formats: levels.iter().map(|level| level.image.layer().format()).collect(),
            files,
            created: record.created,
            usage,
            origin: record.origin.as_ref().map(|origin| format!("{}@{}", origin.disk, origin.snapshot)),
            redundant: self.redundant(&record).len(),
            name: record.name,
            uuid: record.uuid,
        })
    }

    /// Statistics of the head's chain.
    pub fn statistics(&self) -> Statistics {
        self.open_head().map(|line| line.chain.statistics()).unwrap_or_default()
    }

    /// Changes tunables of the open chain, at once, and in the record.
    pub fn tune(&self, tuning: &Tuning) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin("tuning")?;
            let mut record = self.record();
            let now = &mut record.tunables;
            let Tunables { metadata_entries, prefetch, prefetch_extents, read_cache, levels_max } = *now;
            *now = Tunables {
                metadata_entries: tuning.metadata_entries.unwrap_or(metadata_entries),
                prefetch: tuning.prefetch.unwrap_or(prefetch),
                prefetch_extents: tuning.prefetch_extents.unwrap_or(prefetch_extents),
                read_cache: tuning.read_cache.unwrap_or(read_cache),
                levels_max: tuning.levels_max.unwrap_or(levels_max),
            };
            let now = *now;
            // The chain checks the values before the record is changed.
            let chain = self.head_line()?;
            let chain = &chain.chain;
            chain.set_tunables(chain::Tunables {
                entries: now.metadata_entries,
                prefetch_bytes: now.prefetch,
                prefetch_extents: now.prefetch_extents,
            })?;
            chain.set_data_cache(now.read_cache)?;
            chain.set_levels_max(now.levels_max)?;
            self.commit(record)
        })
    }
}
