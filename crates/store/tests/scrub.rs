//! Scrubs of stores with wrong bits in data and metadata: all damage is found, with exactly the disks and snapshots
//! that refer to it, and nothing else is reported, also beside writers.
//!
//! `LAMINA_FLIPS` sets the number of flips, `LAMINA_SEED` the first seed.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, SharedSlice};
use error::{ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use store::catalog::Provisioning;
use store::engine::{
    CheckOptions, Copies, Damage, DamagedPlace, InitParameters, NewDisk, NewSnapshot, Part, Planned, Reference,
    ScrubPart, ScrubPosition, WantedBlock,
};
use store::{Engine, EngineOptions};
use testkit::Random;

const BLOCKS: u64 = 600;
const DISKS: u64 = 5;
const RING: u64 = 4 << 20;
const BLOCK: u64 = BLOCK_SIZE as u64;

fn options(threads: bool) -> EngineOptions {
    EngineOptions { metadata_cache: 1 << 20, write_buffer: 1 << 20, threads, ..EngineOptions::default() }
}

fn simulated() -> SimulatedOptions {
    SimulatedOptions { reorder: false, ..SimulatedOptions::default() }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

fn new_disk(name: &str, provisioning: Provisioning) -> NewDisk {
    NewDisk { name: name.into(), capacity: BLOCKS * BLOCK, provisioning, uuid: [1; 16], incomplete: false }
}

fn content(number: u32) -> Buffer {
    let mut buffer = Buffer::zeroed(1);
    buffer.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
    buffer
}

fn write(engine: &Engine, disk: u64, logical: u64, number: u32) {
    let data = SharedSlice::new(Arc::new(content(number)), 0..BLOCK_SIZE);
    engine.write_blocks(&engine.head(disk), logical, data).unwrap();
}

/// A store and its content: the number of the last write of each block, by object.
struct World {
    disk: SimulatedDisk,
    model: BTreeMap<u64, BTreeMap<u64, u32>>,
    snapshots: BTreeSet<u64>,
}

impl World {
    fn plan(&self, engine: &Engine, object: u64, block: u64) -> Result<Planned> {
        match self.snapshots.contains(&object) {
            true => engine.plan_snapshot(object, block..block + 1),
            false => engine.plan_head(&engine.head(object), block..block + 1),
        }
    }

    fn read(&self, engine: &Engine, object: u64, block: u64) -> Result<Vec<u8>> {
        let plan = |range: std::ops::Range<u64>| self.plan(engine, object, range.start);
        engine.read_blocks("object", block..block + 1, &plan).map(|bytes| bytes.to_vec())
    }

    /// Where each stored block is mapped.
    fn owners(&self, engine: &Engine) -> BTreeMap<u64, Vec<(u64, u64)>> {
        let mut owners: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for object in self.model.keys() {
            for block in 0..BLOCKS {
                if let Some(Part::Stored(stored)) = self.plan(engine, *object, block).unwrap().parts.first() {
                    owners.entry(stored.block).or_default().push((*object, block));
                }
            }
        }
        owners
    }

    /// The blocks that cannot be read. All others must have the right content.
    fn lost(&self, engine: &Engine, context: &str) -> BTreeSet<(u64, u64)> {
        let mut lost = BTreeSet::new();
        for (object, image) in &self.model {
            for block in 0..BLOCKS {
                let expected = content(image.get(&block).copied().unwrap_or(0));
                match self.read(engine, *object, block) {
                    Ok(found) => assert!(found == expected[..], "{context}: object {object} block {block} is wrong"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corrupt, "{context}: {error}");
                        lost.insert((*object, block));
                    }
                }
            }
        }
        lost
    }
}

/// Disks, snapshots, clones and a thick disk, closed.
fn world(seed: u64) -> World {
    let mut random = Random(seed);
    let disk = SimulatedDisk::new(seed, simulated());
    Engine::init(&disk.directory(), InitParameters { uuid: [5; 16], journal_size: RING }).unwrap();
    let engine = Engine::open(disk.directory(), options(false)).unwrap();
    let mut world = World { disk, model: BTreeMap::new(), snapshots: BTreeSet::new() };
    for number in 0..DISKS {
        let kind = if number == 0 { Provisioning::ZeroedThick } else { Provisioning::Thin };
        let id = engine.create_disk(new_disk(&format!("d{number}"), kind)).unwrap();
        world.model.insert(id, BTreeMap::new());
    }
    let (mut number, mut made) = (0, 0);
    for _ in 0..5 {
        let heads: Vec<u64> = world.model.keys().copied().filter(|id| !world.snapshots.contains(id)).collect();
        for _ in 0..300 {
            number += 1;
            let (id, block) = (heads[random.below(heads.len() as u64) as usize], random.below(BLOCKS));
            write(&engine, id, block, number);
            world.model.get_mut(&id).unwrap().insert(block, number);
            if random.below(50) == 0 {
                engine.pump().unwrap();
            }
        }
        made += 1;
        let of = heads[random.below(heads.len() as u64) as usize];
        let new = NewSnapshot { disk: of, name: format!("s{made}"), uuid: [2; 16], incomplete: false };
        let snapshot = engine.snapshot(&[new]).unwrap()[0];
        world.snapshots.insert(snapshot);
        world.model.insert(snapshot, world.model[&of].clone());
        engine.flush().unwrap();
        let clone = engine.clone_snapshot(snapshot, &[new_disk(&format!("c{made}"), Provisioning::Thin)]).unwrap()[0];
        world.model.insert(clone, world.model[&snapshot].clone());
    }
    engine.close().unwrap();
    world
}

/// A whole scrub from a position on.
fn scrub_from(engine: &Engine, mut at: Option<ScrubPosition>) -> Vec<Damage> {
    let scrubber = engine.scrubber();
    let mut damage = Vec::new();
    while let Some(position) = at {
        let step = scrubber.step(position).unwrap();
        damage.extend(step.damage);
        at = step.next;
    }
    damage
}

fn scrub(engine: &Engine) -> Vec<Damage> {
    scrub_from(engine, Some(ScrubPosition::START))
}

/// The references to damage without a good copy, by place.
fn located(engine: &Engine, damage: &[Damage]) -> BTreeMap<DamagedPlace, Vec<Reference>> {
    let mut places: Vec<DamagedPlace> =
        damage.iter().filter(|damage| damage.repaired.is_none()).map(|damage| damage.place).collect();
    places.sort();
    let located = engine.locate_damage(&places, &|| true).unwrap();
    let all: BTreeSet<u64> = located.references.iter().flatten().map(|reference| reference.object).collect();
    assert_eq!(located.objects.keys().copied().collect::<BTreeSet<_>>(), all);
    places.into_iter().zip(located.references).collect()
}

#[test]
fn flips_are_found_and_every_disk_that_refers_to_them_is_named() {
    let (flips, seed) = (from_environment("LAMINA_FLIPS", 300), from_environment("LAMINA_SEED", 1));
    let mut random = Random(seed);
    let (mut done, mut round, mut in_data, mut repaired, mut lost_pages) = (0, seed, 0, 0, 0);
    while done < flips {
        let world = world(round);
        for turn in 0..4 {
            let disk = world.disk.copy_of_durable(1, simulated());
            let engine = Engine::open(disk.directory(), options(false)).unwrap();
            assert_eq!(scrub(&engine), [], "round {round}: an undamaged store");
            let owners = world.owners(&engine);
            let blocks: Vec<u64> = owners.keys().copied().collect();
            // In some rounds the metadata is not in memory, and so cannot be written again from there.
            let engine = if turn % 2 == 0 {
                drop(engine);
                Engine::open(disk.directory(), options(false)).unwrap()
            } else {
                engine
            };
            let mut data = BTreeSet::new();
            for _ in 0..12 {
                let block = blocks[random.below(blocks.len() as u64) as usize];
                let at = block * BLOCK + random.below(BLOCK);
                if data.insert(block) {
                    disk.flip_bit("data.0000", at, random.below(8) as u8).unwrap();
                    done += 1;
                }
            }
            let mut pages = BTreeSet::new();
            for name in ["data.table", "map.table", "map", "catalog", "data.summary", "map.summary"] {
                // A page of zeros was never written, and one inverted bit of it cannot be corrected.
                let last = blocks[blocks.len() - 1] / store::space::TABLE_ENTRIES;
                let page = if name == "data.table" { random.below(last + 1) } else { 0 };
                let bits = if turn < 2 { 1 } else { 3 };
                for bit in 0..bits {
                    disk.flip_bit(name, page * BLOCK + 600 + bit * 77, 3).unwrap();
                }
                pages.insert((name, page));
                done += 1;
            }
            let context = format!("round {round}, turn {turn}");
            let damage = scrub(&engine);
            let found: BTreeSet<DamagedPlace> = damage.iter().map(|damage| damage.place).collect();
            assert_eq!(found.len(), damage.len(), "{context}: each place is reported once: {damage:?}");
            let tables_lost = |block: &u64| {
                damage.iter().any(|damage| {
                    let Damage { place: DamagedPlace::Page { file, number }, repaired: None, .. } = damage else {
                        return false;
                    };
                    file.name() == "data.table" && *number == block / store::space::TABLE_ENTRIES
                })
            };
            for block in &data {
                assert!(found.contains(&DamagedPlace::Block(*block)) || tables_lost(block), "{context}: block {block}");
            }
            for (name, page) in &pages {
                let listed = found.iter().any(|place| {
                    matches!(place, DamagedPlace::Page { file, number } if file.name() == *name && number == page)
                });
                assert!(listed || *name == "map", "{context}: page {page} of {name} in {damage:?}");
            }
            for damage in &damage {
                match damage.place {
                    DamagedPlace::Block(block) => {
                        assert!(data.contains(&block) && damage.repaired.is_none(), "{context}: {damage:?}");
                        in_data += 1;
                    }
                    DamagedPlace::Page { file, number } => {
                        assert!(pages.contains(&(file.name(), number)), "{context}: {damage:?}");
                        // One inverted bit of a page is always corrected.
                        assert!(damage.repaired.is_some() || turn >= 2, "{context}: {damage:?}");
                        repaired += u64::from(damage.repaired.is_some());
                    }
                    DamagedPlace::Superblock => panic!("{context}: {damage:?}"),
                }
            }
            let named = located(&engine, &damage);
            for (place, references) in &named {
                if let DamagedPlace::Block(block) = place {
                    let expected: Vec<Reference> = owners[block]
                        .iter()
                        .map(|(object, logical)| Reference { object: *object, offset: logical * BLOCK, length: BLOCK })
                        .collect();
                    // A tree with an unreadable node may refer to the block below that node.
                    let unreadable = named
                        .keys()
                        .any(|place| matches!(place, DamagedPlace::Page { file, .. } if file.name() == "map"));
                    if unreadable {
                        assert!(references.iter().all(|reference| expected.contains(reference)), "{context}");
                    } else {
                        assert_eq!(references, &expected, "{context}: {place:?}");
                    }
                }
            }
            let covered = |object: u64, block: u64| {
                named.values().flatten().any(|reference| {
                    let bytes = reference.offset..reference.offset + reference.length;
                    reference.object == object && bytes.contains(&(block * BLOCK))
                })
            };
            let lost = world.lost(&engine, &context);
            lost_pages += u64::from(named.keys().any(|place| matches!(place, DamagedPlace::Page { .. })));
            for (object, block) in lost {
                assert!(covered(object, block), "{context}: object {object} block {block} is lost, and not named");
            }
            // What was restored is written by the next checkpoint.
            engine.checkpoint().unwrap();
            let again: BTreeSet<DamagedPlace> = scrub(&engine).iter().map(|damage| damage.place).collect();
            let open: BTreeSet<DamagedPlace> =
                damage.iter().filter(|damage| damage.repaired.is_none()).map(|damage| damage.place).collect();
            assert_eq!(again, open, "{context}");
        }
        round += 1;
    }
    println!("{done} flips: {in_data} blocks, {repaired} pages restored, {lost_pages} rounds with lost pages");
    assert!(in_data > flips / 4 && repaired > flips / 20 && lost_pages > 0);
}

#[test]
fn a_scrub_continues_at_its_position() {
    let world = world(3);
    let engine = Engine::open(world.disk.directory(), options(false)).unwrap();
    let blocks: Vec<u64> = world.owners(&engine).into_keys().collect();
    let bad = [blocks[0], blocks[blocks.len() - 1]];
    for block in bad {
        world.disk.flip_bit("data.0000", block * BLOCK, 0).unwrap();
    }
    let scrubber = engine.scrubber();
    let mut positions = vec![ScrubPosition::START];
    let mut read = 0;
    loop {
        let step = scrubber.step(*positions.last().unwrap()).unwrap();
        read += step.read;
        match step.next {
            Some(next) => positions.push(next),
            None => break,
        }
    }
    assert!(read > 0 && read <= scrubber.total() + RING, "{read} of {}", scrubber.total());
    assert!(positions.len() > 8, "{positions:?}");
    for position in &positions {
        assert_eq!(ScrubPart::from_name(position.part.name()), Some(position.part));
    }
    // From any position on, exactly the damage behind it is found.
    let first_data = positions.iter().position(|position| position.part == ScrubPart::Data).unwrap();
    let page = |block: u64| block / store::space::TABLE_ENTRIES;
    for position in &positions[first_data..] {
        let expected: Vec<DamagedPlace> =
            bad.into_iter().filter(|block| page(*block) >= position.next).map(DamagedPlace::Block).collect();
        let found: Vec<DamagedPlace> = scrub_from(&engine, Some(*position)).iter().map(|damage| damage.place).collect();
        assert_eq!(found, expected, "{position:?}");
    }
}

#[test]
fn damage_leaves_when_the_block_is_written_or_its_owners_are_deleted() {
    let disk = SimulatedDisk::new(1, simulated());
    Engine::init(&disk.directory(), InitParameters { uuid: [5; 16], journal_size: RING }).unwrap();
    let engine = Engine::open(disk.directory(), options(false)).unwrap();
    let id = engine.create_disk(new_disk("vm", Provisioning::Thin)).unwrap();
    (0..4).for_each(|block| write(&engine, id, block, 100 + block as u32));
    engine.settle(&engine.head(id)).unwrap();
    let snapshot =
        engine.snapshot(&[NewSnapshot { disk: id, name: "s".into(), uuid: [2; 16], incomplete: false }]).unwrap()[0];
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let world =
        World { disk: disk.clone(), model: BTreeMap::from([(id, BTreeMap::new())]), snapshots: BTreeSet::new() };
    let place = |block: u64| match world.plan(&engine, id, block).unwrap().parts.first() {
        Some(Part::Stored(stored)) => stored.block,
        _ => panic!("block {block} is stored"),
    };
    let bad = [place(0), place(1)];
    bad.iter().for_each(|block| disk.flip_bit("data.0000", block * BLOCK + 9, 1).unwrap());
    let damage = scrub(&engine);
    let places: Vec<DamagedPlace> = damage.iter().map(|damage| damage.place).collect();
    assert_eq!(places.iter().copied().collect::<BTreeSet<_>>(), bad.map(DamagedPlace::Block).into());
    let owners = |place| -> Vec<u64> {
        let found = engine.locate_damage(&[place], &|| true).unwrap();
        found.references[0].iter().map(|reference| reference.object).collect()
    };
    let still = |place| engine.scrubber().is_still_damaged(place).unwrap();
    let [first, second] = bad.map(DamagedPlace::Block);
    assert_eq!(owners(first), [id, snapshot]);
    // The head is written: the snapshot still refers to the block.
    write(&engine, id, 0, 7);
    assert_eq!((owners(first), still(first)), (vec![snapshot], true));
    engine.delete_snapshot(snapshot).unwrap();
    assert_eq!((owners(first), owners(second)), (vec![], vec![id]));
    engine.pump().unwrap();
    assert!(engine.check(CheckOptions { data: false, repair: false }, &|_, _| true).unwrap().findings.is_empty());
    assert_eq!((still(first), still(second)), (false, true), "the block of the deleted snapshot is free");
    // The right content is written again in place.
    write(&engine, id, 1, 101);
    engine.settle(&engine.head(id)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    assert!(!still(second));
    assert_eq!(scrub(&engine), []);
}

/// A medium whose page cache has the right content of one block of a data file, and whose device does not.
struct Rotten {
    inner: Arc<dyn Directory>,
    bad: Arc<Mutex<Option<u64>>>,
}

struct RottenFile {
    inner: Arc<dyn File>,
    bad: Arc<Mutex<Option<u64>>>,
    direct: bool,
}

impl Directory for Rotten {
    backend::forward_directory!(inner: remove, rename, list, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let inner = self.inner.open(name, mode)?;
        match name.starts_with("data.0") {
            true => Ok(Arc::new(RottenFile { inner, bad: Arc::clone(&self.bad), direct: mode == IoMode::Direct })),
            false => Ok(inner),
        }
    }

    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode)
    }
}

impl File for RottenFile {
    backend::forward_file!(inner: len, set_len, sync, punch);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.inner.read_at(buffer, offset)?;
        if let Some(bad) = self.bad.lock().unwrap().filter(|_| self.direct) {
            let at = bad * BLOCK;
            if (offset..offset + buffer.len() as u64).contains(&at) {
                buffer[(at - offset) as usize] ^= 1;
            }
        }
        Ok(())
    }

    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        if self.direct {
            return Ok(false);
        }
        self.read_at(buffer, offset).map(|()| true)
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        self.inner.write_at(slices, offset, durable)?;
        if self.direct && durable {
            *self.bad.lock().unwrap() = None;
        }
        Ok(())
    }
}

#[test]
fn a_block_is_written_again_from_the_page_cache() {
    let world = world(5);
    let bad = Arc::new(Mutex::new(None));
    let directory: Arc<dyn Directory> = Arc::new(Rotten { inner: world.disk.directory(), bad: Arc::clone(&bad) });
    let engine = Engine::open(directory, options(false)).unwrap();
    let blocks: Vec<u64> = world.owners(&engine).into_keys().collect();
    *bad.lock().unwrap() = Some(blocks[7]);
    let damage = scrub(&engine);
    assert_eq!(damage.len(), 1, "{damage:?}");
    assert_eq!(damage[0].place, DamagedPlace::Block(blocks[7]));
    assert_eq!(damage[0].repaired.as_deref(), Some("written again from the page cache"));
    assert_eq!(*bad.lock().unwrap(), None, "the device has the block again");
    assert_eq!(scrub(&engine), []);
    assert!(world.lost(&engine, "restored").is_empty());
}

/// Copies in another place, such as a replica: the content of a block by its checksum.
struct Elsewhere(BTreeMap<u64, Vec<u8>>);

impl Copies for Elsewhere {
    fn description(&self) -> &str {
        "written again from a replica"
    }

    fn read(&self, wanted: WantedBlock<'_>, copy: &mut Buffer) -> Result<bool> {
        let Some(bytes) = self.0.get(&wanted.references[0].offset) else { return Ok(false) };
        copy.copy_from_slice(bytes);
        Ok(true)
    }
}

#[test]
fn only_a_copy_with_the_right_checksum_replaces_a_block() {
    let world = world(6);
    let engine = Engine::open(world.disk.directory(), options(false)).unwrap();
    let (block, owners) = world.owners(&engine).into_iter().nth(3).unwrap();
    let (object, logical) = owners[0];
    let good = world.read(&engine, object, logical).unwrap();
    world.disk.flip_bit("data.0000", block * BLOCK + 11, 2).unwrap();
    let damage = scrub(&engine);
    assert!(damage.len() == 1 && damage[0].repaired.is_none(), "{damage:?}");
    let references = &located(&engine, &damage)[&DamagedPlace::Block(block)];
    let mut wrong = good.clone();
    wrong[0] ^= 1;
    let copies = |bytes: &[u8]| Elsewhere(BTreeMap::from([(references[0].offset, bytes.to_vec())]));
    let (wrong, right) = (copies(&wrong), copies(&good));
    let scrubber = engine.scrubber();
    let stored = || {
        let mut bytes = Buffer::zeroed(1);
        let file = world.disk.directory().open("data.0000", IoMode::Buffered).unwrap();
        file.read_at(&mut bytes, block * BLOCK).unwrap();
        bytes.to_vec()
    };
    let before = stored();
    assert_eq!(scrubber.restore_block(block, references, &[&wrong]).unwrap(), None);
    assert!(stored() == before, "the wrong copy was written");
    assert!(scrubber.is_still_damaged(DamagedPlace::Block(block)).unwrap());
    let restored = scrubber.restore_block(block, references, &[&wrong, &right]).unwrap();
    assert_eq!(restored.as_deref(), Some("written again from a replica"));
    assert!(!scrubber.is_still_damaged(DamagedPlace::Block(block)).unwrap());
    assert!(world.lost(&engine, "restored").is_empty());
}

#[test]
fn scrubs_beside_writers_report_nothing() {
    let disk = SimulatedDisk::new(1, simulated());
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: RING }).unwrap();
    let engine = Engine::open(disk.directory(), EngineOptions { metadata_cache: 0, ..options(true) }).unwrap();
    let disks: Vec<u64> = ["a", "b", "c"]
        .into_iter()
        .map(|name| {
            let thick = if name == "a" { Provisioning::ZeroedThick } else { Provisioning::Thin };
            engine.create_disk(new_disk(name, thick)).unwrap()
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for disk in disks {
            let (engine, stop) = (&engine, &stop);
            scope.spawn(move || {
                let mut random = Random(disk);
                let mut made = 0;
                while !stop.load(Ordering::Relaxed) {
                    let at = random.below(BLOCKS - 8);
                    match random.below(40) {
                        0 => engine.flush().unwrap(),
                        1 => engine.discard_blocks(&engine.head(disk), at..at + 8).unwrap(),
                        2 => engine.zero_blocks(&engine.head(disk), at..at + 4).unwrap(),
                        3 => {
                            made += 1;
                            let name = format!("s{made}");
                            let new = NewSnapshot { disk, name, uuid: [2; 16], incomplete: false };
                            let snapshot = engine.snapshot(&[new]).unwrap()[0];
                            engine.delete_snapshot(snapshot).unwrap();
                        }
                        _ => write(engine, disk, at, random.below(1 << 30) as u32),
                    }
                }
            });
        }
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        for round in 0..30 {
            assert_eq!(scrub(&engine), [], "round {round}");
        }
    });
    engine.close().unwrap();
}
