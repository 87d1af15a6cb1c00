//! Checks of an image that is being written: no write waits for them, and they report all damage and nothing else.

use super::super::entry::{Entry, Grain, GrainRun, Owner, Table, encode_slot};
use super::super::state::{bitmap_page, page_index, table_page};
use super::*;
use backend::simulated::Request;
use backend::{LocalFile, LocalPart};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Directory slots in use. A check examines one slot per step.
const SLOTS: [u64; 6] = [0, 1, 2, 5, 6, 9];

/// Called after a read, with its offset.
type After = Box<dyn Fn(u64) + Send + Sync>;

/// A file that reports its reads and reserves no space: tables stay holes until a commit writes them.
struct Watched {
    file: Arc<dyn File>,
    after: OnceLock<After>,
}

impl Watched {
    fn empty() -> (Arc<Self>, Arc<dyn File>) {
        Self::over(Arc::new(MemoryFile::over(Arc::new(Vec::new()))))
    }

    fn over(file: Arc<dyn File>) -> (Arc<Self>, Arc<dyn File>) {
        let watched = Arc::new(Self { file, after: OnceLock::new() });
        (Arc::clone(&watched), watched)
    }

    fn watch(&self, after: impl Fn(u64) + Send + Sync + 'static) {
        assert!(self.after.set(Box::new(after)).is_ok());
    }
}

impl File for Watched {
    backend::forward_file!(file: len, set_len, write_at, sync, punch);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.file.read_at(buffer, offset)?;
        if let Some(after) = self.after.get() {
            after(offset);
        }
        Ok(())
    }

    fn local(&self) -> Option<LocalPart<'_>> {
        Some(LocalPart { file: self, descriptor: None, mode: IoMode::Buffered })
    }
}

impl LocalFile for Watched {
    fn reserve(&self, _offset: u64, _length: u64) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn next_allocated(&self, offset: u64) -> std::io::Result<Option<std::ops::Range<u64>>> {
        self.file.next_allocated(offset)
    }

    fn allocated(&self) -> std::io::Result<u64> {
        self.file.allocated()
    }
}

fn fill(layer: &SeSparse, random: &mut Random, operations: u64) {
    for _ in 0..operations {
        Operation::draw(random, &SLOTS, 200).apply(layer).unwrap();
    }
}

#[test]
fn a_check_delays_no_write_by_its_reads_or_steps() {
    let (file, as_file) = Watched::empty();
    let made = SeSparse::create(Arc::clone(&as_file), NAME, 200 * MIB, writing()).unwrap();
    fill(&made, &mut Random(1), 60);
    made.close().unwrap();
    // No page is in memory yet.
    let layer = Arc::new(SeSparse::open(as_file, NAME, writing()).unwrap());
    // Counts all reads, and the reads during which a writer of the image would have to wait.
    let counts = Arc::new([const { AtomicU64::new(0) }; 2]);
    let (weak, counted) = (Arc::downgrade(&layer), Arc::clone(&counts));
    file.watch(move |_| {
        if let Some(layer) = weak.upgrade() {
            let free = layer.gate.try_read().is_some() && layer.state.try_lock().is_some();
            counted[0].fetch_add(1, Ordering::Relaxed);
            counted[1].fetch_add(u64::from(!free), Ordering::Relaxed);
        }
    });
    let (mut random, mut asked, mut waits) = (Random(2), 0, 0);
    let report = layer.check(
        false,
        &steps(|_, _| {
            asked += 1;
            match layer.gate.try_read().map(drop) {
                Some(()) => fill(&layer, &mut random, 2),
                None => waits += 1,
            }
            true
        }),
    );
    assert!(report.unwrap().is_clean());
    let [reads, held] = [0, 1].map(|count| counts[count].load(Ordering::Relaxed));
    assert!(asked >= SLOTS.len() && reads >= SLOTS.len() as u64);
    assert_eq!((waits, held), (0, 0), "steps and reads of the check for which a writer waits");
}

/// At each step of a check a guest changes the image. Some steps are preceded by a commit, and during some a reader
/// holds an epoch.
#[test]
fn a_check_reports_no_grain_that_changes_between_its_steps() {
    for seed in 0..60 {
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 200 * MIB, Options { cache: 0, ..writing() });
        let mut random = Random(seed);
        fill(&layer, &mut random, 40);
        for _ in 0..4 {
            let mut reader = None;
            let report = layer.check(
                false,
                &steps(|_, _| {
                    let operations = random.below(6);
                    fill(&layer, &mut random, operations);
                    if random.once_in(3) {
                        layer.flush().unwrap();
                    }
                    reader = if random.once_in(4) { layer.epoch() } else { None };
                    true
                }),
            );
            let report = report.unwrap();
            assert!(report.is_clean(), "seed {seed}: {report:?}");
        }
        layer.flush().unwrap();
        assert_clean(&layer);
        layer.close().unwrap();
    }
}

#[test]
fn writes_reads_and_flushes_during_a_check() {
    for cache in [0, 64 << 20] {
        let disk = simulated(7);
        let layer = create(&disk, IoMode::Buffered, 200 * MIB, Options { cache, ..writing() });
        let running = AtomicU64::new(3);
        let mut checks = 0;
        std::thread::scope(|scope| {
            for writer in 0..3 {
                let (layer, running) = (&layer, &running);
                scope.spawn(move || {
                    let mut random = Random(writer);
                    for number in 0..1500 {
                        Operation::draw(&mut random, &SLOTS, 300).apply(layer).unwrap();
                        if number % 40 == 0 {
                            layer.flush().unwrap();
                        }
                    }
                    running.fetch_sub(1, Ordering::AcqRel);
                });
            }
            while running.load(Ordering::Acquire) > 0 || checks == 0 {
                let report = layer.check(false, &NoProgress).unwrap();
                assert!(report.is_clean(), "check {checks}: {report:?}");
                checks += 1;
            }
        });
        assert_clean(&layer);
    }
}

/// The first entries of a table that name grains.
fn held(layer: &SeSparse, slot: u64, count: usize) -> Vec<(Owner, u64)> {
    let found = layer.settle(|state| {
        let table = state.table_of(slot)?.unwrap_or(Table(0));
        let mut found = Vec::new();
        for entry in 0..4096 {
            let raw = state.word(table_page(table, entry), page_index(entry))?;
            if let Some(Entry::Data(grain)) = Entry::decode(raw) {
                found.push((Owner { table, entry: entry as u16 }, grain.0));
            }
        }
        Ok(found)
    });
    let mut found = found.unwrap();
    found.truncate(count);
    assert_eq!(found.len(), count);
    found
}

/// Damages the image in each possible way, only in tables that the test does not change afterwards.
fn damage(layer: &SeSparse) {
    let [one, other, third, fourth] = held(layer, 1, 4)[..] else { panic!("four entries") };
    let set = |owner: Owner, raw: u64| {
        let (key, index) = (table_page(owner.table, owner.entry.into()), page_index(owner.entry.into()));
        layer.settle(|state| state.need(key).map(|()| state.cache.set(key, index, raw))).unwrap();
    };
    // In this order: an entry that names another entry's grain, so that no entry names its own grain; an invalid entry;
    // a wrong owner; a wrong bit.
    set(one.0, Entry::Data(Grain(other.1)).encode());
    set(third.0, 0xf << 60);
    layer
        .settle(|state| {
            state.need(bitmap_page(fourth.1))?;
            state.owner(fourth.1)?;
            state.set_owner(fourth.1, None);
            state.set_bits(GrainRun { start: other.1, count: 1 }, false)
        })
        .unwrap();
}

#[test]
fn a_check_finds_damage_during_changes() {
    for seed in 0..20 {
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 200 * MIB, writing());
        let mut random = Random(seed);
        layer.write(4096 * GRAIN, &[&stamped(8, 1)]).unwrap();
        fill(&layer, &mut random, 40);
        layer.flush().unwrap();
        damage(&layer);
        let quiet = layer.check(false, &NoProgress).unwrap();
        assert!(quiet.is_damaged() && (quiet.unallocated, quiet.misowned) == (1, 2), "{quiet:?}");
        let report = layer.check(
            false,
            &steps(|_, _| {
                // Changes tables that are not damaged, and creates a new one.
                Operation::draw(&mut random, &[2, 5, 9, 11], 200).apply(&layer).unwrap();
                true
            }),
        );
        let (found, expected) = (report.unwrap(), quiet);
        assert_eq!((found.findings, found.doubts), (expected.findings, expected.doubts), "seed {seed}");
        assert_eq!(found.proven, expected.proven, "seed {seed}");
    }
}

/// An entry changes between the check of its table and the check of owners: its old value must not be reported.
#[test]
fn a_check_does_not_report_an_entry_that_changes_before_the_comparison() {
    let (file, as_file) = Watched::empty();
    let made = SeSparse::create(Arc::clone(&as_file), NAME, 64 * MIB, writing()).unwrap();
    made.write(0, &[&stamped(16, 1)]).unwrap();
    made.close().unwrap();
    // No page is in memory yet.
    let layer = Arc::new(SeSparse::open(as_file, NAME, writing()).unwrap());
    let (table, changed) = (made.page_offset(table_page(Table(0), 0)), Arc::new(AtomicU64::new(0)));
    let (weak, times) = (Arc::downgrade(&layer), Arc::clone(&changed));
    file.watch(move |offset| {
        let Some(layer) = weak.upgrade() else { return };
        if offset == table && times.fetch_add(1, Ordering::Relaxed) == 0 {
            layer.zero(GRAIN..3 * GRAIN, false).unwrap();
            // The entries are durable; then bits and owners are cleared.
            (0..2).for_each(|_| layer.commit_at_once().unwrap());
        }
    });
    let report = layer.check(false, &NoProgress).unwrap();
    assert!(changed.load(Ordering::Relaxed) > 0 && report.is_clean(), "{report:?}");
    assert_clean(&layer);
}

/// Tables are holes of the file, as after a sparse copy. A guest changes one of them after the first commit of a check
/// has captured its pages, and before the census. So this commit does not write the table, and the census does not have
/// its new grains. During the check the table is written, flushed and evicted.
#[test]
fn a_check_reads_tables_that_a_commit_writes_into_holes() {
    const HOLES: u64 = 17;
    let disk = simulated(1);
    let made = create(&disk, IoMode::Buffered, 4096 * MIB, writing());
    let directory = made.layout.directory.start();
    made.close().unwrap();
    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    let slots: Vec<u8> = (0..HOLES).flat_map(|table| encode_slot(Table(table as u32)).to_le_bytes()).collect();
    file.write_at(&[&slots], directory, true).unwrap();
    file.write_at(&[&HOLES.to_le_bytes()], 512 + 8, true).unwrap();
    let (_, file) = Watched::over(file);
    let layer = Arc::new(SeSparse::open(file, NAME, Options { cache: 0, ..writing() }).unwrap());
    let others = HOLES..HOLES + 130;
    others.clone().for_each(|slot| layer.write(slot * 4096 * GRAIN, &[&stamped(1, 7)]).unwrap());
    layer.flush().unwrap();
    // Gives the first commit of the check something to flush.
    layer.write(HOLES * 4096 * GRAIN, &[&stamped(2, 7)]).unwrap();
    let last = (HOLES - 1) * 4096 * GRAIN;
    let (guest, written) = (Arc::downgrade(&layer), Arc::new(AtomicBool::new(false)));
    let once = Arc::clone(&written);
    disk.set_pace(Arc::new(move |request| {
        if request == Request::Sync
            && let Some(layer) = guest.upgrade()
            && !once.swap(true, Ordering::Relaxed)
        {
            layer.write(last, &[&stamped(3, 5)]).unwrap();
        }
    }));
    let report = layer.check(
        false,
        &steps(|done, _| {
            if done < HOLES {
                layer.flush().unwrap();
                others.clone().for_each(|slot| _ = map_all(&*layer, slot * 4096 * GRAIN, 4096 * GRAIN).unwrap());
            }
            true
        }),
    );
    let report = report.unwrap();
    assert!(written.load(Ordering::Relaxed) && report.is_clean(), "{report:?}");
    assert_eq!(stamps(&*layer, last, 3 * GRAIN).unwrap(), [5; 24]);
    assert_clean(&layer);
}
