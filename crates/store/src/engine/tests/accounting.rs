//! The counted space equals the space that a deletion frees: in random histories of disks, snapshots and clones, random
//! sets are counted and then deleted.
//!
//! `LAMINA_SETS` sets the number of sets, `LAMINA_SETS_FROM` the first seed.

use super::between::lose_page;
use super::*;
use crate::catalog::ObjectState;
use crate::space::SpaceCounts;
use std::collections::BTreeSet;

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

struct World {
    engine: Arc<Engine>,
    random: Random,
    names: u64,
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

    fn change(&mut self) {
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
            _ => {
                let data = slice(self.random.next() as u8, length as usize);
                self.engine.write_blocks(&head, start, data).unwrap();
            }
        }
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

fn delete_sets(seed: u64) {
    let (_disk, engine) = made();
    let mut world = World { engine, random: Random(seed), names: 0 };
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
            assert_eq!((space.stored, space.exclusive), (blocks.allocated, blocks.exclusive), "seed {seed}");
        }
        drop(accounts);
        assert_eq!(used(&engine), before, "seed {seed}: a count changes nothing");
        world.delete(&set);
        world.drop_deleted();
        assert_eq!(less(before, used(&engine)), expected, "seed {seed}, set {round}: {set:?}");
    }
    is_whole(&world.engine);
}

#[test]
fn a_deletion_frees_the_blocks_that_a_count_says_it_would_free() {
    let number = |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (first, sets) = (number("LAMINA_SETS_FROM", 0), number("LAMINA_SETS", 100));
    for seed in first..first + sets.div_ceil(SETS_PER_SEED) {
        delete_sets(seed);
    }
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
