//! Wrong bits and bytes anywhere in the files of stores that were closed or killed. No read returns wrong data. A wrong
//! bit is reported or has no effect, and a repair or a salvage returns every block that is not damaged itself.
//!
//! `LAMINA_FLIPS` sets the number of flips in each of two kinds of stores, `LAMINA_SEED` the first seed.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use error::{ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use store::catalog::Provisioning;
use store::engine::{CheckOptions, InitParameters, NewDisk, NewSnapshot, PRINTS_MAX, PackPass, Salvage, SharePass};
use store::pack::{Codec, Packer};
use store::{Engine, EngineOptions};
use testkit::Random;

const BLOCKS: u64 = 1500;
const DISKS: u64 = 10;
const RING: u64 = 4 << 20;
/// The contents of a store that is compressed and deduplicated.
const CONTENTS: u32 = 61;

/// The content of each block of each object: the number of its last write, 0 for zeros.
type Model = BTreeMap<u64, BTreeMap<u64, u32>>;

struct World {
    disk: SimulatedDisk,
    model: Model,
    /// All contents that a block ever had: a read may return an older one if the end of the journal is lost.
    history: BTreeMap<(u64, u64), BTreeSet<u32>>,
    names: BTreeMap<u64, String>,
    /// Files with their lengths.
    files: Vec<(String, u64)>,
    /// The bytes of the last batch in the journal.
    last_batch: std::ops::Range<u64>,
    /// Whether blocks are compressed and stored once for several owners: one damaged block may then take many.
    reduced: bool,
}

fn options() -> EngineOptions {
    EngineOptions { metadata_cache: 1 << 20, write_buffer: 1 << 20, threads: false, ..EngineOptions::default() }
}

fn content(number: u32) -> Buffer {
    let mut buffer = Buffer::zeroed(1);
    if number > 0 {
        buffer.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
    }
    buffer
}

/// Compresses a part of an object, and stores equal blocks of all objects once.
fn reduce(engine: &Engine, model: &Model, random: &mut Random) {
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let ids: Vec<u64> = model.keys().copied().collect();
    if random.below(2) == 0 {
        let mut pass = SharePass::new(ids.iter().map(|id| (*id, BLOCKS)).collect(), PRINTS_MAX);
        while !engine.share_step(&mut pass).unwrap().ended {}
        return;
    }
    let packer = Packer::new(if random.below(2) == 0 { Codec::Lz4 } else { Codec::Zstd(1) }).unwrap();
    let mut pass = PackPass::new(packer, 1 << 20, Vec::new());
    let (id, mut at) = (*random.pick(&ids), 0);
    let end = 1 + random.below(BLOCKS);
    while at < end {
        at = engine.pack_step(id, at..end, &mut pass).unwrap().next;
    }
}

/// A store with a random history, closed or killed. All writes were flushed. If it is `reduced`, there are few
/// different contents.
fn world(seed: u64, closed: bool, reduced: bool) -> World {
    let mut random = Random(seed);
    let disk = SimulatedDisk::new(seed, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    Engine::init(&disk.directory(), InitParameters { uuid: [5; 16], journal_size: RING }).unwrap();
    let engine = Engine::open(disk.directory(), options()).unwrap();
    let mut world = World {
        disk,
        model: Model::new(),
        history: BTreeMap::new(),
        names: BTreeMap::new(),
        files: Vec::new(),
        last_batch: 0..0,
        reduced,
    };
    let mut disks = Vec::new();
    for number in 0..DISKS {
        let name = format!("d{number}");
        let provisioning = Provisioning::Thin;
        let capacity = BLOCKS * BLOCK_SIZE as u64;
        let id = engine.create_disk(NewDisk {
            name: name.clone(),
            capacity,
            provisioning,
            uuid: [1; 16],
            incomplete: false,
        });
        disks.push(id.unwrap());
        world.names.insert(disks[number as usize], name);
        world.model.insert(disks[number as usize], BTreeMap::new());
    }
    let mut number = 0;
    let rounds = 6 + random.below(6);
    for round in 0..rounds {
        for _ in 0..random.below(400) {
            number += 1;
            // Most writes go to the first disks, so that their trees have several levels.
            let id = disks[(random.below(DISKS) * random.below(3) / 2) as usize % disks.len()];
            let block = random.below(BLOCKS);
            let written = if reduced { 1 + number % CONTENTS } else { number };
            let data = SharedSlice::new(Arc::new(content(written)), 0..BLOCK_SIZE);
            engine.write_blocks(&engine.head(id), block, data).unwrap();
            world.model.get_mut(&id).unwrap().insert(block, written);
            world.history.entry((id, block)).or_default().insert(written);
            if random.below(40) == 0 {
                engine.pump().unwrap();
            }
        }
        match random.below(6) {
            0 => engine.checkpoint().unwrap(),
            1 | 2 => {
                let id = disks[random.below(3) as usize];
                let name = format!("s{round}");
                let made =
                    engine.snapshot(&[NewSnapshot { disk: id, name, uuid: [2; 16], incomplete: false }]).unwrap();
                let image = world.model[&id].clone();
                // Writes that the snapshot waits for are lost with the end of the journal.
                for block in 0..BLOCKS {
                    let before = world.history.get(&(id, block)).cloned().unwrap_or_default();
                    world.history.insert((made[0], block), before);
                }
                world.model.insert(made[0], image);
            }
            3 => {
                let (id, from) = (disks[random.below(3) as usize], random.below(BLOCKS - 100));
                engine.discard_blocks(&engine.head(id), from..from + 100).unwrap();
                world.model.get_mut(&id).unwrap().retain(|block, _| !(from..from + 100).contains(block));
            }
            _ => engine.flush().unwrap(),
        }
        if reduced && random.below(2) == 0 {
            reduce(&engine, &world.model, &mut random);
        }
    }
    engine.flush().unwrap();
    if closed {
        engine.close().unwrap();
    }
    drop(engine);
    let directory = world.disk.directory();
    let length = |name: &str| directory.open(name, IoMode::Buffered).unwrap().len().unwrap();
    let names = directory.list().unwrap().into_iter();
    world.files = names.map(|name| (name.clone(), length(&name))).filter(|(_, length)| *length > 0).collect();
    world.last_batch = last_batch(&world.disk);
    world
}

fn number_of(bytes: &[u8]) -> Option<u32> {
    let number = u32::from_le_bytes(bytes[..4].try_into().unwrap());
    (content(number)[..] == *bytes).then_some(number)
}

fn is_snapshot(world: &World, id: u64) -> bool {
    !world.names.contains_key(&id)
}

/// Returns the lost blocks: reading them fails, or their disk is missing. All other blocks must have the right content.
/// With `older`, a block may also have a content from before the lost end of the journal.
fn compare(
    world: &World,
    older: bool,
    context: &str,
    read: &mut dyn FnMut(u64, u64) -> Result<Vec<u8>>,
) -> Vec<(u64, u64)> {
    let mut lost = Vec::new();
    for (id, image) in &world.model {
        for block in 0..BLOCKS {
            let expected = image.get(&block).copied().unwrap_or(0);
            match read(*id, block) {
                Ok(bytes) => {
                    let found = number_of(&bytes);
                    let before = older
                        && found.is_some_and(|found| {
                            found == 0 || world.history.get(&(*id, block)).is_some_and(|all| all.contains(&found))
                        });
                    assert!(
                        found == Some(expected) || before,
                        "{context}: object {id} block {block} is {found:?}, not {expected}"
                    );
                }
                Err(error) => {
                    let kinds = [ErrorKind::Corrupt, ErrorKind::NotFound];
                    assert!(kinds.contains(&error.kind()), "{context}: object {id} block {block}: {error}");
                    lost.push((*id, block));
                }
            }
        }
    }
    lost
}

fn opened(world: &World, engine: &Engine, older: bool, context: &str) -> Vec<(u64, u64)> {
    compare(world, older, context, &mut |id, block| {
        if is_snapshot(world, id) {
            engine
                .read_blocks("s", block..block + 1, &|range| engine.plan_snapshot(id, range))
                .map(|bytes| bytes.to_vec())
        } else {
            let head = engine.head(id);
            engine
                .read_blocks("d", block..block + 1, &|range| engine.plan_head(&head, range))
                .map(|bytes| bytes.to_vec())
        }
    })
}

/// The blocks that a salvage cannot return, and its notes.
type Salvaged = (Vec<(u64, u64)>, Vec<String>);

/// The blocks that a salvage cannot return. `None` if it can prove nothing.
fn salvaged(world: &World, disk: &SimulatedDisk, older: bool, context: &str) -> Option<Salvaged> {
    let before = disk.operations();
    let salvage = match Salvage::open(disk.directory()) {
        Ok(salvage) => salvage,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{context}: {error}");
            println!("{context}: {error}");
            return None;
        }
    };
    let mut objects: BTreeMap<u64, Vec<Option<Vec<u8>>>> = BTreeMap::new();
    for object in salvage.objects() {
        let id = object.object.id;
        if object.proven {
            let disk = world.names.get(&id);
            assert!(disk.is_none_or(|name| *name == object.object.name), "{context}: {object:?}");
        }
        objects.insert(id, salvage.contents(id, 0..BLOCKS).unwrap());
    }
    let older = older || salvage.is_behind();
    let lost = compare(world, older, &format!("{context}: salvaged"), &mut |id, block| {
        let content = objects.get(&id).and_then(|blocks| blocks[block as usize].clone());
        content.ok_or_else(|| error::Error::new(ErrorKind::Corrupt, "lost"))
    });
    assert_eq!(disk.operations(), before, "{context}: a salvage wrote");
    Some((lost, salvage.notes().to_vec()))
}

/// The bytes of the last batch in the journal.
fn last_batch(disk: &SimulatedDisk) -> std::ops::Range<u64> {
    let file = disk.directory().open("journal", IoMode::Buffered).unwrap();
    let mut ring = Buffer::zeroed((RING / BLOCK_SIZE as u64) as usize);
    file.read_at(&mut ring, 0).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let heads = ring.chunks_exact(BLOCK_SIZE).filter(|block| block[..4] == *b"LMJB");
    let last = heads.max_by_key(|block| word(block, 24)).map(|block| (word(block, 32) % RING, word(block, 40) as u32));
    last.map_or(0..0, |(at, length)| at..at + u64::from(length) + 64)
}

#[derive(Default, Debug)]
struct Figures {
    tried: u64,
    refused: u64,
    found: u64,
    harmless: u64,
    repaired: u64,
    salvaged_whole: u64,
    lost_to_repair: u64,
    lost_to_salvage: u64,
    nothing_proven: u64,
    window: u64,
    /// By file: the most blocks of all disks and snapshots that one flip made unreadable.
    most_taken: BTreeMap<String, usize>,
}

/// Checks that a flip loses no more than its page describes. A page of a table describes 508 blocks, a page of the
/// catalog eight objects, and a node of the map a range of the disks that share it. A flip in content that follows from
/// other pages, or that is stored twice, loses nothing.
fn takes_what_it_describes(world: &World, name: &str, lost: &[(u64, u64)], context: &str) {
    let objects: BTreeSet<u64> = lost.iter().map(|(id, _)| *id).collect();
    // Each write has its own number, so each block of data differs from all others, unless the store is reduced.
    let written = |(id, block): &(u64, u64)| world.model[id].get(block).copied();
    let blocks: BTreeSet<u32> = lost.iter().filter_map(written).filter(|number| *number > 0).collect();
    let (most_objects, most_blocks) = match name {
        "superblock" | "checkpoint" | "map.summary" | "data.summary" | "map.table" => (0, 0),
        "data.table" if !world.reduced => (usize::MAX, 508),
        "catalog" => (8, usize::MAX),
        _ => (usize::MAX, usize::MAX),
    };
    let taken = (objects.len(), blocks.len());
    assert!(
        taken.0 <= most_objects && taken.1 <= most_blocks,
        "{context}: one page takes {taken:?} objects and blocks"
    );
}

/// One flip: inverts the bits `mask` of a byte of a file.
fn flip(world: &World, name: &str, offset: u64, mask: u8, figures: &mut Figures, context: &str) {
    let damage = || {
        let disk = world.disk.copy_of_durable(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        (0..8).filter(|bit| mask >> bit & 1 == 1).for_each(|bit| disk.flip_bit(name, offset, bit).unwrap());
        disk
    };
    let single = mask.count_ones() == 1;
    let window = name == "journal" && world.last_batch.contains(&offset);
    figures.tried += 1;
    figures.window += u64::from(window);

    let disk = damage();
    let salvaged = salvaged(world, &disk, window, context);
    let mut found = false;
    let mut lost_open = None;
    match Engine::open(disk.directory(), options()) {
        Err(error) => {
            assert!([ErrorKind::Corrupt, ErrorKind::Unsupported].contains(&error.kind()), "{context}: {error}");
            figures.refused += 1;
            found = true;
        }
        Ok(engine) => {
            let lost = opened(world, &engine, window, context);
            let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
            found |= !report.findings.is_empty();
            assert!(lost.is_empty() || found, "{context}: lost {lost:?}, and a check finds nothing");
            lost_open = Some(lost);
        }
    }
    if found {
        figures.found += 1;
    } else {
        figures.harmless += 1;
    }
    drop(disk);

    let disk = damage();
    let lost = match Engine::open_repairing(disk.directory(), options(), None) {
        Err(error) => {
            assert!([ErrorKind::Corrupt, ErrorKind::Unsupported].contains(&error.kind()), "{context}: {error}");
            None
        }
        Ok(engine) => {
            let report = engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
            let lost = opened(world, &engine, window && !single, &format!("{context}: repaired"));
            let open = report.findings.iter().filter(|finding| finding.repaired.is_none()).count();
            assert!(lost.is_empty() || open > 0, "{context}: lost {lost:?}, and the repair reports nothing");
            engine.close().unwrap();
            drop(engine);
            let engine = Engine::open(disk.directory(), options()).unwrap();
            let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
            assert!(open > 0 || report.findings.is_empty(), "{context}: after the repair: {:?}", report.findings);
            Some(lost)
        }
    };
    figures.repaired += u64::from(lost.as_ref().is_some_and(|lost| lost.is_empty()));
    figures.lost_to_repair += lost.as_ref().map_or(0, |lost| lost.len() as u64);
    match &salvaged {
        Some((lost, _)) => {
            figures.salvaged_whole += u64::from(lost.is_empty());
            figures.lost_to_salvage += lost.len() as u64;
        }
        None => figures.nothing_proven += 1,
    }
    // Opening, repair or salvage must return all blocks that are not damaged themselves.
    let in_data = name.starts_with("data.0");
    let outcomes = [lost_open, lost, salvaged.map(|(lost, _)| lost)];
    let Some(least) = outcomes.iter().flatten().min_by_key(|lost| lost.len()) else {
        panic!("{context}: it neither opens, nor is repaired, nor salvaged");
    };
    if single && !in_data {
        assert_eq!(least, &[], "{context}: one bit of metadata takes blocks");
    }
    takes_what_it_describes(world, name, least, context);
    let most = figures.most_taken.entry(name.to_owned()).or_default();
    *most = least.len().max(*most);
    if in_data && !world.reduced {
        let blocks: BTreeSet<u64> = outcomes.iter().flatten().flatten().map(|(_, block)| *block).collect();
        assert!(blocks.len() <= 1, "{context}: one damaged data block loses {blocks:?}");
    }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn a_wrong_bit_or_byte_is_detected_or_harmless_and_loses_only_its_own_data() {
    flip_many(from_environment("LAMINA_FLIPS", 240), false);
}

#[test]
fn a_wrong_bit_or_byte_among_compressed_and_shared_blocks_is_detected_or_harmless() {
    flip_many(from_environment("LAMINA_FLIPS", 120), true);
}

fn flip_many(flips: u64, reduced: bool) {
    let seed = from_environment("LAMINA_SEED", 1);
    let mut figures: [Figures; 2] = Default::default();
    let mut random = Random(seed);
    let mut done = 0;
    let mut round = seed;
    while done < flips {
        let world = world(round, round.is_multiple_of(2), reduced);
        for (name, length) in &world.files {
            for turn in 0..4 {
                // Most offsets lie in the used part of the file.
                let used = match random.below(4) {
                    0 => *length,
                    1 => (*length).min(64 * BLOCK_SIZE as u64),
                    _ => (*length).min(6 * BLOCK_SIZE as u64),
                };
                let last = &world.last_batch;
                let offset = match name == "journal" && turn > 1 && !last.is_empty() {
                    true => (last.start + random.below(last.end - last.start)) % *length,
                    false => random.below(used),
                };
                let mask = if turn % 2 == 0 { 1 << random.below(8) } else { 1 + random.below(255) as u8 };
                let kind = usize::from(mask.count_ones() > 1);
                let context = format!("world {round}, {name}, byte {offset}, mask {mask:02x}");
                flip(&world, name, offset, mask, &mut figures[kind], &context);
                done += 1;
            }
        }
        round += 1;
    }
    println!("one bit:   {:?}\nmore bits: {:?}", figures[0], figures[1]);
    assert!(figures[0].found + figures[1].found > done / 20);
}

#[test]
fn salvage_returns_the_remaining_data_if_a_file_is_truncated_or_missing() {
    for closed in [true, false] {
        let world = world(7, closed, false);
        for (name, _) in &world.files {
            for cut in [0, 2, 100] {
                let context = format!("closed {closed}, {name} cut to {cut} %");
                let disk =
                    world.disk.copy_of_durable(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
                let file = disk.directory().open(name, IoMode::Buffered).unwrap();
                let length = file.len().unwrap();
                match cut {
                    100 => disk.directory().remove(name).unwrap(),
                    cut => file.set_len(length * cut / 100 / BLOCK_SIZE as u64 * BLOCK_SIZE as u64).unwrap(),
                }
                drop(file);
                disk.directory().sync().unwrap();
                let Some((lost, notes)) = salvaged(&world, &disk, false, &context) else {
                    panic!("{context}: nothing is proven");
                };
                println!("{context}: {} lost; {notes:?}", lost.len());
                let all = world.model.values().map(BTreeMap::len).sum::<usize>();
                match name.as_str() {
                    "superblock" | "map.summary" | "data.summary" | "checkpoint" => {
                        assert_eq!(lost, [], "{context}: {notes:?}");
                    }
                    "map.table" => assert_eq!(lost, [], "{context}: {notes:?}"),
                    "journal" if closed => assert_eq!(lost, [], "{context}: {notes:?}"),
                    "journal" => assert!(!notes.is_empty(), "{context}"),
                    _ => assert!(lost.len() <= DISKS as usize * BLOCKS as usize * 3 && all > 0, "{context}"),
                }
            }
        }
    }
}
