//! The blocks of rebuilt pages of `data.table`: finds which of their checksums are right, restores those that can be
//! proven, and reports the blocks for which nothing proves the content.
//!
//! * The checksum that remained in the damaged page matches the block: both are right.
//! * The block belongs to a pack. The index of the pack has a checksum of itself, and one of each content in the pack.
//!   If all contents in the block match theirs, the block is right.
//! * Anything else proves nothing: reads of the block fail until it is written again.
//!
//! A block without a checksum counts as reserved and never written, so no scrub reads it. If no checksum of a written
//! block remained, its entry gets one that the present content does not have: scrubs and checks then report the block,
//! and a read does not return the content, as with any other wrong checksum.

use super::Engine;
use super::check::{Report, Steps, Window, check_catalog};
use super::metadata::{Effects, Sight};
use super::verify::{Found, StoreActivity, next_written};
use crate::space::{Run, TABLE_ENTRIES};
use crate::tree::{self, Visit};
use crate::{Result, checksum, pack};
use backend::{BLOCK_SIZE, Buffer};
use std::collections::{BTreeMap, BTreeSet};

/// Rebuilt pages whose blocks are compared together, with one walk over all trees for each kind of search. Fewer than
/// the pages for which every repair leaves room in the images file.
const PAGES_AT_A_TIME: usize = 32;

/// Blocks of which nothing has proven the content yet, with the checksum of the content, if it can be read.
type Unproven = BTreeMap<u64, Option<u32>>;

impl Engine {
    /// Compares the blocks of those rebuilt pages that a window describes with the remaining checksums, and excludes
    /// them from further comparisons.
    pub(super) fn compare_renewed(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        window: &mut Window,
        report: &mut Report,
        steps: &mut Steps<'_>,
    ) -> Result<()> {
        // Only repairs rebuild pages.
        if matches!(standing, StoreActivity::Running) {
            return Ok(());
        }
        let here = |page: &u64| window.range.contains(&(page * TABLE_ENTRIES));
        let pages: BTreeSet<u64> = report.renewed.iter().copied().filter(here).collect();
        for pages in pages.into_iter().collect::<Vec<_>>().chunks(PAGES_AT_A_TIME) {
            if !self.has_room_for_repair(sight) {
                break;
            }
            let mut unproven = Unproven::new();
            for page in pages {
                let mut at = page * TABLE_ENTRIES..((page + 1) * TABLE_ENTRIES).min(window.range.end);
                let all = at.clone();
                while let Some(run) = next_written(window, &mut at) {
                    for (block, found) in self.compare_run(sight, standing, run, report)? {
                        let found = match found {
                            Found::Differs { found, .. } => Some(found),
                            _ => None,
                        };
                        report.verified += u64::from(found.is_some());
                        unproven.insert(block, found);
                    }
                    steps.pass(run.blocks)?;
                }
                window.clear(all);
            }
            let proven = self.prove_by_packs(sight, &mut unproven)?;
            if proven > 0 {
                let text = format!("{proven} data blocks of packs have lost their checksums");
                report.add(text, Some("restored: the indexes of the packs prove their content".to_owned()));
            }
            note_unproven(sight, &unproven, report)?;
        }
        Ok(())
    }

    /// Restores the checksums of blocks whose content is proven by the packs to which they belong. Returns their
    /// number.
    fn prove_by_packs(&self, sight: &mut Sight<'_>, unproven: &mut Unproven) -> Result<u64> {
        let mut proven = 0;
        for run in packs_with(sight, unproven)? {
            let mut bytes = Buffer::recycled(run.blocks as usize);
            if self.read_run(run, &mut bytes).is_err() {
                continue;
            }
            let good = pack::proven(&bytes);
            for ((block, content), good) in (run.start..).zip(bytes.chunks_exact(BLOCK_SIZE)).zip(good) {
                if good && unproven.remove(&block).is_some() {
                    set_checksum(sight, block, checksum(content))?;
                    proven += 1;
                }
            }
        }
        Ok(proven)
    }
}

/// The packs that have any of these blocks.
fn packs_with(sight: &mut Sight<'_>, blocks: &Unproven) -> Result<BTreeSet<Run>> {
    let mut packs = BTreeSet::new();
    if blocks.is_empty() {
        return Ok(packs);
    }
    let mut seen = vec![false; sight.map.blocks() as usize];
    for root in check_catalog(sight.catalog, &mut Report::default()) {
        let mut effects = Effects::default();
        let mut visit = |visit: Visit| match visit {
            Visit::Node { id, .. } => {
                Ok(seen.get_mut(id.0 as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
            }
            Visit::Extent(mapping) => {
                let stored = mapping.stored();
                let run = stored.physical..stored.physical + stored.blocks;
                if mapping.packed.is_some() && blocks.range(run).next().is_some() {
                    packs.insert(Run { start: stored.physical, blocks: stored.blocks });
                }
                Ok(true)
            }
        };
        // The check reports damaged nodes itself.
        tree::walk_damaged(&mut sight.nodes(&mut effects), root.node, &mut visit, &mut |_, _, _| {})?;
    }
    Ok(packs)
}

/// Reports blocks whose content nothing proves, with the disks and snapshots that refer to them. If a block of a pack
/// is among them, everything that an entry maps of the pack counts.
fn note_unproven(sight: &mut Sight<'_>, unproven: &Unproven, report: &mut Report) -> Result<()> {
    let (Some((first, _)), Some((last, _))) = (unproven.first_key_value(), unproven.last_key_value()) else {
        return Ok(());
    };
    for (block, found) in unproven {
        if sight.entry(*block)?.checksum == 0 {
            set_checksum(sight, *block, other_than(*found))?;
        }
    }
    let roots = check_catalog(sight.catalog, &mut Report::default());
    let owners = sight.owners_of_blocks(&roots, unproven.keys().copied())?;
    report.add_at(
        format!(
            "the checksums of {} data blocks between {first} and {last} are lost, and nothing proves the content of \
             these blocks, so reads of them fail: blocks of 4 KiB: {}; write them again, or restore them from a backup",
            unproven.len(),
            owners.blocks()
        ),
        None,
        owners.places(),
    );
    Ok(())
}

/// A checksum that content with the checksum `found` does not have.
fn other_than(found: Option<u32>) -> u32 {
    (!found.unwrap_or(0)).max(1)
}

fn set_checksum(sight: &mut Sight<'_>, block: u64, checksum: u32) -> Result<()> {
    sight.data.annotate(sight.pages, Run { start: block, blocks: 1 }, |_, entry| entry.checksum = checksum)
}
