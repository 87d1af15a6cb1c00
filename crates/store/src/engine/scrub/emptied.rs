//! Finds pages of tables that have lost all their entries ([`crate::pages::emptied`]).
//!
//! Most pages without entries were never written. A page is lost if memory has entries of it that the next checkpoint
//! does not write, or if the last checkpoint has an image of it. Otherwise the counts of its region tell whether the
//! region has lost blocks, and a walk over all trees tells which of its pages without entries describe blocks in use.
//! So an undamaged store costs no walk.

use super::{DamagedPlace, Scrubber};
use crate::Result;
use crate::engine::metadata::Meta;
use crate::engine::rebuild::mender;
use crate::pages::{PageFile, PageKey, has_no_entries};
use crate::space::REGION_PAGES;

/// Whether the bytes of an intact page may be those of a page that has lost all its entries.
pub(super) fn may_be_lost(key: PageKey, bytes: &[u8]) -> bool {
    matches!(key.file(), PageFile::DataTable | PageFile::MapTable) && has_no_entries(bytes)
}

/// Whether memory shows that a page has entries; `None` if it does not tell.
fn is_lost_in(meta: &Meta, key: PageKey) -> Option<bool> {
    match meta.pages.in_memory(key) {
        // The next checkpoint writes the page.
        Some((_, true)) => Some(false),
        Some((page, false)) if !has_no_entries(&page.0) => Some(true),
        _ => meta.pages.is_emptied(key).then_some(true),
    }
}

/// Whether the table of the region to which a page belongs has lost blocks, or cannot be read.
fn has_lost_blocks(meta: &mut Meta, key: PageKey) -> Result<bool> {
    let space = if key.file() == PageFile::MapTable { &meta.map } else { &meta.data };
    let (missing, unread) = space.missing_in(&mut meta.pages, key.number() / REGION_PAGES)?;
    Ok(missing > 0 || unread > 0)
}

impl Scrubber<'_> {
    /// Whether a page without entries on the medium has lost them, as far as that is known without the trees. Called
    /// while no checkpoint writes pages.
    pub(super) fn lacks_entries(&self, key: PageKey) -> Result<bool> {
        self.engine.meta.look(|meta| is_lost_in(meta, key).map_or_else(|| has_lost_blocks(meta, key), Ok))
    }

    /// Which of these pages without entries have lost them. Marks them as damaged.
    pub(super) fn emptied(&self, keys: Vec<PageKey>) -> Result<Vec<PageKey>> {
        let engine = self.engine;
        let (mut lost, mut doubtful) = (Vec::new(), Vec::new());
        for key in keys {
            // The page may have been written since it was read.
            if self.failing_page(key)?.is_none() {
                continue;
            }
            let _checkpoint = engine.log.lock_checkpoints();
            let known = is_lost_in(&engine.meta.lock(), key);
            match known.unwrap_or_else(|| mender(engine).has_image(key)) {
                true => lost.push(key),
                false => doubtful.push(key),
            }
        }
        if !doubtful.is_empty() {
            let place = |key: &PageKey| DamagedPlace::Page { file: key.file(), number: key.number() };
            let places: Vec<DamagedPlace> = doubtful.iter().map(place).collect();
            let located = engine.locate_damage(&places, &|| true)?;
            let used = doubtful.into_iter().zip(located.references).filter(|(_, references)| !references.is_empty());
            lost.extend(used.map(|(key, _)| key));
        }
        let mut meta = engine.meta.lock();
        lost.iter().for_each(|key| meta.pages.mark_emptied(*key));
        Ok(lost)
    }
}
