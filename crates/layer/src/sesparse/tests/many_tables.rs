//! Images with more tables than an opening after a crash reads. The opening searches only the tables to which a damaged
//! owner entry may belong. If these are too many, it leaves the grain to a wipe. Checks and repairs read every table.

use super::super::entry::{Entry, Grain, Owner, Table, encode_slot};
use super::super::recover::CONFIRM_TABLES;
use super::super::state::{backmap_page, bitmap_page, page_index, table_page};
use super::*;
use backend::BLOCK_SIZE;

const TABLES: u64 = 2100;
/// Bytes that a table maps.
const SPAN: u64 = 4096 * GRAIN;
/// Tables with numbers that equal those of few other tables in all but one byte.
const FEW: [u64; 4] = [0, 5, 1037, 2099];

const _: () = assert!(TABLES > CONFIRM_TABLES as u64);

/// An image with two grains in each table, killed after the second grain of some tables was released: these second
/// grains are allocated, and no table names them.
fn killed(given_up: impl Iterator<Item = u64>) -> SimulatedDisk {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, TABLES * SPAN, writing());
    for slot in 0..TABLES {
        layer.write(slot * SPAN, &[&stamped(2, slot + 1)]).unwrap();
    }
    layer.flush().unwrap();
    for slot in given_up {
        layer.zero(slot * SPAN + GRAIN..slot * SPAN + 2 * GRAIN, false).unwrap();
    }
    layer.flush().unwrap();
    drop(layer);
    disk
}

fn copy(disk: &SimulatedDisk) -> SimulatedDisk {
    disk.copy_of_durable(1, SimulatedOptions::default())
}

fn put(disk: &SimulatedDisk, offset: u64, word: u64) {
    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    file.write_at(&[&word.to_le_bytes()], offset, true).unwrap();
}

/// Offsets in the file.
struct Places {
    layer: SeSparse,
}

impl Places {
    fn of(disk: &SimulatedDisk) -> Self {
        Self { layer: open(&*copy(disk).directory(), IoMode::Buffered, Options::default()).unwrap() }
    }

    /// The first entry of a slot's table, and its grain.
    fn first(&self, slot: u64) -> (Owner, u64) {
        let found = self.layer.settle(|state| {
            let table = state.table_of(slot)?.unwrap_or(Table(0));
            Ok((Owner { table, entry: 0 }, state.word(table_page(table, 0), page_index(0))?))
        });
        let (owner, raw) = found.unwrap();
        let Some(Entry::Data(Grain(grain))) = Entry::decode(raw) else { panic!("slot {slot}: {raw:#x}") };
        (owner, grain)
    }

    fn owner(&self, grain: u64) -> u64 {
        self.layer.page_offset(backmap_page(grain)) + page_index(grain) as u64 * 8
    }

    fn entry(&self, owner: Owner) -> u64 {
        let entry = u64::from(owner.entry);
        self.layer.page_offset(table_page(owner.table, entry)) + page_index(entry) as u64 * 8
    }
}

/// Compares the first grain of each table, and the second one where it was not released.
fn compare(layer: &SeSparse, given_up: &[u64]) {
    for slot in 0..TABLES {
        let second = if given_up.contains(&slot) { 0 } else { slot + 1 };
        let expected = [[slot + 1; SECTORS as usize], [second; SECTORS as usize]].concat();
        assert_eq!(stamps(layer, slot * SPAN, 2 * GRAIN).unwrap(), expected, "slot {slot}");
    }
}

/// Writes that allocate every free grain of the file, and more.
fn use_it(layer: &SeSparse) {
    for slot in (0..TABLES).step_by(7) {
        layer.write(slot * SPAN + 100 * GRAIN, &[&stamped(3, 1 << 40)]).unwrap();
    }
    layer.flush().unwrap();
}

fn mapped(layer: &SeSparse) -> u64 {
    layer.usage().unwrap().mapped / GRAIN
}

#[test]
fn opening_frees_unused_grains_of_a_few_regions_after_a_crash() {
    let layer = open(&*killed(FEW.into_iter()).directory(), IoMode::Buffered, writing()).unwrap();
    assert_eq!(mapped(&layer), 2 * TABLES - FEW.len() as u64);
    use_it(&layer);
    compare(&layer, &FEW);
    assert_clean(&layer);
}

#[test]
fn opening_leaves_unused_grains_of_many_regions_to_a_wipe() {
    // These numbers have each of the nine high bytes, so that the number of any table may equal one of these numbers in
    // all but one byte.
    let given_up: Vec<u64> = (0..TABLES).step_by(100).collect();
    let layer = open(&*killed(given_up.iter().copied()).directory(), IoMode::Buffered, writing()).unwrap();
    assert_eq!(mapped(&layer), 2 * TABLES, "the opening frees nothing");
    let report = layer.check(false, &NoProgress).unwrap();
    assert!(report.is_lost_space_only() && report.unnamed == given_up.len() as u64, "{report:?}");
    use_it(&layer);
    compare(&layer, &given_up);
    let wiped = layer.wipe(false, &NoProgress).unwrap();
    assert_eq!(wiped.unnamed, given_up.len() as u64);
    compare(&layer, &given_up);
    assert_clean(&layer);
}

#[test]
fn a_wrong_owner_among_many_tables_frees_no_grain_that_an_entry_names() {
    for many in [false, true] {
        let given_up: Vec<u64> = if many { (0..TABLES).step_by(100).collect() } else { FEW.to_vec() };
        let disk = killed(given_up.iter().copied());
        let places = Places::of(&disk);
        let disk = copy(&disk);
        // One wrong byte in each of four owners: the low byte of the table's number changes to that of another table in
        // use; the high byte changes to that of another table in use; a byte changes to that of a table not in use; the
        // number of the entry changes.
        let wrong = [(3, 1, 0), (1038, 0x100, 0), (2060, 0xff, 0), (2098, 0, 9)];
        for (slot, table, entry) in wrong {
            let (owner, grain) = places.first(slot);
            let other = Owner { table: Table(owner.table.0 ^ table), entry: owner.entry ^ entry };
            assert_ne!(other, owner);
            put(&disk, places.owner(grain), other.encode());
        }
        let layer = open(&*copy(&disk).directory(), IoMode::Buffered, writing()).unwrap();
        let freed = if many { 0 } else { given_up.len() as u64 };
        assert_eq!(mapped(&layer), 2 * TABLES - freed, "many {many}");
        use_it(&layer);
        compare(&layer, &given_up);
        let report = layer.check(true, &NoProgress).unwrap();
        assert!(!report.is_damaged() && report.repaired >= wrong.len() as u64, "many {many}: {report:?}");
        compare(&layer, &given_up);
        assert_clean(&layer);
    }
}

#[test]
fn a_repair_corrects_one_wrong_entry_in_any_of_many_tables() {
    let disk = killed(std::iter::empty());
    open(&*disk.directory(), IoMode::Buffered, writing()).unwrap().close().unwrap();
    let places = Places::of(&disk);
    let disk = copy(&disk);
    let (entry, grain) = places.first(2070);
    put(&disk, places.entry(entry), Entry::Data(Grain(grain)).encode() ^ 4 << 60);
    let (owner, grain) = places.first(2071);
    put(&disk, places.owner(grain), Owner { table: Table(owner.table.0 ^ 2), ..owner }.encode());
    let (_, grain) = places.first(2072);
    let at = places.layer.page_offset(bitmap_page(grain)) + grain / 64 % (BLOCK_SIZE as u64 / 8) * 8;
    put(&disk, at, !(1 << (grain % 64)));
    let slot = places.layer.layout.directory.start() + 2073 * 8;
    put(&disk, slot, encode_slot(Table(0)) | 1 << 40);
    let options = Options { repair: true, ..writing() };
    let layer = open(&*copy(&disk).directory(), IoMode::Buffered, options).unwrap();
    let report = layer.check(true, &NoProgress).unwrap();
    assert!(!report.is_damaged() && report.repaired >= 4, "{report:?}");
    use_it(&layer);
    compare(&layer, &[]);
    assert_clean(&layer);
    layer.close().unwrap();
}
