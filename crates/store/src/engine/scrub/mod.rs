//! Scrub: reads every metadata page and every data block in the order of their places, beside requests, and restores
//! what is damaged if a good copy exists ([0038](../../../../../docs/adr/0038-scrub.md)).
//!
//! The caller drives the scrub by steps of about a megabyte, and stores the position between them. So the caller limits
//! the rate, and continues an interrupted scrub later.
//!
//! What must hold:
//!
//! 1. Nothing undamaged is reported. A page that fails is read again while no checkpoint writes pages, and counts only
//!    if the metadata in memory needs it. A block that fails is examined as in [`super::verify`].
//! 2. The bytes come from the medium: files are opened a second time so that reads bypass the page cache, where the
//!    file system allows that.
//! 3. A block that a crash has left suspect gets the checksum of the content that the scrub finds, so that later damage
//!    of the block is detected.
//! 4. A copy replaces a damaged block only if it has the checksum of the table. No other write of the block begins
//!    meanwhile, because the block counts as in flight.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod` | reading, step by step |
//! | `restore` | good copies: from memory, from images of the checkpoint, from the page cache |
//! | `emptied` | which pages of tables have lost all their entries |
//! | `locate` | which disks and snapshots refer to damaged places |

mod emptied;
mod locate;
mod restore;

pub use locate::{Located, Reference};
pub(super) use locate::{ReadIndex, Spans, WHOLE_PACKS, Wanted};
pub use restore::{Copies, WantedBlock};

use super::Engine;
use super::check::Report;
use super::files::data_file_name;
use super::metadata::Meta;
use super::verify::{Expected, Found};
use crate::FILE_BLOCKS;
use crate::catalog::SLOTS_PER_PAGE;
use crate::pages::{self, PageFile, PageKey, patiently, verify};
use crate::space::{Run, SUMMARY_ENTRIES, TABLE_ENTRIES};
use crate::{IoContext, Result, checksum, is_lost};
use backend::{BLOCK_SIZE, Block, Buffer, File, IoMode};
use restore::PageCache;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Pages read with one request (1 MiB).
const PAGES_PER_STEP: u64 = 256;
/// Data blocks read with one request (1 MiB).
const BLOCKS_PER_READ: usize = 256;
/// The most pages of the table that one step passes if none of their blocks is in use.
const TABLES_PER_STEP: u64 = 256;

/// A part of a store that a scrub reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubPart {
    /// Both copies of the superblock.
    Superblock,
    /// The pages of a file of metadata.
    Pages(PageFile),
    /// The blocks of the data files.
    Data,
}

/// The parts in the order of a scrub. The tables come before the data, which is compared with them.
const PARTS: [ScrubPart; 8] = [
    ScrubPart::Superblock,
    ScrubPart::Pages(PageFile::MapSummary),
    ScrubPart::Pages(PageFile::DataSummary),
    ScrubPart::Pages(PageFile::Catalog),
    ScrubPart::Pages(PageFile::MapTable),
    ScrubPart::Pages(PageFile::DataTable),
    ScrubPart::Pages(PageFile::Map),
    ScrubPart::Data,
];

impl ScrubPart {
    /// The name of the part in stored positions: that of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblock",
            Self::Pages(file) => file.name(),
            Self::Data => "data",
        }
    }

    /// The part with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        PARTS.into_iter().find(|part| part.name() == name)
    }

    fn following(self) -> Option<Self> {
        PARTS.into_iter().skip_while(|part| *part != self).nth(1)
    }
}

/// The place at which a scrub continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubPosition {
    /// The part that the scrub reads next.
    pub part: ScrubPart,
    /// The first page of the part that is not read yet; for the data, the page of the table that describes the blocks.
    pub next: u64,
}

impl ScrubPosition {
    /// The beginning of a scrub.
    pub const START: Self = Self { part: PARTS[0], next: 0 };
}

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DamagedPlace {
    /// A copy of the superblock.
    Superblock,
    /// A page of a file of metadata.
    Page {
        /// The file of the page.
        file: PageFile,
        /// The number of the page.
        number: u64,
    },
    /// A data block.
    Block(u64),
}

/// Damage that a scrub has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The damaged place.
    pub place: DamagedPlace,
    /// What is wrong with the place.
    pub problem: String,
    /// From what the place was restored; `None` if no good copy exists.
    pub repaired: Option<String>,
}

/// The result of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubStep {
    /// Where the next step begins; `None` at the end of the store.
    pub next: Option<ScrubPosition>,
    /// Bytes that were read.
    pub read: u64,
    /// Metadata pages that were examined.
    pub pages: u64,
    /// Data blocks that were examined.
    pub blocks: u64,
    /// The damage that was found.
    pub damage: Vec<Damage>,
}

/// Reads a store for a scrub. Used by one thread only.
pub struct Scrubber<'a> {
    engine: &'a Engine,
    /// The files that were opened to bypass the page cache, by name.
    opened: RefCell<BTreeMap<String, Arc<dyn File>>>,
    /// Pages of `data.table` that were reported, and that the data of their blocks needs again.
    reported: RefCell<BTreeSet<PageKey>>,
}

impl Engine {
    /// A reader for a scrub of this store.
    pub fn scrubber(&self) -> Scrubber<'_> {
        Scrubber { engine: self, opened: RefCell::default(), reported: RefCell::default() }
    }
}

/// Whether these bytes are the page `key`.
fn check_page(bytes: &[u8], key: PageKey) -> Result<()> {
    verify(&mut Block(bytes.try_into().expect("a page")), key)
}

/// Whether recovery or the metadata in memory needs the bytes at the place of a page.
fn is_needed(meta: &mut Meta, key: PageKey, bytes: &[u8]) -> bool {
    if meta.pages.is_new(key) {
        return false;
    }
    match key.file() {
        PageFile::Map => match meta.map.entry(&mut meta.pages, key.number()) {
            Ok(entry) => entry.references > 0,
            // The references are lost. A free node was never written, or has a valid page. So other bytes are those of
            // a damaged node, and the search for the trees that contain the node decides whether it is free.
            Err(_) => bytes.iter().any(|byte| *byte != 0),
        },
        _ => true,
    }
}

impl Scrubber<'_> {
    /// The bytes that a scrub of the present content reads.
    pub fn total(&self) -> u64 {
        let files = PARTS.iter().filter_map(|part| match part {
            ScrubPart::Pages(file) => Some(*file),
            _ => None,
        });
        let pages: u64 = files.map(|file| self.pages(file)).sum();
        (pages + self.engine.counts().data.used) * BLOCK_SIZE as u64
    }

    /// Reads from a position on, restores what can be restored, and returns what was damaged.
    ///
    /// # Errors
    /// `Stopped` if the store accepts no more writes.
    pub fn step(&self, at: ScrubPosition) -> Result<ScrubStep> {
        self.engine.check_running()?;
        let mut step = ScrubStep::default();
        let next = match at.part {
            ScrubPart::Superblock => self.read_superblock(&mut step)?,
            ScrubPart::Pages(file) => self.read_pages(file, at.next, &mut step)?,
            ScrubPart::Data => self.read_data(at.next, &mut step)?,
        };
        step.next = match next {
            Some(next) => Some(ScrubPosition { next, ..at }),
            None => at.part.following().map(|part| ScrubPosition { part, next: 0 }),
        };
        Ok(step)
    }

    /// Whether damage that was not repaired is still there: the place is in use, has no new content, and fails again.
    pub fn is_still_damaged(&self, place: DamagedPlace) -> Result<bool> {
        match place {
            DamagedPlace::Superblock => Ok(false),
            DamagedPlace::Page { file, number } => {
                Ok(number < self.pages(file) && self.failing_page(PageKey::new(file, number))?.is_some())
            }
            DamagedPlace::Block(block) => {
                if block >= self.engine.meta.lock().data.blocks() {
                    return Ok(false);
                }
                match self.engine.look_again(&|run, into| self.read(run, into), block) {
                    // The page of the table is damaged, and is reported itself.
                    Err(error) if is_lost(&error) => Ok(true),
                    looked => Ok(!matches!(looked?, Found::Good | Found::Differs { expected: 0, .. })),
                }
            }
        }
    }

    /// Number of pages of a file that may be in use.
    fn pages(&self, file: PageFile) -> u64 {
        let meta = self.engine.meta.lock();
        let summaries = |regions: u64| regions.div_ceil(SUMMARY_ENTRIES);
        match file {
            PageFile::Map => meta.map.counts().backed.min(meta.map.blocks()),
            PageFile::MapTable => meta.map.table_pages(),
            PageFile::MapSummary => summaries(meta.map.regions()),
            PageFile::DataTable => meta.data.table_pages(),
            PageFile::DataSummary => summaries(meta.data.regions()),
            PageFile::Catalog => meta.catalog.slots().div_ceil(SLOTS_PER_PAGE as u64),
        }
    }

    /// A file of which reads bypass the page cache, or `otherwise` if the medium refuses that.
    fn past_the_cache(&self, name: &str, otherwise: impl FnOnce() -> Result<Arc<dyn File>>) -> Result<Arc<dyn File>> {
        if let Some(file) = self.opened.borrow().get(name) {
            return Ok(Arc::clone(file));
        }
        let file = match self.engine.directory.open(name, IoMode::Direct) {
            Ok(file) => file,
            Err(_) => otherwise()?,
        };
        self.opened.borrow_mut().insert(name.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    fn page_file(&self, file: PageFile) -> Result<Arc<dyn File>> {
        self.past_the_cache(file.name(), || Ok(Arc::clone(&self.engine.meta.files()[file as usize])))
    }

    /// The data file of a run, and the run's offset in it.
    fn data_file(&self, run: Run) -> Result<(Arc<dyn File>, u64)> {
        let (known, offset) = self.engine.files.locate(run)?;
        let file = self.past_the_cache(&data_file_name(run.start / FILE_BLOCKS), || Ok(known))?;
        Ok((file, offset))
    }

    /// Reads data blocks from the medium.
    fn read(&self, run: Run, bytes: &mut [u8]) -> Result<()> {
        let (file, offset) = self.data_file(run)?;
        file.read_at(bytes, offset).during(|| format!("reading block {}", run.start))
    }

    fn read_superblock(&self, step: &mut ScrubStep) -> Result<Option<u64>> {
        let mut report = Report::default();
        self.engine.check_superblock(true, &mut report)?;
        step.damage.extend(report.findings.into_iter().map(|finding| Damage {
            place: DamagedPlace::Superblock,
            problem: finding.problem,
            repaired: finding.repaired,
        }));
        step.pages += 2;
        step.read += 2 * BLOCK_SIZE as u64;
        Ok(None)
    }

    fn read_pages(&self, file: PageFile, first: u64, step: &mut ScrubStep) -> Result<Option<u64>> {
        let end = self.pages(file).min(first + PAGES_PER_STEP);
        if first >= end {
            return Ok(None);
        }
        let needed = self.needed(file, first, end)?;
        let mut empty = Vec::new();
        let mut bytes = Buffer::recycled((end - first) as usize);
        let whole = self.page_file(file)?.read_at(&mut bytes, first * BLOCK_SIZE as u64).is_ok();
        for ((number, page), needed) in (first..end).zip(bytes.chunks_exact(BLOCK_SIZE)).zip(needed) {
            let key = PageKey::new(file, number);
            step.pages += u64::from(needed);
            if needed && !(whole && check_page(page, key).is_ok()) {
                step.damage.extend(self.look_at_page(key)?);
            } else if emptied::may_be_lost(key, page) {
                empty.push(key);
            }
        }
        for key in self.emptied(empty)? {
            step.damage.extend(self.look_at_page(key)?);
        }
        step.read += (end - first) * BLOCK_SIZE as u64;
        Ok(Some(end))
    }

    /// Which pages of a range are in use. The map has free nodes, whose content has no meaning. The other files are
    /// used as a whole.
    fn needed(&self, file: PageFile, first: u64, end: u64) -> Result<Vec<bool>> {
        let all = vec![true; (end - first) as usize];
        if file != PageFile::Map {
            return Ok(all);
        }
        let counted = self.engine.meta.look(|meta| {
            let references = |node| Ok(meta.map.entry(&mut meta.pages, node)?.references > 0);
            (first..end).map(references).collect::<Result<Vec<bool>>>()
        });
        match counted {
            Err(error) if is_lost(&error) => Ok(all),
            counted => counted,
        }
    }

    /// Examines a page that was read with an error or changed meanwhile, and restores it if it is damaged.
    fn look_at_page(&self, key: PageKey) -> Result<Option<Damage>> {
        let Some(problem) = self.failing_page(key)? else { return Ok(None) };
        let repaired = self.restore_page(key)?;
        if key.file() == PageFile::DataTable {
            self.reported.borrow_mut().insert(key);
        }
        let place = DamagedPlace::Page { file: key.file(), number: key.number() };
        Ok(Some(Damage { place, problem, repaired }))
    }

    /// What is wrong with a page on the medium; `None` if the page is valid or not needed.
    fn failing_page(&self, key: PageKey) -> Result<Option<String>> {
        // No page is written while the lock is held.
        let _checkpoint = self.engine.log.lock_checkpoints();
        let file = self.page_file(key.file())?;
        let mut bytes = Buffer::zeroed(1);
        let read = patiently(|| file.read_at(&mut bytes, key.offset()).during(|| format!("reading {key}")));
        let Err(error) = read.and_then(|()| check_page(&bytes, key)) else {
            let is_lost = emptied::may_be_lost(key, &bytes) && self.lacks_entries(key)?;
            return Ok(is_lost.then(|| pages::emptied(key)));
        };
        let text = error.to_string();
        // Behind the semicolon the error advises a check. That advice is for requests that need the page.
        let problem = text.split(';').next().unwrap_or_default().to_owned();
        let needed = self.engine.meta.look(|meta| Ok(is_needed(meta, key, &bytes)))?;
        Ok(needed.then_some(problem))
    }

    fn read_data(&self, first: u64, step: &mut ScrubStep) -> Result<Option<u64>> {
        let end = self.pages(PageFile::DataTable);
        let mut page = first;
        while page < end && page - first < TABLES_PER_STEP && step.read == 0 {
            self.read_blocks(page, step)?;
            page += 1;
        }
        Ok((page < end).then_some(page))
    }

    /// Reads the written blocks that a page of the table describes.
    fn read_blocks(&self, page: u64, step: &mut ScrubStep) -> Result<()> {
        let engine = self.engine;
        let all = Run { start: page * TABLE_ENTRIES, blocks: TABLE_ENTRIES };
        let (wanted, guard) = match engine.expected_now(all) {
            Err(error) if is_lost(&error) => {
                let key = PageKey::new(PageFile::DataTable, page);
                if !self.reported.borrow().contains(&key) {
                    step.damage.extend(self.look_at_page(key)?);
                }
                return Ok(());
            }
            expected => expected?,
        };
        // A block without a checksum is reserved and not written.
        let is_read = |index: &usize| matches!(wanted[*index], Expected::Any | Expected::Checksum(1..));
        let (mut doubts, mut settled) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < wanted.len() {
            let count = (at..wanted.len()).take(BLOCKS_PER_READ).take_while(is_read).count();
            if count == 0 {
                at += 1;
                continue;
            }
            let run = Run { start: all.start + at as u64, blocks: count as u64 };
            let mut bytes = Buffer::recycled(count);
            let whole = self.read(run, &mut bytes).is_ok();
            for (index, content) in (at..at + count).zip(bytes.chunks_exact(BLOCK_SIZE)) {
                let block = all.start + index as u64;
                match wanted[index] {
                    Expected::Checksum(sum) if whole && sum == checksum(content) => {}
                    Expected::Any if whole => settled.push((block, checksum(content))),
                    _ => doubts.push(block),
                }
            }
            step.blocks += run.blocks;
            step.read += run.blocks * BLOCK_SIZE as u64;
            at += count;
        }
        drop(guard);
        if !settled.is_empty() {
            engine.settle_suspects(&settled)?;
        }
        for (block, found) in engine.confirm(&|run, into| self.read(run, into), doubts)? {
            let problem = match found {
                // The block was freed meanwhile, and reserved again without being written.
                Found::Good | Found::Differs { expected: 0, .. } => continue,
                Found::Unreadable(error) => format!("data block {block} cannot be read: {error}"),
                Found::Differs { expected, found } => {
                    format!("data block {block} fails its checksum (expected {expected:08x}, found {found:08x})")
                }
            };
            tracing::error!(block, "{problem}");
            let repaired = self.restore_block(block, &[], &[&PageCache(engine)])?;
            step.damage.push(Damage { place: DamagedPlace::Block(block), problem, repaired });
        }
        Ok(())
    }
}
