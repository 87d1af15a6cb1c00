//! The metadata as a checkpoint left it, to be read without locks while the store is in use.
//!
//! A checkpoint leaves the files of the pages in the state of one moment: trees, reference counts and the catalog,
//! which is captured with them, agree exactly. Pages that later checkpoints are about to overwrite are kept for the
//! view ([`crate::pages::Kept`]), so that it remains that state as long as it exists. It has a page cache of its own:
//! the pages in memory for requests stay there, and the view reads from the medium.

use super::{Effects, Meta, Metadata, Nodes};
use crate::Result;
use crate::catalog::Catalog;
use crate::engine::log::Superblock;
use crate::engine::placement::Holds;
use crate::pages::{Keeping, PageKey, Pages};
use crate::space::{BlockEntry, Space, SpaceKind};
use backend::Block;
use std::sync::Arc;

/// Limit of the page cache of a view (16 MiB): enough for the upper levels of the trees.
const CACHE: usize = 16 << 20;

/// Metadata that a check reads: a view, or the metadata in memory while nothing changes it.
pub(crate) struct Sight<'a> {
    pub pages: &'a mut Pages,
    pub map: &'a mut Space,
    pub data: &'a mut Space,
    pub catalog: &'a Catalog,
    pub holds: &'a Holds,
}

impl Sight<'_> {
    /// The trees, for reading.
    pub fn nodes<'a>(&'a mut self, effects: &'a mut Effects) -> Nodes<'a> {
        Nodes { pages: self.pages, map: self.map, data: self.data, holds: self.holds, effects }
    }

    /// The table entry of a data block.
    pub fn entry(&mut self, block: u64) -> Result<BlockEntry> {
        self.data.entry(self.pages, block)
    }
}

/// The store as a checkpoint left it.
pub(crate) struct View {
    pages: Pages,
    map: Space,
    data: Space,
    catalog: Catalog,
    /// None, because no change is pending in the state that a checkpoint left.
    holds: Holds,
    /// Data blocks in use.
    pub used: u64,
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

    /// Fails if a part of the view was lost.
    pub fn check(&self) -> Result<()> {
        self.keeping.check()
    }
}

impl Metadata {
    /// The state that the checkpoint which has just ended left. `superblock` are its contents, `catalog` and `used` the
    /// results of [`Meta::take_view`]. Called before the next checkpoint begins, so that nothing is overwritten yet.
    pub fn view(&self, superblock: &Superblock, (catalog, used): (Catalog, u64)) -> View {
        let keeping = self.kept.begin();
        View {
            pages: Pages::as_kept(self.files.clone(), CACHE, Arc::clone(&self.kept)),
            map: Space::table_only(SpaceKind::Map, superblock.map_regions),
            data: Space::table_only(SpaceKind::Data, superblock.data_regions),
            catalog,
            holds: Holds::default(),
            used,
            keeping,
        }
    }

    /// Keeps the pages that a view still needs and a checkpoint is about to overwrite.
    pub fn keep_home(&self, pages: &[(PageKey, Arc<Block>)]) {
        for group in pages.chunk_by(|(a, _), (b, _)| a.file() == b.file()) {
            let file = self.file(group[0].0.file());
            self.kept.keep(file, &mut group.iter().map(|(key, _)| *key));
        }
    }
}

impl Meta {
    /// The metadata in memory. Nothing may change it meanwhile.
    pub(crate) fn sight(&mut self) -> Sight<'_> {
        Sight {
            pages: &mut self.pages,
            map: &mut self.map,
            data: &mut self.data,
            catalog: &self.catalog,
            holds: &self.holds,
        }
    }

    /// Requests that the next checkpoint is made for a view.
    pub fn want_view(&mut self) {
        self.viewed = Some(Catalog::default());
    }

    /// What a checkpoint made for a view has captured: the catalog, and the data blocks in use.
    pub fn take_view(&mut self) -> (Catalog, u64) {
        (self.viewed.take().unwrap_or_default(), self.data.counts().used)
    }

    /// Part of a checkpoint: the catalog of that moment, if a view was requested.
    pub(crate) fn note_view(&mut self) {
        if self.viewed.is_some() {
            self.viewed = Some(self.catalog.clone());
        }
    }
}
