//! Compares the ring with a list of appended batches, and encodes and decodes every operation.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::ErrorKind;
use crate::space::Run;
use crate::testbed::{Random, plain_file};
use crate::tree::{Packed, PhysicalRun, Source};
use backend::SharedSlice;

const SIZE: u64 = 512 * 4096;
const SALT: u64 = 0x5a17;
const START: Place = Place { position: 0, sequence: 1 };

struct Appended {
    place: Place,
    next: Place,
    kind: BatchKind,
    incarnation: u64,
    body: Vec<u8>,
}

fn ring() -> (Arc<dyn File>, Journal) {
    let file = plain_file("journal");
    file.set_len(SIZE).unwrap();
    let mut journal = Journal::new(Arc::clone(&file), SIZE, SALT, START);
    journal.resume(START, 1);
    (file, journal)
}

fn append(random: &mut Random, journal: &mut Journal, length: usize) -> Option<Appended> {
    let kind = *random.pick(&[BatchKind::Operations, BatchKind::Pages, BatchKind::Checkpoint]);
    let body = random.bytes(length);
    let cut = random.below(length as u64 + 1) as usize;
    let place = journal.head();
    let fits = journal.used() + Journal::footprint(length) <= SIZE;
    match journal.append(kind, &[&body[..cut], &body[cut..]]) {
        Ok(()) => assert!(fits),
        Err(error) => {
            assert_eq!((error.kind(), fits), (ErrorKind::NoSpace, false));
            assert_eq!(journal.head(), place, "a refused batch moves nothing");
            return None;
        }
    }
    Some(Appended { place, next: journal.head(), kind, incarnation: journal.incarnation(), body })
}

/// A ring with three batches at a random position, possibly across the end of the file. Also returns the place of the
/// first batch.
fn three_batches(random: &mut Random) -> (Arc<dyn File>, Place, Journal, Vec<Appended>) {
    let (file, _) = ring();
    let start = Place { position: random.below(SIZE / 4096) * 4096, sequence: 1 + random.below(1000) };
    let mut journal = Journal::new(Arc::clone(&file), SIZE, SALT, start);
    journal.resume(start, 1);
    let batches = (0..3).map(|_| append(random, &mut journal, 5000).unwrap()).collect();
    (file, start, journal, batches)
}

/// All batches from `tail` on, read with and without reading ahead.
fn survey(file: &Arc<dyn File>, tail: Place) -> Vec<Batch> {
    let mut journal = Journal::new(Arc::clone(file), SIZE, SALT, tail);
    let each = read_all(&journal, tail);
    journal.read_ahead();
    let ahead = read_all(&journal, tail);
    assert!(each.iter().map(|batch| &batch.body).eq(ahead.iter().map(|batch| &batch.body)));
    each
}

fn read_all(journal: &Journal, tail: Place) -> Vec<Batch> {
    let (mut found, mut at, mut incarnation) = (Vec::new(), tail, 0);
    while let Some(batch) = journal.read(at, incarnation).unwrap() {
        (at, incarnation) = (batch.next, batch.incarnation);
        found.push(batch);
        assert!(found.len() as u64 <= SIZE / 4096, "following the ring does not end");
    }
    found
}

fn compare(found: &[Batch], appended: &[Appended]) {
    assert_eq!(found.len(), appended.len());
    for (found, appended) in found.iter().zip(appended) {
        assert_eq!((found.place, found.next), (appended.place, appended.next));
        assert_eq!((found.kind, found.incarnation), (appended.kind, appended.incarnation));
        assert!(found.body == appended.body);
    }
}

#[test]
fn recovery_finds_all_appended_batches_after_wraps_crashes_and_torn_tails() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let (file, mut journal) = ring();
        let mut appended: Vec<Appended> = Vec::new();
        for _ in 0..300 {
            match random.below(100) {
                0..70 => {
                    let length = random.scaled(100 * 4096) as usize;
                    appended.extend(append(&mut random, &mut journal, length));
                }
                70..90 => {
                    // Models a checkpoint: the oldest batches are not needed any more.
                    let count = random.below(appended.len() as u64 + 1) as usize;
                    appended.drain(..count);
                    journal.release(appended.first().map_or(journal.head(), |first| first.place));
                }
                90..95 => compare(&survey(&file, journal.tail()), &appended),
                _ => {
                    // Models a power cut during the write of the last batch: sectors of this batch only are lost.
                    if let Some(last) = appended.pop() {
                        let sectors = (last.next.position - last.place.position) / 512;
                        let mut lost: Vec<u64> = (0..sectors).filter(|_| random.percent(50)).collect();
                        // The sector with the head is always among the lost ones.
                        lost.push(0);
                        for sector in lost {
                            let at = (last.place.position + sector * 512) % SIZE;
                            file.write_at(&[&random.bytes(512)], at, false).unwrap();
                        }
                    }
                    let found = survey(&file, journal.tail());
                    compare(&found, &appended);
                    // A torn batch is never reported as damage.
                    let end = found.last().map_or(journal.tail(), |last| last.next);
                    let incarnation = found.last().map_or(0, |last| last.incarnation);
                    assert_eq!(journal.continuation(end, incarnation).unwrap(), None);
                    let tail = journal.tail();
                    let incarnation = journal.incarnation() + 1;
                    journal = Journal::new(Arc::clone(&file), SIZE, SALT, tail);
                    journal.resume(found.last().map_or(tail, |last| last.next), incarnation);
                }
            }
        }
        compare(&survey(&file, journal.tail()), &appended);
    }
}

#[test]
fn a_full_ring_refuses_a_batch_that_would_reach_its_tail() {
    let (file, mut journal) = ring();
    // Each batch has three blocks, so two blocks are free after the last batch that fits.
    let body = vec![0x5a; 3 * 4096 - 64];
    let mut appended = 0;
    while journal.append(BatchKind::Operations, &[&body]).is_ok() {
        appended += 1;
    }
    assert_eq!((appended, journal.used()), (170, 510 * 4096));
    assert_eq!(survey(&file, START).len(), 170, "the first batch is as it was");
}

#[test]
fn a_batch_missing_in_the_middle_is_distinguished_from_a_torn_end() {
    for seed in 0..50 {
        let mut random = Random(seed);
        let (file, start, journal, batches) = three_batches(&mut random);
        let lost = random.below(3) as usize;
        file.write_at(&[&[0x77; 64]], batches[lost].place.position % SIZE, false).unwrap();
        let found = survey(&file, start);
        assert_eq!(found.len(), lost);
        let end = found.last().map_or(start, |last| last.next);
        let expected = batches.get(lost + 1).map(|next| next.place);
        assert_eq!(journal.continuation(end, 1).unwrap(), expected);
    }
    // The superblock is outdated: the ring has been overwritten past the tail that it names.
    let mut random = Random(7);
    let (file, mut journal) = ring();
    for _ in 0..300 {
        append(&mut random, &mut journal, 5000).unwrap();
        journal.release(journal.head());
    }
    assert_eq!(survey(&file, START).len(), 0);
    assert!(journal.continuation(START, 1).unwrap().is_some());
}

#[test]
fn batches_behind_a_lost_batch_are_not_replayed() {
    let mut random = Random(3);
    let (file, mut journal) = ring();
    let lives: Vec<Appended> = (0..3).map(|_| append(&mut random, &mut journal, 5000).unwrap()).collect();
    // The second batch is lost. The third one remains, with the sequence number and place of a continuation.
    file.write_at(&[&[0; 512]], lives[1].place.position, false).unwrap();
    assert_eq!(survey(&file, START).len(), 1);
    let mut journal = Journal::new(Arc::clone(&file), SIZE, SALT, START);
    journal.resume(lives[0].next, 2);
    let second = append(&mut random, &mut journal, 5000).unwrap();
    assert_eq!(second.next, lives[2].place);
    let found = survey(&file, START);
    assert_eq!(found.len(), 2);
    assert!(found[1].body == second.body);
}

#[test]
fn a_trailer_distinguishes_damage_from_a_torn_end() {
    for seed in 0..50 {
        let mut random = Random(seed);
        let (file, start, mut journal, batches) = three_batches(&mut random);
        journal.trail().unwrap();
        assert_eq!(journal.head(), batches[2].next, "a trailer moves nothing");
        compare(&survey(&file, start), &batches);
        assert_eq!(journal.continuation(journal.head(), 1).unwrap(), None, "nothing is missing");
        // An inverted bit in the trailer invalidates the trailer.
        let trailer = journal.head().position % SIZE;
        let mut whole = [0; 64];
        file.read_at(&mut whole, trailer).unwrap();
        let mut damaged = whole;
        damaged[random.below(64) as usize] ^= 1 << random.below(8);
        file.write_at(&[&damaged], trailer, false).unwrap();
        compare(&survey(&file, start), &batches);
        assert_eq!(journal.continuation(journal.head(), 1).unwrap(), None);
        file.write_at(&[&whole], trailer, false).unwrap();
        // An inverted bit in the last batch is reported because of the trailer.
        let at = (batches[2].place.position + random.below(64 + 5000)) % SIZE;
        let mut byte = [0];
        file.read_at(&mut byte, at).unwrap();
        file.write_at(&[&[byte[0] ^ 1 << random.below(8)]], at, false).unwrap();
        compare(&survey(&file, start), &batches[..2]);
        assert_eq!(journal.continuation(batches[2].place, 1).unwrap(), Some(journal.head()));
        // An opening with a higher incarnation ignores the trailer.
        assert_eq!(journal.continuation(batches[2].place, 2).unwrap(), None);
    }
}

#[test]
fn a_torn_batch_over_a_trailer_is_the_end_of_the_journal() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let (file, _) = ring();
        let start = Place { position: random.below(SIZE / 4096) * 4096, sequence: 1 };
        let mut journal = Journal::new(Arc::clone(&file), SIZE, SALT, start);
        journal.resume(start, 1);
        let mut batches: Vec<Appended> = (0..2).map(|_| append(&mut random, &mut journal, 5000).unwrap()).collect();
        journal.trail().unwrap();
        let mut before = vec![0; SIZE as usize];
        file.read_at(&mut before, 0).unwrap();
        let length = random.scaled(20_000) as usize;
        batches.push(append(&mut random, &mut journal, length).unwrap());
        let sectors = (batches[2].next.position - batches[2].place.position) / 512;
        for sector in (0..sectors).filter(|_| random.percent(50)) {
            let at = ((batches[2].place.position + sector * 512) % SIZE) as usize;
            file.write_at(&[&before[at..at + 512]], at as u64, false).unwrap();
        }
        let found = survey(&file, start);
        assert!(found.len() >= 2, "batches before the trailer were durable and must be found");
        compare(&found, &batches[..found.len()]);
        assert_eq!(journal.continuation(found.last().unwrap().next, 1).unwrap(), None, "seed {seed}");
    }
}

#[test]
fn a_trailer_takes_no_space_from_batches() {
    let (file, mut journal) = ring();
    journal.trail().unwrap();
    let mut first = [1; 4096];
    file.read_at(&mut first, 0).unwrap();
    assert_eq!(first, [0; 4096], "before the first batch there is nothing to protect");
    let mut appended = 0;
    while journal.append(BatchKind::Operations, &[&[0x5a; 4096 - 64]]).is_ok() {
        journal.trail().unwrap();
        appended += 1;
    }
    assert_eq!((appended, journal.used()), (512, SIZE), "the last batch takes the place of a trailer");
    assert_eq!(survey(&file, START).len(), 512, "the first batch is as it was");
    // A checkpoint makes the whole journal unnecessary: no trailer is needed.
    journal.release(journal.head());
    journal.trail().unwrap();
    assert_eq!(survey(&file, START).len(), 512);
}

#[test]
fn every_byte_of_a_batch_is_covered_by_a_checksum() {
    let mut random = Random(4);
    let (file, mut journal) = ring();
    let whole = append(&mut random, &mut journal, 700).unwrap();
    for at in 0..64 + 700 {
        let mut byte = [0];
        file.read_at(&mut byte, at).unwrap();
        file.write_at(&[&[byte[0] ^ 1 << random.below(8)]], at, false).unwrap();
        assert!(journal.read(whole.place, 0).unwrap().is_none(), "byte {at} may change unnoticed");
        file.write_at(&[&byte], at, false).unwrap();
    }
    assert!(journal.read(whole.place, 0).unwrap().is_some());
}

#[test]
fn batches_with_another_salt_position_or_incarnation_are_ignored() {
    let mut random = Random(5);
    let (file, mut journal) = ring();
    let whole = append(&mut random, &mut journal, 100).unwrap();
    let read = |salt: u64, place: Place, incarnation: u64| {
        Journal::new(Arc::clone(&file), SIZE, salt, START).read(place, incarnation).unwrap().is_some()
    };
    assert!(read(SALT, whole.place, 1));
    assert!(!read(SALT + 1, whole.place, 1), "of another datastore");
    assert!(!read(SALT, whole.place, 2), "of an earlier opening");
    assert!(!read(SALT, Place { sequence: 2, ..START }, 1), "of another number");
    assert!(!read(SALT, Place { position: SIZE, ..START }, 1), "of an earlier round");
    assert!(!read(SALT, Place { position: u64::MAX - 4095, sequence: u64::MAX }, 1), "of no round at all");
}

/// An operation of the kind `code`, with numbers from their whole allowed ranges.
fn operation(random: &mut Random, code: u64) -> Operation {
    let blocks = 1 + random.below(3);
    let run = Run { start: random.scaled(1 << 48).min((1 << 48) - blocks), blocks };
    let logical = random.scaled(1 << 40).min((1 << 40) - blocks);
    let disk = random.next();
    let checksums: Vec<u32> = (0..blocks).map(|_| random.next() as u32).collect();
    let data = |random: &mut Random| -> Vec<SharedSlice> {
        let buffer: Arc<Buffer> = Buffer::copy_of(&random.bytes(blocks as usize * BLOCK_SIZE)).into();
        vec![
            SharedSlice::new(Arc::clone(&buffer), 0..BLOCK_SIZE),
            SharedSlice::new(buffer, BLOCK_SIZE..blocks as usize * BLOCK_SIZE),
        ]
    };
    let length = random.below(400) as usize;
    match code {
        1 => Operation::Map { disk, logical, run, checksums },
        2 => Operation::MapData { disk, logical, run, data: data(random) },
        3 => Operation::Overwrite { run, checksums },
        4 => Operation::OverwriteData { run, data: data(random) },
        5 => Operation::Synced { position: random.next() },
        6 => Operation::Unmap { disk, logical, blocks },
        7 => Operation::Unwritten { disk, logical, run, fresh: random.percent(50) },
        8 => Operation::Written { disk, logical, run, checksums },
        9 => Operation::Resolve { block: random.next(), checksum: random.next() as u32 },
        10 => Operation::Backed { run, backed: random.percent(50) },
        11 => Operation::Put { record: random.bytes(length) },
        12 => Operation::Seal { snapshot: random.next() },
        13 => Operation::Clone { snapshot: random.next(), record: random.bytes(length) },
        14 => Operation::Revert { disk, snapshot: random.next(), trash: random.next() },
        15 => Operation::Trash { object: random.next() },
        16 => Operation::Drop { object: random.next(), steps: random.next() as u32 },
        17 => Operation::Announce { run },
        18 => Operation::Checksums { run, checksums },
        21 => {
            // The two runs do not overlap.
            let from = if run.start > 8 { run.start - 5 } else { run.start + 1000 };
            Operation::Share { logical, run, from, objects: vec![disk, random.next()] }
        }
        22 | 25 => {
            let logical = logical.min((1 << 40) - 32);
            let first = random.below(225) as u8;
            match code {
                22 => Operation::MapPack { disk, logical, blocks: 32, first, run, checksums },
                _ => Operation::MapSharedPack { disk, logical, blocks: 32, first, run, checksums },
            }
        }
        23 => {
            let (logical, physical) = (logical.min((1 << 40) - 6), if run.start > 16 { run.start - 8 } else { 1000 });
            let packed = random.percent(50).then_some(Packed { index: 250, stored: 7 });
            let source = Source { index: 3, run: PhysicalRun { physical, blocks: 6 }, packed };
            Operation::SharePack { logical, source, run, checksums, objects: vec![disk, random.next()] }
        }
        24 => Operation::MapShared { disk, logical, run, checksums },
        _ => {
            let physical = run.start.min((1 << 48) - 6);
            let source = |index, blocks| Source { index, run: PhysicalRun { physical, blocks }, packed: None };
            let mut sources = vec![source(0, 1), source(1, 2), source(250, 6)];
            if code == 20 {
                sources[0].packed = Some(Packed { index: 255, stored: 6 });
                sources[2].packed = Some(Packed { index: random.next() as u8 / 2, stored: 1 });
            }
            let logical = logical.min((1 << 40) - 256);
            Operation::Pack { logical, blocks: 256, run, checksums, sources, objects: vec![disk, random.next()] }
        }
    }
}

/// Operations have the codes from 1 to this number.
const CODES: u64 = 25;

/// The example of an operation on the format page, and its name there. A new operation needs a name here and a row on
/// the page.
fn example(operation: &Operation) -> (&'static str, Operation) {
    let run = Run { start: 0x0102_0304, blocks: 2 };
    let checksums = || vec![0xaaaa_aaaa, 0xbbbb_bbbb];
    let (disk, logical, snapshot, record) = (0x11, 0x22, 0x44, vec![0xee; 3]);
    match operation {
        Operation::Map { .. } => ("map", Operation::Map { disk, logical, run, checksums: checksums() }),
        Operation::MapData { data, .. } => ("map data", Operation::MapData { disk, logical, run, data: data.clone() }),
        Operation::Overwrite { .. } => ("overwrite", Operation::Overwrite { run, checksums: checksums() }),
        Operation::OverwriteData { data, .. } => {
            ("overwrite data", Operation::OverwriteData { run, data: data.clone() })
        }
        Operation::Synced { .. } => ("synced", Operation::Synced { position: 0x5000 }),
        Operation::Unmap { .. } => ("unmap", Operation::Unmap { disk, logical, blocks: 3 }),
        Operation::Unwritten { .. } => ("unwritten", Operation::Unwritten { disk, logical, run, fresh: true }),
        Operation::Written { .. } => ("written", Operation::Written { disk, logical, run, checksums: checksums() }),
        Operation::Resolve { .. } => ("resolve", Operation::Resolve { block: 0x33, checksum: 0xcccc_cccc }),
        Operation::Backed { .. } => ("backed", Operation::Backed { run, backed: true }),
        Operation::Put { .. } => ("put", Operation::Put { record }),
        Operation::Seal { .. } => ("seal", Operation::Seal { snapshot }),
        Operation::Clone { .. } => ("clone", Operation::Clone { snapshot, record }),
        Operation::Revert { .. } => ("revert", Operation::Revert { disk, snapshot, trash: 0x55 }),
        Operation::Trash { .. } => ("trash", Operation::Trash { object: 0x66 }),
        Operation::Drop { .. } => ("drop", Operation::Drop { object: 0x66, steps: 4 }),
        Operation::Announce { .. } => ("announce", Operation::Announce { run }),
        Operation::Checksums { .. } => ("checksums", Operation::Checksums { run, checksums: checksums() }),
        Operation::Pack { sources, .. } => {
            let repacks = sources.iter().any(|source| source.packed.is_some());
            let packed = repacks.then_some(Packed { index: 9, stored: 8 });
            let source = Source { index: 3, run: PhysicalRun { physical: 0x77, blocks: 5 }, packed };
            let (sources, objects) = (vec![source], vec![disk, snapshot]);
            let name = if repacks { "repack" } else { "pack" };
            (name, Operation::Pack { logical, blocks: 32, run, checksums: checksums(), sources, objects })
        }
        Operation::MapPack { .. } => {
            ("map pack", Operation::MapPack { disk, logical, blocks: 32, first: 3, run, checksums: checksums() })
        }
        Operation::MapSharedPack { .. } => {
            let checksums = checksums();
            ("map shared pack", Operation::MapSharedPack { disk, logical, blocks: 5, first: 3, run, checksums })
        }
        Operation::SharePack { .. } => {
            let packed = Some(Packed { index: 9, stored: 8 });
            let source = Source { index: 3, run: PhysicalRun { physical: 0x77, blocks: 5 }, packed };
            let (checksums, objects) = (checksums(), vec![disk, snapshot]);
            ("share pack", Operation::SharePack { logical, source, run, checksums, objects })
        }
        Operation::MapShared { .. } => {
            ("map shared", Operation::MapShared { disk, logical, run, checksums: checksums() })
        }
        Operation::Share { .. } => {
            ("share", Operation::Share { logical, run, from: 0x77, objects: vec![disk, snapshot] })
        }
    }
}

#[test]
fn the_format_page_describes_every_journal_operation() {
    let page = include_str!("../../../../docs/format/native.md");
    let mut random = Random(1);
    let mut names = std::collections::BTreeSet::new();
    for code in 1..=CODES {
        let (name, example) = example(&operation(&mut random, code));
        names.insert(name);
        let body = encode(std::slice::from_ref(&example));
        // The page omits payload.
        let payload = body.len() / BLOCK_SIZE * BLOCK_SIZE;
        let bytes: Vec<String> = body[..body.len() - payload].iter().map(|byte| format!("{byte:02x}")).collect();
        let row = format!("| {code} | {name} | `{}` |\n", bytes.join(" "));
        assert!(page.contains(&row), "the page lacks {row}");
        assert!(page.contains(&format!("\n| {code} {name} | ")), "the page does not say what {name} means");
    }
    assert_eq!(names.len() as u64, CODES);
    // Codes without a row on the page are refused.
    for code in (0..=u8::MAX).filter(|code| !(1..=CODES).contains(&u64::from(*code))) {
        assert!(decode(&[&[code][..], &[1; 64]].concat()).is_err(), "code {code}");
    }
}

fn encode(operations: &[Operation]) -> Vec<u8> {
    let mut writer = Writer::default();
    operations.iter().for_each(|operation| writer.push(operation));
    let length = writer.len();
    let body = writer.finish().concat();
    assert_eq!(body.len(), length);
    body
}

/// Decodes operations. They cannot be compared directly, because they contain slices, so tests compare encodings.
fn decode(body: &[u8]) -> Result<Vec<Operation>> {
    let mut reader = Reader::new(body);
    let mut out = Vec::new();
    while let Some(operation) = reader.next_operation()? {
        out.push(operation);
    }
    Ok(out)
}

#[test]
fn journal_operations_are_decoded_as_encoded() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let operations: Vec<Operation> =
            (0..random.below(20)).map(|i| operation(&mut random, 1 + (i + seed) % CODES)).collect();
        let body = encode(&operations);
        let again = decode(&body).unwrap();
        assert_eq!(again.len(), operations.len());
        for (one, other) in operations.iter().zip(&again) {
            assert_eq!(std::mem::discriminant(one), std::mem::discriminant(other));
            assert!(encode(std::slice::from_ref(one)) == encode(std::slice::from_ref(other)));
        }
    }
}

#[test]
fn a_truncated_operation_is_an_error() {
    let mut random = Random(6);
    for code in 1..=CODES {
        let whole = operation(&mut random, code);
        let body = encode(&[whole.clone(), whole]);
        assert_eq!(decode(&body).unwrap().len(), 2);
        for length in 0..body.len() {
            match decode(&body[..length]) {
                Ok(operations) => assert_eq!(length, operations.len() * body.len() / 2, "operation {code}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
            }
        }
    }
}

#[test]
fn operations_with_numbers_out_of_range_are_refused() {
    let impossible = [
        Operation::Overwrite { run: Run { start: 0, blocks: 0 }, checksums: vec![] },
        Operation::Backed { run: Run { start: (1 << 48) - 1, blocks: 2 }, backed: true },
        Operation::Backed { run: Run { start: u64::MAX, blocks: 1 }, backed: true },
        Operation::Unmap { disk: 1, logical: (1 << 40) - 1, blocks: 2 },
        Operation::Unmap { disk: 1, logical: u64::MAX, blocks: 1 },
        Operation::Unmap { disk: 1, logical: 1, blocks: u64::MAX },
        Operation::Unmap { disk: 1, logical: 1, blocks: 0 },
        Operation::Map { disk: 1, logical: 1 << 40, run: Run { start: 0, blocks: 1 }, checksums: vec![1] },
    ];
    for operation in impossible {
        assert_eq!(
            decode(&encode(std::slice::from_ref(&operation))).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{operation:?}"
        );
    }
    // A run longer than the limit is refused before memory is allocated for it.
    let mut body = encode(&[Operation::Overwrite { run: Run { start: 0, blocks: 1 }, checksums: vec![1] }]);
    body[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(decode(&body).unwrap_err().kind(), ErrorKind::Corrupt);
    for code in [0, 17, 255] {
        assert_eq!(decode(&[code; 64]).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn damage_to_a_body_never_panics() {
    for seed in 0..3000 {
        let mut random = Random(seed);
        let operations: Vec<Operation> = (0..3)
            .map(|_| {
                let code = 1 + random.below(CODES);
                operation(&mut random, code)
            })
            .collect();
        let mut body = encode(&operations);
        for _ in 0..1 + random.below(4) {
            let at = random.below(body.len().min(64) as u64) as usize;
            body[at] = random.next() as u8;
        }
        let _ = decode(&body);
    }
}
