//! Good copies of damaged pages and blocks.
//!
//! A damaged page is written again from memory, or from what proves its content ([`crate::pages::Mender`]), by the next
//! checkpoint. A damaged block is overwritten with the first copy that has its checksum. The store itself has at most
//! one such copy: the page cache of the kernel may still hold the block as it was written. Further sources, such as a
//! replica, implement [`Copies`].
//!
//! One inverted bit of a page is corrected by the checksum of the page, but one inverted bit of a block is not
//! corrected. A page also has a kind and a number, which a wrong correction would hardly match. For a block, one in
//! 131,072 contents of any other kind (zeros, an older content, another block) would be "corrected" into data that was
//! never written.

use super::{Scrubber, check_page};
use crate::engine::log::Cost;
use crate::engine::rebuild::mender;
use crate::engine::scrub::Reference;
use crate::engine::verify::{Expected, Found, read_one};
use crate::engine::{Engine, Meta};
use crate::pages::{PageFile, PageKey};
use crate::space::Run;
use crate::{IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Block, Buffer};

/// The cost of having the next checkpoint write a page.
const PAGE_COST: Cost = Cost { bytes: 0, pages: 4 };

/// A damaged block of which a copy is wanted.
#[derive(Clone, Copy, Debug)]
pub struct WantedBlock<'a> {
    /// The number of the block in the data files.
    pub block: u64,
    /// The checksum that the copy must have.
    pub checksum: u32,
    /// Where disks and snapshots have the block, as far as that is known.
    pub references: &'a [Reference],
}

/// A source of good copies of data blocks.
pub trait Copies {
    /// The text of a report about a block that was restored from this source.
    fn description(&self) -> &str;

    /// Reads a copy of a block. False if this source has none. The caller verifies the checksum of the copy.
    fn read(&self, wanted: WantedBlock<'_>, copy: &mut Buffer) -> Result<bool>;
}

/// Blocks in the page cache of the kernel.
pub(super) struct PageCache<'a>(pub &'a Engine);

impl Copies for PageCache<'_> {
    fn description(&self) -> &str {
        "written again from the page cache"
    }

    fn read(&self, wanted: WantedBlock<'_>, copy: &mut Buffer) -> Result<bool> {
        let (file, offset) = self.0.files.locate(Run { start: wanted.block, blocks: 1 })?;
        file.read_cached_at(copy, offset).during(|| format!("reading block {} from the page cache", wanted.block))
    }
}

/// Has the next checkpoint write a damaged page of which the content is in memory. Returns from what it was restored.
fn renew_page(meta: &mut Meta, key: PageKey) -> Option<String> {
    let number = key.number();
    if meta.pages.write_again(key) {
        return Some("written again from memory".to_owned());
    }
    match key.file() {
        PageFile::MapSummary => meta.map.renew_summaries(&mut meta.pages, number),
        PageFile::DataSummary => meta.data.renew_summaries(&mut meta.pages, number),
        PageFile::Catalog if !meta.catalog.lost().contains_key(&number) => {
            meta.catalog.renew_page(&mut meta.pages, number);
            return Some("written again from memory".to_owned());
        }
        _ => return None,
    }
    Some("counted again from memory".to_owned())
}

impl Scrubber<'_> {
    /// Has the next checkpoint write a damaged page, if its content is known. Returns from what it was restored.
    pub(super) fn restore_page(&self, key: PageKey) -> Result<Option<String>> {
        let engine = self.engine;
        let _grant = engine.admit(PAGE_COST)?;
        // The images of the last checkpoint describe the files as long as no checkpoint is under way.
        let _checkpoint = engine.log.lock_checkpoints();
        let mut restored = renew_page(&mut engine.meta.lock(), key);
        if restored.is_none() {
            // The medium may take seconds to fail a read, so it is not read under the metadata lock.
            let mender = mender(engine);
            let mut raw = Block([0; BLOCK_SIZE]);
            let is_read = engine.meta.file(key.file()).read_at(&mut raw.0, key.offset()).is_ok();
            let proven = mender.restore(key, is_read.then_some(&raw));
            if let Some(page) = proven.filter(|page| check_page(&page.0, key).is_ok()) {
                let mut meta = engine.meta.lock();
                // A request may have read the page meanwhile, if not every read of it fails.
                restored = renew_page(&mut meta, key);
                if restored.is_none() {
                    meta.pages.restore(key, page);
                    restored = mender.take_mended().remove(&key).map(|proof| proof.to_string());
                }
            }
        }
        engine.count_changes(&engine.meta.lock());
        Ok(restored)
    }

    /// Overwrites a damaged block with the first good copy. Returns from what it was restored; `None` if no source has
    /// a good copy, or if the block was given other content meanwhile.
    pub fn restore_block(
        &self,
        block: u64,
        references: &[Reference],
        copies: &[&dyn Copies],
    ) -> Result<Option<String>> {
        let run = Run { start: block, blocks: 1 };
        let Ok((wanted, _guard)) = self.engine.expected_now(run) else { return Ok(None) };
        let [Expected::Checksum(sum)] = wanted[..] else { return Ok(None) };
        for source in copies {
            let mut copy = Buffer::zeroed(1);
            let read = match source.read(WantedBlock { block, checksum: sum, references }, &mut copy) {
                Ok(read) => read,
                Err(error) => {
                    tracing::warn!(block, %error, "a copy of a damaged block cannot be read");
                    false
                }
            };
            if !read || checksum(&copy) != sum {
                continue;
            }
            match self.write_copy(run, sum, &copy) {
                Ok(true) => return Ok(Some(source.description().to_owned())),
                Ok(false) => {}
                Err(error) => tracing::warn!(block, %error, "a damaged block cannot be overwritten with a good copy"),
            }
        }
        Ok(None)
    }

    /// Writes a block again with the content that it has. False if the block was given other content meanwhile, or
    /// still fails its checksum afterwards.
    fn write_copy(&self, run: Run, sum: u32, copy: &Buffer) -> Result<bool> {
        let engine = self.engine;
        engine.check_running()?;
        engine.check_owner()?;
        let _gate = engine.writeback.lock();
        let _through = engine.writeback.stop_through();
        let claimed = engine.meta.look(|meta| {
            let entry = meta.entry(run.start)?;
            let same = entry.references > 0 && !entry.suspect && entry.checksum == sum;
            if !same || meta.logged.contains_key(&run.start) || meta.in_flight.contains(run.start) {
                return Ok(None);
            }
            let guard = meta.freed.guard();
            meta.in_flight.claim(run);
            Ok(Some(guard))
        });
        let Some(_guard) = claimed? else { return Ok(false) };
        let written = self.data_file(run).and_then(|(file, offset)| {
            file.write_at(&[copy], offset, true).during(|| format!("writing block {} again", run.start))
        });
        engine.meta.lock().in_flight.release(run);
        written?;
        Ok(matches!(read_one(&|run, into| self.read(run, into), run.start, Some(sum)), Found::Good))
    }
}
