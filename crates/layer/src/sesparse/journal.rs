//! ESXi's journal. lamina replays a journal that ESXi left unreplayed, and never writes one.
//!
//! A transaction is the new content of up to 24 metadata sectors, in a slot of 25 sectors. Its checksum algorithm is
//! not published, so a torn transaction cannot be recognised by its own bytes. Two things can be proven:
//!
//! * a transaction with a successor was complete before the successor began;
//! * the last one was complete if a header counts it, or if its sectors are in place already.
//!
//! So a replay, which has to be requested, requires an unbroken sequence from slot 0 to the last transaction. Each
//! transaction must have valid counts, targets within the metadata, and payload that decodes. The last one is left out,
//! with a note, if it is not proven complete. Any other journal is refused: then only ESXi can open the image.

use super::entry::{Entry, Owner, decode_slot};
use super::header::{Area, Layout, Volatile, Words, journal_sequence, put_journal_header};
use super::read::read_sectors;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::{BLOCK_SIZE, Buffer, File};
use rustc_hash::FxHashMap;
use std::fmt;
use std::sync::Arc;

const SLOT_MAGIC: u64 = 0x00c0_ffee;
/// Sectors per slot: a header, and up to 24 of payload.
const SLOT_SECTORS: u64 = 25;
/// Size of the journal in sectors; no other size is known.
const JOURNAL_SECTORS: u64 = 2048;
const SLOTS: u64 = JOURNAL_SECTORS / SLOT_SECTORS;
const RECORDS_AT: usize = 128;
const SECTOR_BYTES: usize = SECTOR as usize;

/// Sectors from a replay in memory, which replace those of the file.
pub(super) type Overlay = FxHashMap<u64, Box<[u8; SECTOR_BYTES]>>;

/// The result of the replay at the opening of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Transactions replayed.
    pub transactions: u64,
    /// Sequence number of the last replayed transaction.
    pub last: u64,
    /// Sequence number of a transaction that was left out, because it is not proven complete.
    pub dropped: Option<u64>,
}

impl fmt::Display for Replayed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} transactions replayed", self.transactions)?;
        if self.transactions > 0 {
            write!(f, ", the last number {}", self.last)?;
        }
        match self.dropped {
            Some(number) => write!(f, "; number {number} left out, because it is not proven complete"),
            None => Ok(()),
        }
    }
}

struct Transaction {
    sequence: u64,
    records: Vec<(u64, Box<[u8; SECTOR_BYTES]>)>,
}

/// The error for an image with a dirty journal.
pub(super) fn refuse(name: &str) -> Error {
    let text = format!(
        "{name}: its journal was not replayed, so its tables may be out of date; let ESXi open and close it, or give \
         --replay-journal to replay what can be proven whole"
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Reads the journal, and determines the sectors that a replay writes. `volatile` is the volatile header of the image.
pub(super) fn read(
    file: &Arc<dyn File>,
    name: &str,
    layout: &Layout,
    volatile: &Volatile,
) -> Result<(Overlay, Replayed)> {
    let unproven = |what: String| {
        let text = format!("{name}: its journal cannot be replayed: {what}; only ESXi can open it as it is");
        Error::new(ErrorKind::Corrupt, text)
    };
    if layout.journal.size != JOURNAL_SECTORS {
        return Err(unproven(format!("it has {} sectors, not {JOURNAL_SECTORS}", layout.journal.size)));
    }
    let read = |sector, count| read_sectors(file, sector, count).during(|| format!("reading the journal of {name}"));
    let header = journal_sequence(&read(layout.journal_header.offset, 1)?);
    let counted = volatile.next_sequence.max(header.unwrap_or(0));

    let mut slots = Vec::with_capacity(SLOTS as usize);
    for slot in 0..SLOTS {
        let sectors = read(layout.journal.offset + slot * SLOT_SECTORS, SLOT_SECTORS as usize)?;
        slots.push(decode_transaction(&sectors, slot, layout));
    }
    let found = slots.iter().zip(0usize..).filter_map(|(slot, index)| slot.as_ref().ok().map(|slot| (slot, index)));
    let Some((last, at)) = found.map(|(slot, index)| (slot.sequence, index)).max() else {
        return Err(unproven("it holds no transaction".to_owned()));
    };
    if counted > last.saturating_add(1) {
        return Err(unproven(format!("it ends at transaction {last}, its headers count to {counted}")));
    }
    // The slots of the last session in the order of writing. A session begins at slot 0. If it wrapped around the end,
    // the transactions in the later slots are older ones of the same session.
    let mut order: Vec<usize> = (0..=at).collect();
    let sequence_of = |slot: usize| slots.get(slot).and_then(|slot| slot.as_ref().ok()).map(|slot| slot.sequence);
    let older = (at + 1..slots.len()).rev().zip(1..);
    let first = last.checked_sub(at as u64);
    let round = older
        .take_while(|(slot, by)| first.is_some_and(|first| first >= *by && sequence_of(*slot) == Some(first - by)));
    order.splice(0..0, round.map(|(slot, _)| slot).collect::<Vec<_>>().into_iter().rev());
    let begin = last.checked_sub(order.len() as u64 - 1);
    for (slot, by) in order.iter().zip(0..) {
        let expected = begin.and_then(|begin| begin.checked_add(by));
        if let Err(what) = &slots[*slot] {
            return Err(unproven(format!("slot {slot} is no transaction: {what}")));
        }
        if expected.is_none() || sequence_of(*slot) != expected {
            return Err(unproven(format!("slot {slot} is out of sequence")));
        }
    }

    let mut overlay = Overlay::default();
    let mut replayed = Replayed::default();
    for slot in order {
        let Some(transaction) = slots.get_mut(slot).and_then(|slot| slot.as_mut().ok()) else { continue };
        let damage =
            transaction.records.iter().find_map(|(sector, payload)| check_payload(layout, *sector, &payload[..]));
        let is_last = transaction.sequence == last;
        if is_last && (damage.is_some() || (counted <= last && !is_in_place(transaction, &overlay, &read)?)) {
            replayed.dropped = Some(last);
            break;
        }
        if let Some(what) = damage {
            return Err(unproven(format!("transaction {} would write {what}", transaction.sequence)));
        }
        replayed.transactions += 1;
        replayed.last = transaction.sequence;
        overlay.extend(transaction.records.drain(..));
    }
    Ok((overlay, replayed))
}

/// Whether every sector of a transaction is in place already.
fn is_in_place(
    transaction: &Transaction,
    overlay: &Overlay,
    read: &impl Fn(u64, usize) -> Result<Vec<u8>>,
) -> Result<bool> {
    for (sector, payload) in &transaction.records {
        let same = match overlay.get(sector) {
            Some(before) => before == payload,
            None => read(*sector, 1)?[..] == payload[..],
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

fn decode_transaction(sectors: &[u8], slot: u64, layout: &Layout) -> std::result::Result<Transaction, String> {
    let words = Words(sectors);
    if words.get(0) != SLOT_MAGIC {
        return Err("its magic number is wrong".to_owned());
    }
    if words.get(16) != slot {
        return Err(format!("its slot number is {}", words.get(16)));
    }
    let used = words.get(24);
    if !(2..=SLOT_SECTORS).contains(&used) {
        return Err(format!("its length is {used} sectors"));
    }
    if words.get(40) == u64::MAX {
        return Err("its sequence number is the largest possible".to_owned());
    }
    let mut records = Vec::new();
    for (index, payload) in (0..used - 1).zip(sectors[SECTOR_BYTES..].as_chunks().0) {
        let at = RECORDS_AT + index as usize * 16;
        let (target, count) = (words.get(at), words.get(at + 8));
        if count != 1 || area_of(layout, target).is_none() {
            return Err(format!("it targets {count} sectors at {target}"));
        }
        records.push((target, Box::new(*payload)));
    }
    Ok(Transaction { sequence: words.get(40), records })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Volatile,
    Directory,
    Tables,
    Bitmap,
    Backmap,
}

fn area_of(layout: &Layout, sector: u64) -> Option<Target> {
    let areas = [
        (layout.volatile, Target::Volatile),
        (layout.directory, Target::Directory),
        (layout.tables, Target::Tables),
        (layout.bitmap, Target::Bitmap),
        (layout.backmap, Target::Backmap),
    ];
    let within = |area: &Area| (area.offset..area.end()).contains(&sector);
    areas.iter().find(|(area, _)| within(area)).map(|(_, target)| *target)
}

/// Why the payload for a sector is invalid; `None` if it is valid.
fn check_payload(layout: &Layout, sector: u64, payload: &[u8]) -> Option<&'static str> {
    let words = || payload.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let (sane, what) = match area_of(layout, sector)? {
        Target::Volatile => (Volatile::decode(payload).is_ok(), "an invalid volatile header"),
        Target::Directory => (words().all(|raw| decode_slot(raw).is_some()), "invalid slots"),
        Target::Tables => (words().all(|raw| Entry::decode(raw).is_some()), "invalid table entries"),
        Target::Backmap => (words().all(|raw| raw == 0 || Owner::decode(raw).is_some()), "invalid owners"),
        Target::Bitmap => (true, ""),
    };
    (!sane).then_some(what)
}

/// Writes a replay into the file and marks the journal as replayed. After a power cut during the replay, the journal is
/// unchanged, and a second replay writes the same sectors again.
pub(super) fn apply(
    file: &Arc<dyn File>,
    name: &str,
    layout: &Layout,
    overlay: &Overlay,
    replayed: &Replayed,
) -> Result<()> {
    let failed = || format!("replaying the journal of {name}");
    let mut sectors: Vec<_> = overlay.iter().filter(|(sector, _)| **sector != layout.volatile.offset).collect();
    sectors.sort_unstable_by_key(|(sector, _)| **sector);
    for (sector, payload) in sectors {
        write_sector(file, *sector, &payload[..]).during(failed)?;
    }
    file.sync().during(failed)?;
    let mut block = Buffer::zeroed(1);
    file.read_at(&mut block, 0).during(failed)?;
    let at = layout.volatile.start() as usize;
    if let Some(header) = overlay.get(&layout.volatile.offset) {
        block[at..at + SECTOR_BYTES].copy_from_slice(&header[..]);
    }
    let invalid = |what| Error::new(ErrorKind::Corrupt, format!("{name}: {what}"));
    let before = Volatile::decode(&block[at..at + SECTOR_BYTES]).map_err(invalid)?;
    // The number of a transaction that was left out is skipped, so that no later transaction gets the same number.
    let next = before.next_sequence.max(replayed.dropped.unwrap_or(replayed.last).saturating_add(1));
    Volatile { next_sequence: next, replay: 0, ..before }.encode(&mut block[at..]);
    file.write_at(&[&block], 0, false).during(failed)?;
    file.sync().during(failed)?;
    // The journal header is written last: while the volatile header still requires a replay, a higher count here would
    // prove that the transaction left out was complete.
    put_journal_header(&mut block[layout.journal_header.start() as usize..], next);
    file.write_at(&[&block], 0, false).during(failed)?;
    file.sync().during(failed)
}

/// Clears a journal that has been replayed, because its content will be out of date after the next changes.
pub(super) fn clear(file: &Arc<dyn File>, name: &str, layout: &Layout) -> Result<()> {
    let failed = || format!("clearing the journal of {name}");
    let slots = layout.journal.size.min(JOURNAL_SECTORS) / SLOT_SECTORS;
    for slot in 0..slots {
        let first = read_sectors(file, layout.journal.offset + slot * SLOT_SECTORS, 1).during(failed)?;
        if first.iter().any(|byte| *byte != 0) {
            let area = layout.journal.bytes();
            file.punch(area.start, area.end - area.start).during(failed)?;
            return file.sync().during(failed);
        }
    }
    Ok(())
}

/// Writes one sector, in either I/O mode.
fn write_sector(file: &Arc<dyn File>, sector: u64, payload: &[u8]) -> std::io::Result<()> {
    let offset = sector * SECTOR;
    if file.mode() == backend::IoMode::Buffered {
        return file.write_at(&[payload], offset, false);
    }
    let within = (offset % BLOCK_SIZE as u64) as usize;
    let mut block = Buffer::zeroed(1);
    file.read_at(&mut block, offset - within as u64)?;
    block[within..within + SECTOR_BYTES].copy_from_slice(payload);
    file.write_at(&[&block], offset - within as u64, false)
}
