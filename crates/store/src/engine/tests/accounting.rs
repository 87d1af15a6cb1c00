//! The counted space equals the space that a deletion frees: in random histories of disks, snapshots and clones, random
//! sets are counted and then deleted. In every second history blocks are compressed too, so that disks, snapshots and
//! clones share packs, of which overwrites and discards leave parts. In two of three histories equal blocks are shared.
//! With both, writes are compared and compressed at once, too.
//! The counts are also compared with all entries of all trees.
//!
//! `LAMINA_SETS` sets the number of sets, `LAMINA_SETS_FROM` the first seed.

use super::between::lose_page;
use super::packed::{mixed, pack};
use super::*;
use crate::catalog::ObjectState;
use crate::engine::log::VERSION_WRITES_TO_PACKS;
use crate::space::SpaceCounts;
use crate::tree::{DistinctBlocks, Mapping, NodeId, Visit};
use std::collections::{BTreeMap, BTreeSet};

/// Sets for each seed.
const SETS_PER_SEED: u64 = 10;
/// Objects that exist when a set is chosen.
const OBJECTS: usize = 9;

fn go_on() -> bool {
    true
}

/// The blocks and nodes in use, which a deletion changes.
fn used(engine: &Engine) -> WouldFree {
    let StoreCounts { data, map, reserved, .. } = engine.counts();
    let used = |counts: SpaceCounts| counts.used;
    WouldFree { data: used(data), nodes: used(map), reserved }
}

fn less(before: WouldFree, after: WouldFree) -> WouldFree {
    WouldFree {
        data: before.data - after.data,
        nodes: before.nodes - after.nodes,
        reserved: before.reserved - after.reserved,
    }
}

/// All entries of the trees of some objects, put together.
#[derive(Default)]
struct Entries {
    /// Logical blocks: all, those that read as zeros, and those that are compressed. A block of each tree counts.
    mapped: (u64, u64, u64),
    /// Plain blocks; true for those that read as zeros.
    plain: BTreeMap<u64, bool>,
    /// Packs by their first blocks: their lengths, and the indexes in use.
    packs: BTreeMap<u64, (u64, BTreeSet<u64>)>,
    /// The blocks of the packs, for each entry that maps a part of one.
    packs_by_entry: u64,
}

impl Entries {
    fn of(engine: &Engine, objects: &[u64]) -> Self {
        let mut all = Self::default();
        let mut meta = engine.meta.lock();
        let roots = objects.iter().filter_map(|id| meta.catalog.get(*id).unwrap().root);
        for root in roots.collect::<Vec<NodeId>>() {
            let mut add = |visit: Visit| -> Result<bool> {
                if let Visit::Extent(mapping) = visit {
                    all.add(&mapping);
                }
                Ok(true)
            };
            crate::tree::walk(&mut meta.nodes(&mut Default::default()), root, &mut add).unwrap();
        }
        all
    }

    fn add(&mut self, mapping: &Mapping) {
        self.mapped.0 += mapping.blocks;
        match mapping.packed {
            Some(packed) => {
                self.mapped.2 += mapping.blocks;
                let (stored, used) = self.packs.entry(mapping.physical).or_default();
                *stored = u64::from(packed.stored);
                self.packs_by_entry += u64::from(packed.stored);
                used.extend((u64::from(packed.index)..).take(mapping.blocks as usize));
            }
            None => {
                self.mapped.1 += if mapping.unwritten { mapping.blocks } else { 0 };
                self.plain.extend((mapping.physical..).take(mapping.blocks as usize).map(|b| (b, mapping.unwritten)));
            }
        }
    }

    /// The data blocks in which everything is stored.
    fn stored(&self) -> BTreeSet<u64> {
        let packs = self.packs.iter().flat_map(|(start, (stored, _))| *start..start + stored);
        self.plain.keys().copied().chain(packs).collect()
    }

    fn packs(&self) -> u64 {
        self.packs.values().map(|(stored, _)| stored).sum()
    }
}

struct World {
    engine: Arc<Engine>,
    random: Random,
    names: u64,
    /// Whether blocks are compressed.
    packs: bool,
    /// Blocks that were compressed.
    packed: u64,
    /// Whether equal blocks are shared, and how many were.
    shares: bool,
    shared: u64,
    /// Blocks of data that were mapped to stored ones when they were written. This needs both.
    mapped: u64,
}

impl World {
    fn objects(&self, wanted: impl Fn(&crate::catalog::Object) -> bool) -> Vec<u64> {
        let found = |catalog: &crate::catalog::Catalog| {
            let alive = catalog.objects().filter(|object| object.state != ObjectState::Trash && wanted(object));
            alive.map(|object| object.id).collect::<BTreeSet<u64>>()
        };
        self.engine.with_catalog(found).into_iter().collect()
    }

    fn pick(&mut self, of: &[u64]) -> Option<u64> {
        (!of.is_empty()).then(|| of[self.random.below(of.len() as u64) as usize])
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("o{}", self.names)
    }

    /// Compares and compresses what is written to thin disks from now on.
    fn reduce_writes(&self) {
        if self.packs && self.shares {
            let thin = self.objects(|object| !object.is_snapshot() && object.provisioning == Provisioning::Thin);
            let packed: Vec<_> = thin.iter().map(|disk| (*disk, crate::pack::Codec::Lz4)).collect();
            let shared: Vec<_> = thin.iter().map(|disk| (*disk, "d".to_owned())).collect();
            self.engine.pack_writes_of(&packed).unwrap();
            self.engine.share_writes_of(&shared, 1 << 16);
        }
    }

    fn change(&mut self) {
        self.reduce_writes();
        self.change_something();
        let mapped = self.engine.shared_writes();
        self.shared += mapped - self.mapped;
        self.mapped = mapped;
    }

    fn change_something(&mut self) {
        let disks = self.objects(|object| !object.is_snapshot());
        let snapshots = self.objects(|object| object.is_snapshot());
        let Some(disk) = self.pick(&disks) else { return self.add_disk() };
        let few = disks.len() + snapshots.len() < OBJECTS;
        let head = self.engine.head(disk);
        let start = self.random.below(BLOCKS);
        let length = match self.random.below(10) {
            0 => 1 + self.random.below(300),
            1..=3 => 1 + self.random.below(16),
            _ => 1,
        };
        let length = length.min(BLOCKS - start);
        match self.random.below(100) {
            0..=3 if few => self.add_disk(),
            4..=9 if few => {
                let name = self.name();
                // A full file system refuses the snapshot of a thick disk.
                let _ = take(&self.engine, disk, &name);
            }
            10..=13 if few => {
                let name = self.name();
                if let Some(snapshot) = self.pick(&snapshots) {
                    self.engine.clone_snapshot(snapshot, &[new_disk(&name, BLOCKS)]).unwrap();
                }
            }
            14..=15 => self.engine.detach(disk).unwrap(),
            16 => {
                let own = self.objects(|object| object.is_snapshot() && object.disk == disk);
                if let Some(snapshot) = self.pick(&own) {
                    self.engine.revert(disk, snapshot).unwrap();
                }
            }
            17..=24 => self.engine.discard_blocks(&head, start..start + length).unwrap(),
            25..=29 => self.engine.zero_blocks(&head, start..start + length).unwrap(),
            30..=34 => {
                self.engine.pump().unwrap();
            }
            35 => self.engine.checkpoint().unwrap(),
            36..=38 if self.packs => self.pack(),
            39..=40 if self.shares => self.share(),
            _ => {
                // Blocks of one byte become packs of one block, the others packs of several.
                let (value, length) = (self.random.next() as u8, length as usize);
                let is_mixed = self.packs && self.random.percent(60);
                let data = match is_mixed {
                    // Windows are packs first, and parts of them are found at other places later.
                    true if self.shares => mixed((0..length).map(|at| ((usize::from(value) + at) % 200) as u8)),
                    true => mixed(std::iter::repeat_n(value, length)),
                    false => slice(value, length),
                };
                self.engine.write_blocks(&head, start, data).unwrap();
            }
        }
    }

    /// Compresses a part of a thin disk or of a snapshot.
    fn pack(&mut self) {
        let can = self.objects(|object| object.is_snapshot() || object.provisioning == Provisioning::Thin);
        let Some(object) = self.pick(&can) else { return };
        super::packed::quiet(&self.engine);
        if self.engine.with_catalog(|catalog| catalog.get(object).unwrap().is_snapshot()) {
            self.engine.wait_sealed(object).unwrap();
        }
        let start = self.random.below(BLOCKS);
        self.packed += pack(&self.engine, object, start..(start + 512).min(BLOCKS)).0;
    }

    /// Shares the equal blocks of some thin disks and snapshots.
    fn share(&mut self) {
        let can = self.objects(|object| object.is_snapshot() || object.provisioning == Provisioning::Thin);
        let chosen: Vec<u64> = can.into_iter().filter(|_| self.random.percent(60)).collect();
        super::packed::quiet(&self.engine);
        self.shared += super::shared::share(&self.engine, &chosen);
    }

    fn add_disk(&mut self) {
        let name = self.name();
        let kinds = [Provisioning::Thin, Provisioning::Thin, Provisioning::ZeroedThick];
        let kind = kinds[self.random.below(3) as usize];
        add_disk(&self.engine, &name, BLOCKS, kind);
    }

    /// A random set; the snapshots of a disk are in the set with the disk.
    fn set(&mut self) -> Vec<u64> {
        let share = [10, 30, 60, 100][self.random.below(4) as usize];
        let all = self.objects(|_| true);
        let chosen: BTreeSet<u64> = all.into_iter().filter(|_| self.random.percent(share)).collect();
        self.objects(|object| chosen.contains(&object.id) || object.is_snapshot() && chosen.contains(&object.disk))
    }

    fn delete(&mut self, set: &[u64]) {
        for clone in self.objects(|object| set.contains(&object.origin)) {
            self.engine.detach(clone).unwrap();
        }
        for disk in self.objects(|object| !object.is_snapshot() && set.contains(&object.id)) {
            self.engine.delete_disk(disk, &[]).unwrap();
        }
        for snapshot in self.objects(|object| set.contains(&object.id)) {
            self.engine.delete_snapshot(snapshot).unwrap();
        }
    }

    /// Drops the trees of deleted objects, and makes the drops durable.
    fn drop_deleted(&self) {
        while self.engine.drop_all_trash().unwrap() {}
        self.engine.checkpoint().unwrap();
    }
}

/// Compares the counts of a set, and of objects in it, with all entries of all trees. There are no deleted trees.
fn compare(world: &World, accounts: &mut Accounts<'_>, set: &[u64], context: &str) {
    let engine = &*world.engine;
    let all = world.objects(|_| true);
    let (whole, chosen) = (Entries::of(engine, &all), Entries::of(engine, set));
    let without = |gone: &[u64]| {
        let rest: Vec<u64> = all.iter().copied().filter(|id| !gone.contains(id)).collect();
        whole.stored().difference(&Entries::of(engine, &rest).stored()).count() as u64
    };
    assert_eq!(accounts.would_free(set).unwrap().data, without(set), "{context}");
    assert_eq!(accounts.counts().data.used, whole.stored().len() as u64, "{context}");
    for (entries, objects) in [(&whole, all.as_slice()), (&chosen, set)] {
        let space = accounts.distinct(objects, usize::MAX).unwrap();
        let unwritten = entries.plain.values().filter(|unwritten| **unwritten).count() as u64;
        let expected = DistinctBlocks {
            written: entries.plain.len() as u64 - unwritten,
            unwritten,
            packed: entries.packs.values().map(|(_, used)| used.len() as u64).sum(),
            packs: entries.packs(),
            own: space.blocks.own,
        };
        assert_eq!((space.blocks, space.blocks.stored()), (expected, entries.stored().len() as u64), "{context}");
        let packs = entries.packs.len() as u64;
        let fill = space.fill;
        assert_eq!((fill.packs, fill.examined, fill.blocks), (packs, packs, entries.packs()), "{context}");
        assert!(fill.bytes <= expected.packed * BLOCK_SIZE as u64, "{context}: {fill:?}");
        assert_eq!(space.packing_loss(), fill.blocks * BLOCK_SIZE as u64 - fill.bytes, "{context}");
    }
    for id in set.iter().take(2) {
        let (space, entries) = (accounts.space_of(*id).unwrap(), Entries::of(engine, &[*id]));
        assert_eq!((space.mapped, space.unwritten, space.packed), entries.mapped, "{context}");
        // A block counts for each place of the tree, and a pack that is mapped at places far from each other too.
        let plain = entries.mapped.0 - entries.mapped.2;
        assert_eq!((space.stored - space.packs, space.exclusive), (plain, without(&[*id])), "{context}");
        let (least, most) = (entries.packs(), entries.packs_by_entry);
        let possible = if world.shared > 0 { least..=most } else { least..=least };
        assert!(possible.contains(&space.packs), "{context}: {} of {possible:?}", space.packs);
        let walked = accounts.distinct(&[*id], 0).unwrap().blocks;
        let blocks = accounts.distinct_blocks(&[*id]).unwrap();
        assert_eq!(blocks, DistinctBlocks { own: 0, ..walked }, "{context}");
    }
}

/// Returns how many blocks were compressed, how many were shared, and in which version the datastore is at the end.
fn delete_sets(seed: u64) -> (u64, u64, u32) {
    let (_disk, engine) = made();
    let mut world = World {
        engine,
        random: Random(seed),
        names: 0,
        packs: !seed.is_multiple_of(2),
        packed: 0,
        shares: !seed.is_multiple_of(3),
        shared: 0,
        mapped: 0,
    };
    for round in 0..SETS_PER_SEED {
        let changes = 20 + world.random.below(100);
        (0..changes).for_each(|_| world.change());
        if world.random.percent(30) {
            // These objects are deleted, but their trees are not dropped when the next set is counted.
            let set = world.set();
            world.delete(&set);
        }
        let set = world.set();
        let engine = Arc::clone(&world.engine);
        let expected = engine.would_free(&set, &go_on).unwrap();
        world.drop_deleted();
        let before = used(&engine);
        let mut accounts = engine.accounts(&[], &go_on).unwrap();
        assert_eq!(accounts.would_free(&set).unwrap(), expected, "seed {seed}, set {round}: dropped trees count");
        for id in set.iter().take(2) {
            let (space, blocks) = (accounts.space_of(*id).unwrap(), engine.count_blocks(*id).unwrap());
            assert_eq!((space.mapped, space.unwritten), (blocks.allocated, blocks.unwritten), "seed {seed}");
            if space.packs == 0 {
                assert_eq!(space.stored, blocks.allocated, "seed {seed}");
            }
            if space.packs == 0 && world.shared == 0 {
                assert_eq!(space.exclusive, blocks.exclusive, "seed {seed}");
            }
        }
        if round % 3 == 0 {
            compare(&world, &mut accounts, &set, &format!("seed {seed}, set {round}: {set:?}"));
        }
        drop(accounts);
        assert_eq!(used(&engine), before, "seed {seed}: a count changes nothing");
        world.delete(&set);
        world.drop_deleted();
        assert_eq!(less(before, used(&engine)), expected, "seed {seed}, set {round}: {set:?}");
    }
    is_whole(&world.engine);
    (world.packed, world.shared, world.engine.log.version())
}

#[test]
fn a_deletion_frees_the_blocks_that_a_count_says_it_would_free() {
    let number = |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (first, sets) = (number("LAMINA_SETS_FROM", 0), number("LAMINA_SETS", 100));
    let done = (first..first + sets.div_ceil(SETS_PER_SEED)).map(delete_sets);
    let (packed, shared, version) = done.fold((0, 0, 0), |all, one| (all.0 + one.0, all.1 + one.1, all.2.max(one.2)));
    let few = sets < 3 * SETS_PER_SEED;
    assert!(version == VERSION_WRITES_TO_PACKS || few, "no write was mapped to a pack");
    assert!(packed > sets || few, "{packed} blocks were compressed for {sets} sets");
    assert!(shared > sets || few, "{shared} blocks were shared for {sets} sets");
}

#[test]
fn a_pack_with_other_content_than_at_the_moment_of_the_view_is_not_examined() {
    let (_disk, engine) = made();
    let value = |block: u64| block as u8;
    engine.write_blocks(&engine.head(1), 0, mixed((0..64).map(value))).unwrap();
    super::packed::quiet(&engine);
    pack(&engine, 1, 0..64);
    super::packed::quiet(&engine);
    let (run, packed) = super::packed::place(&engine, 1, 0);
    assert!(packed);
    let mut accounts = engine.accounts(&[], &go_on).unwrap();
    let before = accounts.distinct(&[1], 10).unwrap();
    assert_eq!((before.fill.packs, before.fill.examined, before.blocks.packed), (2, 2, 64));
    // Half of each block can be compressed. The rest of the packs are their indexes and the ends of their last blocks.
    let (packs, loss) = (before.blocks.packs * BLOCK_SIZE as u64, before.packing_loss());
    assert!((64 * 2124..64 * 2124 + 64 * 100).contains(&before.fill.bytes), "{before:?}");
    assert!(loss > 0 && loss == packs - before.fill.bytes && before.blocks.packs == 34, "{before:?}");
    assert_eq!(accounts.distinct(&[1], 1).unwrap().fill.examined, 1);
    // Another pack in the place of the first.
    let other = slice(9, 1);
    let bytes = crate::pack::Packer::new(crate::pack::Codec::Lz4).unwrap().pack(&[Some(&other[..])]);
    let (file, offset) = engine.files.locate(run).unwrap();
    file.write_at(&[&bytes], offset, false).unwrap();
    let after = accounts.distinct(&[1], 10).unwrap();
    assert_eq!((after.blocks, after.fill.packs, after.fill.examined), (before.blocks, 2, 1));
}

#[test]
fn a_count_includes_writes_that_were_only_buffered_and_no_later_ones() {
    let (_disk, engine) = made();
    (0..100).for_each(|block| write(&engine, block, 1));
    let snapshot = take(&engine, 1, "s");
    assert_eq!(engine.would_free(&[snapshot], &go_on).unwrap(), WouldFree::default());
    (0..10).for_each(|block| write(&engine, block, 2));
    let mut accounts = engine.accounts(&[snapshot], &go_on).unwrap();
    (10..60).for_each(|block| write(&engine, block, 3));
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    assert_eq!(accounts.would_free(&[snapshot]).unwrap().data, 10);
    assert_eq!(accounts.space_of(snapshot).unwrap().shared(), 90);
    drop(accounts);
    assert_eq!(engine.would_free(&[snapshot], &go_on).unwrap().data, 60);
    engine.delete_snapshot(snapshot).unwrap();
    let gone = engine.would_free(&[snapshot], &go_on).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

#[test]
fn a_count_can_be_stopped_and_runs_beside_a_check() {
    let (_disk, engine) = made();
    (0..BLOCKS).step_by(2).for_each(|block| write(&engine, block, 1));
    let stopped = engine.would_free(&[1], &|| false).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Interrupted);
    let counted = std::cell::Cell::new(false);
    engine
        .check(CheckOptions { data: true, repair: false }, &|_, _| {
            counted.set(true);
            engine.would_free(&[1], &go_on).is_ok_and(|free| free.data == BLOCKS / 2)
        })
        .unwrap();
    assert!(counted.get());
}

#[test]
fn a_deleted_disk_that_cannot_be_read_prevents_no_count_of_others() {
    let (disk, engine) = made();
    for (number, blocks) in [(2, 30), (3, 20)] {
        assert_eq!(add_disk(&engine, &format!("vm{number}"), BLOCKS, Provisioning::Thin), number);
        for block in 0..blocks {
            engine.write_blocks(&engine.head(number), block, slice(1, 1)).unwrap();
        }
    }
    (0..50).for_each(|block| write(&engine, block, 1));
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let root = engine.with_catalog(|catalog| catalog.get(2).unwrap().root.unwrap());
    let mend = lose_page(&disk, "map", root.0);
    engine.delete_disk(2, &[]).unwrap();
    engine.delete_disk(3, &[]).unwrap();
    let mut accounts = engine.accounts(&[1], &go_on).unwrap();
    assert_eq!(accounts.would_free(&[1]).unwrap().data, 50);
    assert_eq!((accounts.space_of(1).unwrap().exclusive, accounts.deleted().unwrap().data), (50, 20));
    drop(accounts);
    mend();
    let mut accounts = engine.accounts(&[1], &go_on).unwrap();
    assert_eq!((accounts.would_free(&[1]).unwrap().data, accounts.deleted().unwrap().data), (50, 50));
}

#[test]
fn deleted_trees_are_walked_once_for_all_counts() {
    let (_disk, engine) = made();
    let add = |number: u64| {
        let id = add_disk(&engine, &format!("d{number}"), BLOCKS, Provisioning::Thin);
        engine.write_blocks(&engine.head(id), 0, slice(1, 1)).unwrap();
        engine.settle(&engine.head(id)).unwrap();
        id
    };
    let deleted = 2 * NODES_PER_QUESTION;
    let ids: Vec<u64> = (0..deleted + 10).map(add).collect();
    let (gone, stay) = ids.split_at(deleted as usize);
    gone.iter().for_each(|id| engine.delete_disk(*id, &[]).unwrap());
    let asked = std::cell::Cell::new(0);
    let go_on = || {
        asked.set(asked.get() + 1);
        true
    };
    let mut accounts = engine.accounts(&[], &go_on).unwrap();
    assert_eq!(accounts.deleted().unwrap().data, deleted);
    let before = asked.get();
    assert!(before >= 2, "{before}");
    for id in stay {
        assert_eq!(accounts.would_free(&[*id]).unwrap(), WouldFree { data: 1, nodes: 1, reserved: 0 });
    }
    assert_eq!(asked.get() - before, stay.len(), "one question for each tree of one node");
}

#[test]
fn a_view_for_a_count_waits_until_a_snapshot_taken_meanwhile_has_its_tree() {
    let (_disk, engine) = made();
    (0..40).for_each(|block| write(&engine, block, 1));
    // This snapshot stands for a snapshot that is taken after the flush and before the view.
    let snapshot = take(&engine, 1, "s");
    let state = engine.with_catalog(|catalog| catalog.get(snapshot).unwrap().state);
    assert_eq!(state, ObjectState::Unsealed);
    let view = engine.view_sealed().unwrap();
    let object = view.catalog().get(snapshot).unwrap();
    assert_eq!((object.state, object.root.is_some()), (ObjectState::Snapshot, true));
    drop(view);
    let mut accounts = engine.accounts(&[], &go_on).unwrap();
    assert_eq!(accounts.space_of(snapshot).unwrap().mapped, 40);
}

/// The snapshot is not sealed, and its record is on another page of the catalog than that of its disk.
#[test]
fn space_is_counted_beside_a_snapshot_whose_disk_has_lost_its_record() {
    let (disk, engine) = made();
    for number in 2..10 {
        add_disk(&engine, &format!("disk {number}"), 8, Provisioning::Thin);
    }
    write(&engine, 0, 1);
    let snapshot = take(&engine, 1, "s");
    engine.checkpoint().unwrap();
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    disk.flip_bit("catalog", 100, 1).unwrap();
    let engine = open(&disk).unwrap();
    let state = engine.with_catalog(|catalog| catalog.get(snapshot).unwrap().state);
    assert_eq!(state, ObjectState::Unsealed);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let waited = engine.wait_sealed(snapshot).map_err(|error| error.kind());
        let counted = engine.accounts(&[], &go_on).map(drop);
        sender.send((waited, counted.map_err(|error| error.kind())))
    });
    let (waited, counted) = receiver.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    assert_eq!((waited, counted), (Err(ErrorKind::NotFound), Ok(())));
}
