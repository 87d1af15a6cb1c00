//! Pages of tables that have lost all their entries.
//!
//! A page of zeros was never written. But a device may also lose a write, or return zeros for a sector: then the page
//! has no entries, although trees refer to blocks that it describes. Only the trees tell the two apart, so a page is
//! not examined when it is read, which would make openings slow. A check, a scrub or a request that needs an entry
//! marks it here. From then on reads of the page fail, like those of a page with a wrong checksum, until the page is
//! replaced or its place in the file has entries again.

use super::{CLEAN, PageKey, Pages, has_no_entries};
use crate::{Error, ErrorKind, Result};
use backend::Block;

/// What is wrong with a page that was marked.
pub fn emptied(key: PageKey) -> String {
    format!("{key} has no entries, although blocks that it describes are in use")
}

fn lost(key: PageKey) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{}; run 'lamina check --repair' on the datastore", emptied(key)))
}

impl Pages {
    /// Marks a page without entries as lost. A page with entries in memory, and one that the next checkpoint writes, is
    /// not marked.
    pub fn mark_emptied(&mut self, key: PageKey) {
        match self.slots.get(&key) {
            Some(slot) if slot.dirty != CLEAN || !has_no_entries(&slot.page.0) => return,
            // A read that began before the mark must not insert the page.
            _ => self.loading.remove(&key),
        };
        self.slots.remove(&key);
        self.emptied.insert(key);
    }

    /// Marks a page without entries as lost, for a request that needs an entry of it. Returns the error of the request.
    #[cold]
    pub fn lose_emptied(&mut self, key: PageKey) -> Error {
        tracing::error!("{}", emptied(key));
        self.mark_emptied(key);
        lost(key)
    }

    /// Whether a page is marked as lost.
    pub fn is_emptied(&self, key: PageKey) -> bool {
        self.emptied.contains(&key)
    }

    /// The page, if it is in memory, and whether the next checkpoint writes it.
    pub fn in_memory(&self, key: PageKey) -> Option<(&Block, bool)> {
        self.slots.get(&key).map(|slot| (&*slot.page, slot.dirty != CLEAN))
    }

    /// Fails if a page that was read is marked as lost.
    pub(super) fn refuse_emptied(&self, key: PageKey, page: &Block) -> Result<()> {
        if self.emptied.contains(&key) && has_no_entries(&page.0) { Err(lost(key)) } else { Ok(()) }
    }
}
