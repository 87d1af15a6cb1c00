//! Reads the journal before it is replayed: where it ends, which checkpoint it has, and whether it is damaged.

use super::Opening;
use crate::engine::log::CheckpointRecord;
use crate::journal::{BatchKind, Journal, Place};
use crate::pages::{PageKey, verify};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Block};
use std::sync::Arc;

pub struct FoundCheckpoint {
    record: CheckpointRecord,
    end: Place,
}

pub struct Survey {
    pub end: Place,
    pub incarnation: u64,
    pub checkpoint: Option<FoundCheckpoint>,
    /// The place of an undamaged batch or trailer past the end of the journal: the journal is damaged before it.
    pub beyond: Option<Place>,
}

impl Survey {
    /// Fails if acknowledged changes are lost.
    pub(super) fn check_whole(&self, opening: Opening) -> Result<()> {
        let Some(place) = self.beyond else { return Ok(()) };
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "the journal is damaged at position {}: undamaged records follow at {}, so changes acknowledged in \
                 between are lost; {}",
                self.end.position,
                place.position,
                opening.advice()
            ),
        ))
    }
}

impl FoundCheckpoint {
    /// The superblock fields of the checkpoint.
    pub fn record(&self) -> CheckpointRecord {
        self.record
    }
}

/// Reads the journal to its end without applying it.
pub fn survey(journal: &Journal, incarnation: u64) -> Result<Survey> {
    let mut found = Survey { end: journal.tail(), incarnation, checkpoint: None, beyond: None };
    let mut lowest = incarnation;
    while let Some(batch) = journal.read(found.end, lowest)? {
        if batch.next.position - journal.tail().position > journal.size() {
            break;
        }
        if batch.kind == BatchKind::Checkpoint
            && let Some(record) = CheckpointRecord::decode(&batch.body)
            && record.tail >= journal.tail()
            && record.ordered >= record.tail
        {
            found.checkpoint = Some(FoundCheckpoint { record, end: batch.place });
        }
        lowest = batch.incarnation;
        found.incarnation = found.incarnation.max(batch.incarnation);
        found.end = batch.next;
    }
    found.beyond = journal.continuation(found.end, found.incarnation)?;
    Ok(found)
}

/// The page images of a checkpoint of version 1: those appended between its tail and its end.
pub fn collect_images(
    journal: &Journal,
    tail: Place,
    checkpoint: &FoundCheckpoint,
    images: &mut Vec<(PageKey, Arc<Block>)>,
) -> Result<()> {
    let damaged = || Error::new(ErrorKind::Corrupt, "a checkpoint in the journal holds an impossible page");
    let mut place = checkpoint.record.tail.max(tail);
    while place != checkpoint.end {
        let batch = journal.read(place, 0)?.ok_or_else(damaged)?;
        if batch.kind == BatchKind::Pages {
            for image in batch.body.chunks(BLOCK_SIZE + 8) {
                let (raw, bytes) = image.split_at_checked(8).ok_or_else(damaged)?;
                let raw = u64::from_le_bytes(raw.try_into().map_err(|_| damaged())?);
                let key = PageKey::from_raw(raw).ok_or_else(damaged)?;
                let mut page = Block(bytes.try_into().map_err(|_| damaged())?);
                verify(&mut page, key)?;
                images.push((key, Arc::new(page)));
            }
        }
        place = batch.next;
    }
    images.sort_by_key(|(key, _)| *key);
    Ok(())
}
