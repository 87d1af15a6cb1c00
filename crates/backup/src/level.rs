//! Levels: the backups of a chain, read pack by pack. A level has the content of one segment in memory at a time.

use crate::manifest::{Manifest, PackRecord};
use crate::objects::Objects;
use crate::pack::{Content, HEAD, Head, Index};
use crate::repository::pack_name;
use crate::seal::{Key, PackReader};
use error::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;

/// A backup that is being read.
pub trait Level {
    /// Capacity of the disk in this backup, in bytes.
    fn capacity(&self) -> u64;

    /// The content of a segment; `None` if the backup has no content in this segment. Segments of streams are read in
    /// ascending order only.
    fn content(&mut self, segment: u32) -> Result<Option<Content>>;

    /// Bytes of the pack that covers the segment for which [`Level::content`] was called last.
    fn read(&mut self, range: Range<u64>) -> Result<Vec<u8>>;

    /// Called after the last segment was read: verifies what follows in a stream.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A backup of a repository, read at any place: the index of a pack first, then only the chunks that are needed.
pub struct StoredLevel {
    objects: Arc<dyn Objects>,
    manifest: Arc<Manifest>,
    id: [u8; 16],
    key: Option<Arc<Key>>,
    current: Option<(u32, PackReader, Index)>,
}

impl StoredLevel {
    /// A level for a backup.
    pub fn new(objects: Arc<dyn Objects>, manifest: Arc<Manifest>, key: Option<&Arc<Key>>) -> Result<Self> {
        let id = manifest.backup.id_bytes()?;
        let key = manifest.backup.choose_key(key)?;
        Ok(Self { objects, manifest, id, key, current: None })
    }

    fn load(&mut self, number: u32) -> Result<()> {
        if self.current.as_ref().is_some_and(|(current, ..)| *current == number) {
            return Ok(());
        }
        let name = pack_name(&self.manifest.backup.id, number);
        let place = self.objects.place();
        let head = self.objects.read(&name, 0..HEAD as u64)?;
        let loaded = self.expected(number, &head).and_then(|head| {
            let mut fetch = |range| self.objects.read(&name, range);
            let reader = PackReader::new(head, self.key.as_ref(), &mut fetch)?;
            let index = head.decode_index(&reader.read(head.index_range(), &mut fetch)?)?;
            Ok((number, reader, index))
        });
        self.current = Some(loaded.map_err(|error| error.context(format!("'{name}' in '{place}'")))?);
        Ok(())
    }

    /// Decodes a head, and compares it with the manifest.
    fn expected(&self, number: u32, head: &[u8]) -> Result<Head> {
        check_head(&self.manifest.packs, number as usize, self.id, head)
    }
}

/// Decodes the head of a pack, and compares it with the record of the pack in a manifest.
pub(crate) fn check_head(packs: &[PackRecord], number: usize, backup: [u8; 16], bytes: &[u8]) -> Result<Head> {
    let head = Head::decode(bytes)?;
    let first = if number == 0 { 0 } else { packs.get(number - 1).map_or(0, |before| before.end) };
    let same = packs.get(number).is_some_and(|pack| *pack == record_of(&head, bytes));
    match same && head.backup == backup && head.number as usize == number && head.first == first {
        true => Ok(head),
        false => Err(Error::new(ErrorKind::Corrupt, "the head of the pack differs from its record in the manifest")),
    }
}

/// The record of a pack in a manifest; `bytes` begin with the encoded head.
pub(crate) fn record_of(head: &Head, bytes: &[u8]) -> PackRecord {
    let sum = bytes.get(HEAD - 4..HEAD).and_then(|sum| sum.try_into().ok()).map_or(0, u32::from_le_bytes);
    PackRecord { end: head.end, length: head.length(), sum }
}

impl Level for StoredLevel {
    fn capacity(&self) -> u64 {
        self.manifest.backup.capacity
    }

    fn content(&mut self, segment: u32) -> Result<Option<Content>> {
        // A parent may be smaller than the disk is now.
        let Some(number) = self.manifest.pack_of(segment) else { return Ok(None) };
        self.load(number as u32)?;
        Ok(self.current.as_ref().and_then(|(.., index)| index.get(&segment).cloned()))
    }

    fn read(&mut self, range: Range<u64>) -> Result<Vec<u8>> {
        match &self.current {
            Some((number, reader, _)) => {
                let name = pack_name(&self.manifest.backup.id, *number);
                reader.read(range, &mut |range| self.objects.read(&name, range))
            }
            None => Err(Error::new(ErrorKind::Invalid, "no pack was read yet")),
        }
    }
}
