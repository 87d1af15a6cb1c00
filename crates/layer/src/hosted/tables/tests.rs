//! Tables that other threads change, commit and evict between two steps of a writer.

use super::super::create::create_shaped;
use super::super::{CreateOptions, Hosted, OpenOptions, read_header};
use super::*;
use crate::Layer;
use crate::proving::ChangedInRead;
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use std::sync::atomic::AtomicBool;

const GRAIN: u64 = 8 * SECTOR;
const TABLE_ENTRIES: u32 = 16;

/// An extent with two tables, opened for writing, that keeps one unchanged table in memory. With `bare`, the first
/// table does not exist yet.
fn crowded(bare: bool) -> Hosted {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("disk.vmdk", IoMode::Buffered).unwrap();
    let capacity = 2 * u64::from(TABLE_ENTRIES) * GRAIN;
    let options = CreateOptions { capacity, descriptor: None, zero_grains: false };
    create_shaped(file.as_ref(), "disk.vmdk", &options, GRAIN / SECTOR, TABLE_ENTRIES).unwrap();
    if bare {
        let header = read_header(file.as_ref()).unwrap();
        for offset in [header.directory_offset, header.redundant_offset] {
            file.write_at(&[&[0; 4]], offset * SECTOR, true).unwrap();
        }
    }
    let options = OpenOptions { image: "disk.vmdk".to_owned(), writable: true, parent: false, force: false };
    let layer = Hosted::open(file, &options).unwrap();
    layer.tables.state.write().cache = ClockCache::new(1);
    layer
}

fn table(layer: &Hosted, index: usize) -> Arc<Table> {
    layer.tables.get(layer.file.as_ref(), index, &layer.warnings).unwrap().unwrap()
}

/// Another writer writes the first grain and flushes, and its table is evicted.
fn write_and_evict(layer: &Hosted) -> u32 {
    layer.write(0, &[&[7; GRAIN as usize]]).unwrap();
    let place = table(layer, 0).entry(0);
    layer.flush().unwrap();
    table(layer, 1);
    assert!(place != ENTRY_ABSENT && layer.tables.state.read().get(0).is_none());
    place
}

#[test]
fn a_change_of_an_evicted_table_keeps_the_changes_of_other_writers() {
    let layer = crowded(false);
    let before = table(&layer, 0);
    let place = write_and_evict(&layer);
    assert_eq!(before.entry(0), place, "a table is in memory once");
    // The table is loaded and evicted: from here on `before` is another version than the one in the file.
    table(&layer, 0);
    table(&layer, 1);
    layer.write(GRAIN, &[&[8; GRAIN as usize]]).unwrap();
    layer.flush().unwrap();
    table(&layer, 1);
    assert_eq!(before.entry(1), ENTRY_ABSENT);
    let mut old = Vec::new();
    let set = |entry: usize, old: &mut Vec<u32>| {
        let values = std::iter::once(ENTRY_ABSENT);
        layer.tables.set(layer.file.as_ref(), 0, &layer.warnings, entry, values, |place| old.push(place))
    };
    set(0, &mut old).unwrap();
    assert_eq!(old, [place]);
    assert_ne!(table(&layer, 0).entry(1), ENTRY_ABSENT, "the grain of the other writer");
    layer.flush().unwrap();
    table(&layer, 1);
    assert_ne!(table(&layer, 0).entry(1), ENTRY_ABSENT);
}

#[test]
fn a_table_is_not_added_again_after_another_writer_has_added_it() {
    let layer = crowded(true);
    assert!(layer.tables.get(layer.file.as_ref(), 0, &layer.warnings).unwrap().is_none());
    let place = write_and_evict(&layer);
    assert!(!layer.tables.add(0, [1, 2]), "an empty table would replace the one with the flushed grain");
    assert_eq!(table(&layer, 0).entry(0), place);
}

/// A repair replaces a table after a reader has read both of its copies.
#[test]
fn a_table_that_was_read_before_its_repair_does_not_replace_the_repaired_one() {
    let layer = crowded(false);
    let places = layer.tables.directories().named(0);
    let mut entries = vec![ENTRY_ABSENT; TABLE_ENTRIES as usize];
    entries[3] = 4096;
    let file = ChangedInRead {
        inner: Arc::clone(&layer.file),
        armed: Arc::new(AtomicBool::new(true)),
        start: u64::from(places[1]) * SECTOR,
        before: TABLE_ENTRIES as usize * 4,
        change: || layer.tables.replace(0, entries.clone(), places, false),
    };
    let read = layer.tables.get(&file, 0, &layer.warnings).unwrap().unwrap();
    assert!(!file.armed.load(Ordering::SeqCst), "the second copy was not read");
    assert_eq!((read.entry(3), table(&layer, 0).entry(3)), (4096, 4096));
}
