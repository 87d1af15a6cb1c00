//! The images file: holds copies of all pages of a checkpoint before any of them is overwritten at its place.
//!
//! | blocks | what |
//! |---|---|
//! | 1 | head |
//! | one for each 512 images | keys of the images, 8 bytes each |
//! | one for each image | the pages, in the order of their keys |
//!
//! The head:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic `LMCI` |
//! | 4 | 2 | version, 1 |
//! | 8 | 8 | salt: first half of the datastore's UUID |
//! | 16 | 8 | number of the checkpoint |
//! | 24 | 8 | number of images |
//! | 32 | 4 | CRC32C of the keys |
//! | 36 | 4 | CRC32C of the head with this field zero |
//! | 40 | 8 | incarnation |
//! | 48 | 72 | fields of the superblock that commits the checkpoint: [`CheckpointRecord`] |
//!
//! What must hold:
//!
//! 1. The file changes only while the superblock on the medium names no images.
//! 2. The images are flushed before a superblock that names them is written.
//! 3. Space for the images of pages is reserved before these pages become dirty.

use super::{CheckpointRecord, FORMAT_VERSION, NamedImages, Superblock, Unreported};
use crate::engine::files;
use crate::journal::Place;
use crate::pages::{ImageIndex, PageFile, PageKey, patiently, restore_bit, restore_bit_of, sealed, verify, write_home};
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Block, Buffer, Directory, File, IoMode};
use std::sync::Arc;

/// The file with the page images of a checkpoint.
pub const IMAGES_FILE: &str = "checkpoint";
/// Limit on the number of images of a checkpoint (16 TiB).
pub const COUNT_LIMIT: u64 = 1 << 32;
/// Images for which a new datastore has room.
pub const INITIAL_PAGES: u64 = 512;
const MAGIC: &[u8; 4] = b"LMCI";
const VERSION: u16 = 1;
const CHECKSUM_AT: usize = 36;
const KEYS_PER_BLOCK: u64 = (BLOCK_SIZE / 8) as u64;
/// Pages read or written at a time (1 MiB).
const PAGES_AT_A_TIME: usize = 256;

/// Bytes that the file takes for `pages` images.
pub fn length(pages: u64) -> u64 {
    (1 + pages.div_ceil(KEYS_PER_BLOCK) + pages) * BLOCK_SIZE as u64
}

/// The number of images for which a file of `length` bytes has room.
pub fn capacity(length_of_file: u64) -> u64 {
    let blocks = (length_of_file / BLOCK_SIZE as u64).saturating_sub(1);
    let mut pages = blocks * KEYS_PER_BLOCK / (KEYS_PER_BLOCK + 1);
    while pages > 0 && length(pages) > length_of_file {
        pages -= 1;
    }
    pages
}

/// The head of the file.
pub struct Head {
    salt: u64,
    /// Number of the checkpoint that wrote the images.
    pub number: u64,
    count: u64,
    keys_checksum: u32,
    /// The incarnation under which the images were written.
    pub incarnation: u64,
    /// The record that the superblock holds once the checkpoint is committed.
    pub record: CheckpointRecord,
}

impl Head {
    fn encode(&self) -> Buffer {
        let mut out = Buffer::zeroed(1);
        out[0..4].copy_from_slice(MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[8..16].copy_from_slice(&self.salt.to_le_bytes());
        out[16..24].copy_from_slice(&self.number.to_le_bytes());
        out[24..32].copy_from_slice(&self.count.to_le_bytes());
        out[32..36].copy_from_slice(&self.keys_checksum.to_le_bytes());
        out[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        let record = self.record.encode();
        out[48..48 + record.len()].copy_from_slice(&record);
        let sum = checksum(&out);
        out[36..40].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<(Self, u32)> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[0..4] != *MAGIC || bytes[4..6] != VERSION.to_le_bytes() {
            return None;
        }
        let mut zeroed = bytes.to_vec();
        zeroed[36..40].fill(0);
        let stored = u32_at(36);
        if stored != checksum(&zeroed) {
            return None;
        }
        let record = CheckpointRecord::decode(&bytes[48..48 + CheckpointRecord::SIZE])?;
        let head = Self {
            salt: u64_at(8),
            number: u64_at(16),
            count: u64_at(24),
            keys_checksum: u32_at(32),
            incarnation: u64_at(40),
            record,
        };
        (head.count < COUNT_LIMIT && head.number < 1 << 62 && head.incarnation < 1 << 62).then_some((head, stored))
    }
}

/// The open images file.
pub struct Images {
    file: Arc<dyn File>,
    salt: u64,
    /// Whether an image with one inverted bit is corrected when it is read.
    mending: bool,
}

/// Pages with their keys.
pub type Pages = [(PageKey, Arc<Block>)];
/// A callback for each part of the images.
type Part<'a> = dyn FnMut(&Pages) -> Result<()> + 'a;

impl Images {
    /// Makes the file with room for `pages` images.
    pub fn create(directory: &dyn Directory, pages: u64) -> Result<()> {
        let doing = || format!("reserving {} bytes for checkpoints ({IMAGES_FILE})", length(pages));
        let file = directory.create(IMAGES_FILE, IoMode::Buffered).during(|| format!("creating {IMAGES_FILE}"))?;
        file.reserve(0, length(pages)).during(doing)?;
        file.sync().during(doing)
    }

    /// Opens the file. Creates it for a datastore of version 1, which has none.
    pub fn open(directory: &dyn Directory, superblock: &Superblock, salt: u64) -> Result<Self> {
        let exists = directory.list().during(|| "listing the datastore".into())?.iter().any(|name| name == IMAGES_FILE);
        if !exists && !superblock.has_images_file() {
            Self::create(directory, INITIAL_PAGES)?;
            directory.sync().during(|| format!("creating {IMAGES_FILE}"))?;
        }
        let file = files::open_present(directory, IMAGES_FILE, IoMode::Buffered)?;
        Ok(Self { file, salt, mending: false })
    }

    /// Opens the images file of a datastore without a readable superblock.
    pub fn of_lost(directory: &dyn Directory, salt: u64) -> Result<Self> {
        let file = directory.open(IMAGES_FILE, IoMode::Buffered).during(|| format!("opening {IMAGES_FILE}"))?;
        Ok(Self { file, salt, mending: false })
    }

    /// Makes later reads correct an image with one inverted bit: for repair and salvage.
    pub fn mend(&mut self) {
        self.mending = true;
    }

    fn read_head(&self) -> Result<Option<(Head, u32)>> {
        let mut bytes = Buffer::zeroed(1);
        self.file.read_at(&mut bytes, 0).during(|| format!("reading {IMAGES_FILE}"))?;
        let mut found = Head::decode(&bytes);
        if found.is_none() && self.mending && restore_bit(&mut bytes, CHECKSUM_AT) {
            found = Head::decode(&bytes);
        }
        Ok(found.filter(|(head, _)| head.salt == self.salt))
    }

    /// The keys of the images, or `None` if they are damaged.
    fn read_keys(&self, head: &Head) -> Result<Option<Buffer>> {
        let doing = || format!("reading {IMAGES_FILE}");
        if length(head.count) > self.file.len().during(doing)? {
            return Ok(None);
        }
        let mut keys = Buffer::zeroed(head.count.div_ceil(KEYS_PER_BLOCK) as usize);
        if !keys.is_empty() {
            self.file.read_at(&mut keys, BLOCK_SIZE as u64).during(doing)?;
        }
        let whole =
            checksum(&keys) == head.keys_checksum || self.mending && restore_bit_of(&mut keys, head.keys_checksum);
        Ok(whole.then_some(keys))
    }

    /// Reconstructs the superblock if both copies are lost. If the images file was never written, the result is the
    /// superblock of a new datastore. If all images in the file are undamaged, the result is the superblock after their
    /// checkpoint, whether or not a superblock named the images: everything that the images refer to was durable before
    /// they were written, and a later checkpoint would have overwritten them with its own images. Half of the
    /// datastore's UUID cannot be reconstructed. `None` if images are damaged: nothing then proves which state is the
    /// newest.
    pub fn lost_superblock(&self, journal_size: u64) -> Result<Option<Superblock>> {
        let mut bytes = Buffer::zeroed(1);
        self.file.read_at(&mut bytes, 0).during(|| format!("reading {IMAGES_FILE}"))?;
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.salt.to_le_bytes());
        let start = Place { position: 0, sequence: 1 };
        let mut superblock = Superblock {
            version: FORMAT_VERSION,
            uuid,
            sequence: 1,
            journal_size,
            record: CheckpointRecord {
                tail: start,
                ordered: start,
                data_regions: 0,
                map_regions: 0,
                map_length: 0,
                catalog_slots: 0,
                next_id: 1,
            },
            created: 0,
            clean: false,
            incarnation: 0,
            checkpoint: 0,
            images: None,
            unreported: Unreported::default(),
        };
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(Some(superblock));
        }
        let Some((head, checksum)) = self.read_head()? else { return Ok(None) };
        if !self.each(&head, &mut |_| Ok(()))? {
            return Ok(None);
        }
        superblock.record = head.record;
        superblock.checkpoint = head.number;
        superblock.incarnation = head.incarnation;
        superblock.images = Some(NamedImages { count: head.count, checksum });
        Ok(Some(superblock))
    }

    /// The salt of a datastore without a readable superblock.
    pub fn lost_salt(directory: &dyn Directory) -> Option<u64> {
        let mut bytes = Buffer::zeroed(1);
        directory.open(IMAGES_FILE, IoMode::Buffered).ok()?.read_at(&mut bytes, 0).ok()?;
        if Head::decode(&bytes).is_none() {
            restore_bit(&mut bytes, CHECKSUM_AT);
        }
        Head::decode(&bytes).map(|(head, _)| head.salt)
    }

    /// Writes the undamaged images to their places. Invalidates the places of the damaged ones, because they may hold
    /// pages of the previous checkpoint. Returns the number of damaged images, or `None` if the keys are damaged.
    pub fn take_whole_home(&self, files: &[Arc<dyn File>; PageFile::COUNT]) -> Result<Option<(Head, u64)>> {
        let Some((head, _)) = self.read_head()? else { return Ok(None) };
        let Some(keys) = self.read_keys(&head)? else { return Ok(None) };
        let mut at = (1 + head.count.div_ceil(KEYS_PER_BLOCK)) * BLOCK_SIZE as u64;
        let mut lost = 0;
        for raw in keys[..8 * head.count as usize].chunks_exact(8) {
            let raw = u64::from_le_bytes(raw.try_into().expect("eight bytes"));
            let Some(key) = PageKey::from_raw(raw) else { return Ok(None) };
            let mut page = Block([0; BLOCK_SIZE]);
            let read = self.file.read_at(&mut page.0, at).is_ok();
            at += BLOCK_SIZE as u64;
            if !read || !self.is_image(&mut page, key) {
                page = Block([0xff; BLOCK_SIZE]);
                lost += 1;
            }
            let file = &files[key.file() as usize];
            file.write_at(&[&page.0], key.offset(), false).during(|| format!("writing {key} to its place"))?;
        }
        Ok(Some((head, lost)))
    }

    /// Whether a page is an undamaged image of `key`. With `mending`, one inverted bit is corrected first.
    fn is_image(&self, page: &mut Block, key: PageKey) -> bool {
        // A page of zeros counts as never written, and is no image.
        let whole = |page: &mut Block| page.0[0..4] != [0; 4] && verify(page, key).is_ok();
        whole(page) || self.mending && restore_bit(&mut page.0, 12) && whole(page)
    }

    /// The number of images for which the file has room.
    pub fn capacity(&self) -> Result<u64> {
        Ok(capacity(self.file.len().during(|| format!("measuring {IMAGES_FILE}"))?))
    }

    /// Grows the file to have room for this many images.
    pub fn reserve(&self, pages: u64) -> Result<()> {
        let before = self.file.len().during(|| format!("measuring {IMAGES_FILE}"))?;
        let wanted = length(pages);
        if wanted <= before {
            return Ok(());
        }
        if let Err(error) = self.file.reserve(before, wanted - before) {
            // If the file system runs full during the reservation, the file keeps the blocks allocated so far.
            // Shortening the file frees them.
            let _ = self.file.set_len(before);
            return Err(error).during(|| format!("reserving {wanted} bytes for checkpoints ({IMAGES_FILE})"));
        }
        Ok(())
    }

    /// Makes the reserved length durable.
    pub fn sync(&self) -> Result<()> {
        self.file.sync().during(|| format!("flushing {IMAGES_FILE}"))
    }

    /// Writes the images of a checkpoint and flushes them. Returns the fields that the superblock must have.
    pub fn write(
        &self,
        number: u64,
        incarnation: u64,
        record: CheckpointRecord,
        images: &Pages,
    ) -> Result<NamedImages> {
        let count = images.len() as u64;
        let key_blocks = count.div_ceil(KEYS_PER_BLOCK);
        let mut start = Buffer::zeroed(1 + key_blocks as usize);
        for (i, (key, _)) in images.iter().enumerate() {
            let at = BLOCK_SIZE + 8 * i;
            start[at..at + 8].copy_from_slice(&key.raw().to_le_bytes());
        }
        let keys_checksum = checksum(&start[BLOCK_SIZE..]);
        let head = Head { salt: self.salt, number, count, keys_checksum, incarnation, record }.encode();
        start[..BLOCK_SIZE].copy_from_slice(&head);
        let doing = || format!("writing {count} page images of a checkpoint");
        let mut at = 0;
        for part in start.chunks(PAGES_AT_A_TIME * BLOCK_SIZE) {
            self.file.write_at(&[part], at, false).during(doing)?;
            at += part.len() as u64;
        }
        for part in images.chunks(PAGES_AT_A_TIME) {
            let pages: Vec<Block> = part.iter().map(|(_, page)| sealed(page)).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&pages);
            self.file.write_at(&[bytes], at, false).during(doing)?;
            self.file.write_out(at, bytes.len() as u64, false);
            at += bytes.len() as u64;
        }
        self.file.sync().during(doing)?;
        let checksum = u32::from_le_bytes(head[36..40].try_into().expect("four bytes"));
        Ok(NamedImages { count, checksum })
    }

    /// The images that have to be written to their places before any metadata is read: those that the superblock names.
    /// If the other copy of the superblock cannot be read, that copy may have been newer. Then undamaged images of the
    /// next checkpoint are returned, whether or not that copy named them: everything that the images refer to was
    /// durable before they were written. A file that is not needed need not be readable.
    pub fn outstanding(&self, superblock: &Superblock, other_copy_lost: bool) -> Result<Option<Head>> {
        if self.file.len().during(|| format!("measuring {IMAGES_FILE}"))? < BLOCK_SIZE as u64 {
            return match superblock.images {
                Some(_) => Err(damaged("the file was truncated")),
                None => Ok(None),
            };
        }
        let found = match patiently(|| self.read_head()) {
            Err(error) if error.kind() == ErrorKind::Io && superblock.images.is_none() && !other_copy_lost => {
                tracing::warn!(%error, "the images of the last checkpoint cannot be read, and are not needed");
                return Ok(None);
            }
            found => found?,
        };
        if let Some(named) = superblock.images {
            let Some((head, sum)) = found else { return Err(damaged("its head is damaged")) };
            if head.number != superblock.checkpoint || head.count != named.count || sum != named.checksum {
                return Err(damaged("it holds another checkpoint than the superblock names"));
            }
            if !self.each(&head, &mut |_| Ok(()))? {
                return Err(damaged("some of its page images are damaged"));
            }
            return Ok(Some(head));
        }
        let Some((head, _)) = found else { return Ok(None) };
        let follows = head.number == superblock.checkpoint + 1 && head.record.tail >= superblock.record.tail;
        let whole = other_copy_lost && follows && self.each(&head, &mut |_| Ok(()))?;
        Ok(whole.then_some(head))
    }

    /// The positions of the images of checkpoint `number`, if the file still contains them.
    pub fn index(&self, number: u64) -> Option<ImageIndex> {
        let (head, _) = self.read_head().ok()?.filter(|(head, _)| head.number == number)?;
        let keys = self.read_keys(&head).ok()??;
        let key_blocks = head.count.div_ceil(KEYS_PER_BLOCK);
        let first = (1 + key_blocks) * BLOCK_SIZE as u64;
        let raw = keys.chunks_exact(8).take(head.count as usize);
        let places = raw.zip(0u64..).filter_map(|(raw, i)| {
            let key = PageKey::from_raw(u64::from_le_bytes(raw.try_into().ok()?))?;
            Some((key, first + i * BLOCK_SIZE as u64))
        });
        Some(ImageIndex { places: places.collect(), file: Arc::clone(&self.file) })
    }

    /// Writes images to their places and flushes them.
    pub fn take_home(&self, head: &Head, files: &[Arc<dyn File>; PageFile::COUNT]) -> Result<()> {
        match self.each(head, &mut |images| write_home(files, images))? {
            true => Ok(()),
            false => Err(damaged("some of its page images are damaged")),
        }
    }

    /// Calls `each` with all images in portions. Returns false at the first damaged image.
    fn each(&self, head: &Head, each: &mut Part<'_>) -> Result<bool> {
        let doing = || format!("reading {IMAGES_FILE}");
        let Some(keys) = self.read_keys(head)? else { return Ok(false) };
        let key_blocks = head.count.div_ceil(KEYS_PER_BLOCK);
        let mut at = (1 + key_blocks) * BLOCK_SIZE as u64;
        let keys = &keys[..8 * head.count as usize];
        for part in keys.chunks(8 * PAGES_AT_A_TIME) {
            let mut bytes = Buffer::zeroed(part.len() / 8);
            self.file.read_at(&mut bytes, at).during(doing)?;
            at += bytes.len() as u64;
            let mut images = Vec::with_capacity(part.len() / 8);
            for (raw, page) in part.chunks_exact(8).zip(bytes.chunks_exact(BLOCK_SIZE)) {
                let raw = u64::from_le_bytes(raw.try_into().expect("eight bytes"));
                let Some(key) = PageKey::from_raw(raw) else { return Ok(false) };
                let mut page = Block(page.try_into().expect("a block"));
                if !self.is_image(&mut page, key) {
                    return Ok(false);
                }
                images.push((key, Arc::new(page)));
            }
            each(&images)?;
        }
        Ok(true)
    }
}

/// Fails if a file system with `available` free bytes has no room to grow the file from `known` images to `pages`.
pub fn check_room(available: u64, pages: u64, known: u64) -> Result<()> {
    if available >= length(pages) - length(known) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        format!("the file system of the datastore is full: {} bytes for checkpoints cannot be reserved", length(pages)),
    ))
}

fn damaged(what: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "pages of the last checkpoint have to be taken from '{IMAGES_FILE}', and {what}; run 'lamina check \
             --repair', or read out the undamaged data with 'lamina salvage'"
        ),
    )
}
