//! Retirement by example; against a model of all operations and tables; and with threads that read, change and commit.

use super::*;
use crate::epochs::Epoch;
use crate::model::Random;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const ALL: u64 = u64::MAX;

#[test]
fn retired_places_wait_for_a_later_commit_and_for_older_operations() {
    let (mut retirement, epochs) = (Retirement::new(100), Epochs::new());
    let reader = epochs.enter();
    assert!(retirement.give_up(7..8));
    retirement.begin_commit(&epochs);
    assert!(retirement.give_up(8..9));
    retirement.complete_commit();
    assert_eq!(retirement.next_ready(&epochs, ALL), None, "an earlier reader may use the run");
    drop(reader);
    assert_eq!(retirement.next_ready(&epochs, ALL), Some(7..8));
    assert_eq!(retirement.waiting().collect::<Vec<_>>(), [8..9, 7..8], "the runs are not free yet");
    retirement.released();
    let later = epochs.enter();
    let number = retirement.close(&epochs);
    assert!(!epochs.is_over(number));
    drop(later);
    assert!(epochs.is_over(number));
    assert_eq!(retirement.next_ready(&epochs, ALL), None, "retired during the first commit");
    retirement.begin_commit(&epochs);
    retirement.complete_commit();
    assert_eq!(retirement.next_ready(&epochs, ALL), Some(8..9));
}

#[test]
fn a_commit_that_fails_frees_nothing_until_a_later_one_is_complete() {
    let (mut retirement, epochs) = (Retirement::new(100), Epochs::new());
    assert!(retirement.give_up(1..2));
    retirement.begin_commit(&epochs);
    assert_eq!(retirement.next_ready(&epochs, ALL), None);
    retirement.begin_commit(&epochs);
    retirement.complete_commit();
    assert_eq!(retirement.next_ready(&epochs, ALL), Some(1..2));
}

#[test]
fn runs_are_limited_and_returned_in_parts() {
    let (mut retirement, epochs) = (Retirement::new(2), Epochs::new());
    assert!(retirement.give_up(10..20) && retirement.give_up(20..24) && retirement.give_up(40..41));
    assert!(!retirement.give_up(60..61), "a third run");
    assert!(retirement.give_up(41..42), "an adjacent run is accepted");
    assert_eq!(retirement.open(), [10..24, 40..42]);
    retirement.begin_commit(&epochs);
    retirement.complete_commit();
    let mut parts = Vec::new();
    while let Some(part) = retirement.next_ready(&epochs, 8) {
        parts.push(part);
    }
    assert_eq!(parts, [40..42, 10..18, 18..24]);
    assert!(retirement.give_up(1..2), "another run is accepted again");
}

/// A retired location, with the numbers of commits and operations that had begun before it was retired.
struct Waiting {
    commits_begun: u64,
    operations_before: u64,
}

#[test]
fn a_retired_location_is_released_once_when_nothing_uses_it() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let (mut retirement, epochs) = (Retirement::new(10_000), Epochs::new());
        let mut operations: BTreeMap<u64, Arc<Epoch>> = BTreeMap::new();
        let mut waiting: BTreeMap<u64, Waiting> = BTreeMap::new();
        let (mut time, mut place, mut begun, mut completed) = (0, 0, 0, 0);
        for step in 0..400 {
            time += 1;
            match random.below(12) {
                0..3 => drop(operations.insert(time, epochs.enter())),
                3..6 => {
                    let nth = random.below(operations.len() as u64) as usize;
                    if let Some(key) = operations.keys().nth(nth).copied() {
                        operations.remove(&key);
                    }
                }
                6..9 => {
                    place += random.below(2);
                    assert!(retirement.give_up(place..place + 1));
                    waiting.insert(place, Waiting { commits_begun: begun, operations_before: time });
                    place += 1;
                }
                9 => drop(retirement.close(&epochs)),
                10 => {
                    retirement.begin_commit(&epochs);
                    begun += 1;
                }
                _ => {
                    retirement.complete_commit();
                    completed = begun;
                }
            }
            if step == 399 {
                operations.clear();
                retirement.begin_commit(&epochs);
                retirement.complete_commit();
                (begun, completed) = (begun + 1, begun + 1);
            }
            let oldest = operations.keys().next().copied().unwrap_or(u64::MAX);
            while let Some(ready) = retirement.next_ready(&epochs, 1 + random.below(3)) {
                for place in ready {
                    let was = waiting.remove(&place).unwrap_or_else(|| panic!("{place} was returned as ready twice"));
                    assert!(was.commits_begun < completed, "seed {seed}: a table on the medium may name {place}");
                    assert!(was.operations_before < oldest, "seed {seed}: an operation may use {place}");
                }
            }
            retirement.released();
        }
        assert!(waiting.is_empty(), "seed {seed}: all retired locations were committed and unused");
        assert_eq!(retirement.waiting, 0);
    }
}

const THREADS: u64 = 3;
const OWNERS: u64 = 32;
const PLACES: u64 = 256;
const CHANGES: u64 = 5_000;
const NONE: u64 = u64::MAX;

/// A model image: the map and the free locations behind locks, the content without a lock.
struct Image {
    epochs: Epochs,
    state: Mutex<(Retirement, Vec<u64>)>,
    /// The location of each owner's data.
    map: Vec<AtomicU64>,
    /// The map as of the last complete commit.
    medium: Vec<AtomicU64>,
    content: Vec<AtomicU64>,
}

impl Image {
    /// A read: the location that the map returned keeps its content while the epoch is held.
    fn read(&self, owner: u64) {
        let _epoch = self.epochs.enter();
        let place = self.map[owner as usize].load(Ordering::SeqCst);
        for _ in 0..4 {
            assert_eq!(self.content[place as usize].load(Ordering::SeqCst), owner, "place {place} has another owner");
            std::thread::yield_now();
        }
    }

    fn commit(&self) {
        let tables: Vec<u64> = {
            let mut state = self.state.lock();
            state.0.begin_commit(&self.epochs);
            self.map.iter().map(|place| place.load(Ordering::SeqCst)).collect()
        };
        std::thread::yield_now();
        for (owner, place) in (0..).zip(tables) {
            self.medium[owner as usize].store(place, Ordering::SeqCst);
            assert_eq!(self.content[place as usize].load(Ordering::SeqCst), owner);
        }
        let mut state = self.state.lock();
        state.0.complete_commit();
        while let Some(ready) = state.0.next_ready(&self.epochs, 3) {
            for place in ready {
                let named = self.medium.iter().any(|named| named.load(Ordering::SeqCst) == place);
                assert!(!named, "after a crash a table would name location {place} again");
                self.content[place as usize].store(NONE, Ordering::SeqCst);
                state.1.push(place);
            }
        }
        state.0.released();
    }
}

#[test]
fn a_location_is_not_reused_while_a_thread_reads_it() {
    let image = Image {
        epochs: Epochs::new(),
        state: Mutex::new((Retirement::new(PLACES as usize), (OWNERS..PLACES).collect())),
        map: (0..OWNERS).map(AtomicU64::new).collect(),
        medium: (0..OWNERS).map(AtomicU64::new).collect(),
        content: (0..PLACES).map(|place| AtomicU64::new(if place < OWNERS { place } else { NONE })).collect(),
    };
    let over = AtomicBool::new(false);
    let (image, over) = (&image, &over);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut random = Random::new(thread);
                while !over.load(Ordering::SeqCst) {
                    image.read(random.below(OWNERS));
                }
            });
        }
        scope.spawn(move || {
            while !over.load(Ordering::SeqCst) {
                image.commit();
            }
        });
        let mut random = Random::new(99);
        let mut changed = 0;
        while changed < CHANGES {
            let Some(place) = image.state.lock().1.pop() else {
                std::thread::yield_now();
                continue;
            };
            changed += 1;
            let owner = random.below(OWNERS);
            image.content[place as usize].store(owner, Ordering::SeqCst);
            let old = image.map[owner as usize].swap(place, Ordering::SeqCst);
            assert!(image.state.lock().0.give_up(old..old + 1));
        }
        over.store(true, Ordering::SeqCst);
    });
    // With no operation under way, every location except those in use becomes free.
    image.commit();
    assert_eq!(image.state.lock().1.len() as u64, PLACES - OWNERS);
}

#[test]
fn locations_that_could_not_be_freed_are_returned_again() {
    let epochs = Epochs::new();
    let mut retirement = Retirement::new(10);
    assert!(retirement.give_up(0..10) && retirement.give_up(20..30));
    retirement.begin_commit(&epochs);
    retirement.complete_commit();
    let mut ready: Vec<Range<u64>> = std::iter::from_fn(|| retirement.next_ready(&epochs, 100)).collect();
    let freed = ready.pop().unwrap();
    retirement.put_back(ready.clone());
    assert_eq!(retirement.waiting().collect::<Vec<_>>(), ready, "{freed:?} is free");
    assert_eq!(retirement.next_ready(&epochs, 100), ready.pop());
    assert_eq!(retirement.next_ready(&epochs, 100), None);
    retirement.released();
    assert_eq!(retirement.waiting().count(), 0);
}
