//! A view: the metadata as a checkpoint wrote it. Checks and counts of space read a view without locks while the store
//! is in use.
//!
//! After a checkpoint the files of the pages hold the state of one moment: trees, reference counts and catalog agree
//! exactly. While a view exists, pages that later checkpoints overwrite are copied first ([`crate::pages::Kept`]), so
//! that the view keeps this state. The view has its own page cache, so that it does not evict pages that requests use.

use super::{Effects, Meta, Metadata, Nodes};
use crate::Result;
use crate::catalog::Catalog;
use crate::engine::inspect::StoreCounts;
use crate::engine::log::Superblock;
use crate::engine::placement::Holds;
use crate::pages::{Keeping, PageKey, Pages};
use crate::space::{BlockEntry, Space, SpaceKind};
use backend::Block;
use std::sync::Arc;

/// Limit of the page cache of a view (16 MiB): enough for the upper levels of the trees.
const CACHE: usize = 16 << 20;

/// The metadata that a check reads: a view, or the metadata in memory while nothing changes it.
pub(crate) struct Sight<'a> {
    pub pages: &'a mut Pages,
    pub map: &'a mut Space,
    pub data: &'a mut Space,
    pub catalog: &'a Catalog,
    pub holds: &'a Holds,
}

impl Sight<'_> {
    /// Access to the trees, for reading.
    pub fn nodes<'a>(&'a mut self, effects: &'a mut Effects) -> Nodes<'a> {
        Nodes { pages: self.pages, map: self.map, data: self.data, holds: self.holds, effects }
    }

    /// The table entry of a data block.
    pub fn entry(&mut self, block: u64) -> Result<BlockEntry> {
        self.data.entry(self.pages, block)
    }
}

/// The metadata as a checkpoint wrote it.
pub(crate) struct View {
    pages: Pages,
    map: Space,
    data: Space,
    catalog: Catalog,
    /// Empty: no change is pending in the state that a checkpoint wrote.
    holds: Holds,
    /// The sizes of the store when the checkpoint captured the metadata.
    pub counts: StoreCounts,
    keeping: Keeping,
}

impl View {
    pub fn sight(&mut self) -> Sight<'_> {
        Sight {
            pages: &mut self.pages,
            map: &mut self.map,
            data: &mut self.data,
            catalog: &self.catalog,
            holds: &self.holds,
        }
    }

    /// The catalog of the view.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Fails if a page of the view was lost.
    pub fn check(&self) -> Result<()> {
        self.keeping.check()
    }
}

impl Metadata {
    /// Makes a view of the state that the last checkpoint wrote. `superblock` is the superblock of that checkpoint,
    /// `catalog` and `counts` are the results of [`Meta::take_view`]. Called before the next checkpoint begins, so that
    /// no page is overwritten yet.
    pub fn view(&self, superblock: &Superblock, (catalog, counts): (Catalog, StoreCounts)) -> View {
        let keeping = self.kept.begin();
        View {
            pages: Pages::as_kept(self.files.clone(), CACHE, Arc::clone(keeping.pages())),
            map: Space::table_only(SpaceKind::Map, superblock.record.map_regions),
            data: Space::table_only(SpaceKind::Data, superblock.record.data_regions),
            catalog,
            holds: Holds::default(),
            counts,
            keeping,
        }
    }

    /// Called before a checkpoint overwrites pages: copies those that a view still needs.
    pub fn keep_home(&self, pages: &[(PageKey, Arc<Block>)]) {
        for group in pages.chunk_by(|(a, _), (b, _)| a.file() == b.file()) {
            let file = self.file(group[0].0.file());
            self.kept.keep(file, &mut group.iter().map(|(key, _)| *key));
        }
    }
}

impl Meta {
    /// The metadata in memory, for a check. Nothing may change the metadata during the check.
    pub(crate) fn sight(&mut self) -> Sight<'_> {
        Sight {
            pages: &mut self.pages,
            map: &mut self.map,
            data: &mut self.data,
            catalog: &self.catalog,
            holds: &self.holds,
        }
    }

    /// Requests that the next checkpoint captures the catalog and the counts for a view.
    pub fn want_view(&mut self) {
        self.viewed = Some(Default::default());
    }

    /// The catalog and the counts that the checkpoint captured for a view.
    pub fn take_view(&mut self) -> (Catalog, StoreCounts) {
        self.viewed.take().unwrap_or_default()
    }

    /// Captures the catalog and the counts if a view was requested. Called when a checkpoint captures the pages.
    pub(crate) fn note_view(&mut self) {
        if self.viewed.is_some() {
            self.viewed = Some((self.catalog.clone(), self.counts()));
        }
    }
}
