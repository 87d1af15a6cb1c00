//! Samples under a controlled clock: rates, thinning, restarts, and the record.
#![allow(clippy::unwrap_used)]

use super::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};

const ONE: &str = "0f0e0d0c-0b0a-4908-8706-050403020101";
/// A time that is no multiple of an hour.
const START: u64 = 1_795_000_123;
const MIB: i64 = 1 << 20;

fn directory() -> Arc<dyn Directory> {
    SimulatedDisk::new(1, SimulatedOptions::default()).directory()
}

fn native(bytes: i64) -> BTreeMap<String, Reading> {
    [(ONE.to_owned(), Reading { native: true, bytes })].into()
}

/// Takes a sample each minute for `minutes`, in which datastore and disk grow by a MiB a minute.
fn grow(samples: &Samples, from: u64, minutes: u64) {
    for minute in 0..=minutes {
        let bytes = minute as i64 * MIB;
        samples.add(from + minute * MINUTE, 1000 * MIB as u64 + bytes as u64, native(bytes));
    }
}

#[test]
fn rates_and_times_to_full_follow_from_samples() {
    let samples = Samples::open(directory());
    assert_eq!(samples.of_datastore(1), None);
    grow(&samples, START, 20);
    assert_eq!(samples.of_datastore(1), None, "20 minutes are less than half of an hour");
    grow(&samples, START, 13 * 60);
    let growth = samples.of_datastore(600 * MIB as u64).unwrap();
    assert_eq!(growth.until, START + 13 * HOUR);
    let hour = growth.hour.unwrap();
    assert_eq!((hour.bytes, hour.seconds, hour.full_in), (60 * MIB, HOUR, Some(600 * MINUTE)));
    let day = growth.day.unwrap();
    assert_eq!((day.bytes, day.seconds), (13 * 60 * MIB, 13 * HOUR));
    assert_eq!(day.full_in, Some(600 * MINUTE));
    assert_eq!(growth.week, None, "13 hours are less than half of a week");
    let disk = samples.of_disk(ONE, 0).unwrap();
    let hour = disk.hour.unwrap();
    assert_eq!(hour.bytes / MIB, i64::try_from(hour.seconds / MINUTE).unwrap());
    assert_eq!(hour.full_in, Some(0));
    assert_eq!(samples.of_disk("another", 0), None);
}

#[test]
fn a_datastore_that_shrinks_is_never_full() {
    let mut series = Series::default();
    for minute in 0..60 {
        series.add((START + minute * MINUTE, 100 - minute as i64), &OF_DATASTORE);
    }
    let hour = series.growth(10).unwrap().hour.unwrap();
    assert_eq!((hour.bytes, hour.full_in), (-59, None));
    series.add((START + HOUR, 41 + i64::MAX / 2), &OF_DATASTORE);
    assert_eq!(series.rate(HOUR, u64::MAX).unwrap().full_in, Some(HOUR * 4));
}

#[test]
fn samples_are_thinned_and_bounded_and_still_give_rates() {
    let (mut datastore, mut disk) = (Series::default(), Series::default());
    let mut most = (0, 0);
    // A sample each minute for 400 days would take long, so samples are taken each hour at first, and each minute in
    // the last two weeks.
    let times =
        (0..386 * 24).map(|hour| hour * HOUR).chain((0..14 * 24 * 60).map(|minute| 386 * DAY + minute * MINUTE));
    for time in times {
        datastore.add((START + time, time as i64), &OF_DATASTORE);
        disk.add((START + time, time as i64), &OF_DISK);
        most = (most.0.max(datastore.0.len()), most.1.max(disk.0.len()));
        assert!(datastore.is_valid() && disk.is_valid());
    }
    assert!(most.0 <= 61 + 169 + 367, "{most:?}");
    assert!(most.1 <= 8 + 25 + 33, "{most:?}");
    assert!(datastore.0.len() > 500, "a year by days, a week by hours, an hour by minutes");
    for series in [&datastore, &disk] {
        let growth = series.growth(1000).unwrap();
        for rate in [growth.hour, growth.day, growth.week] {
            let rate = rate.unwrap();
            assert_eq!(rate.bytes, rate.seconds as i64, "a byte each second");
            assert_eq!(rate.full_in, Some(1000));
        }
    }
}

#[test]
fn samples_from_the_future_are_removed() {
    let mut series = Series::default();
    for minute in 0..60 {
        series.add((START + minute * MINUTE, 0), &OF_DATASTORE);
    }
    series.add((START + 10 * MINUTE, 5), &OF_DATASTORE);
    assert_eq!(series.0.len(), 11);
    assert_eq!(series.last(), Some((START + 10 * MINUTE, 5)));
}

#[test]
fn counters_continue_after_a_restart_and_in_another_format() {
    let directory = directory();
    let samples = Samples::open(Arc::clone(&directory));
    samples.write().unwrap();
    assert!(!directory.list().unwrap().contains(&FILE.to_owned()), "nothing to write");
    grow(&samples, START, 60);
    samples.write().unwrap();
    let again = Samples::open(Arc::clone(&directory));
    assert_eq!(again.of_disk(ONE, 7), samples.of_disk(ONE, 7));
    // The counter of the engine begins at 0 again, and the images of the same disk have another size.
    grow(&again, START + 2 * HOUR, 60);
    let images = |bytes| [(ONE.to_owned(), Reading { native: false, bytes })].into();
    again.add(START + 3 * HOUR + MINUTE, 0, images(1 << 40));
    again.add(START + 3 * HOUR + 2 * MINUTE, 0, images((1 << 40) + MIB));
    let counter = again.state.lock().record.disks[ONE].last().unwrap();
    assert_eq!(counter, (START + 3 * HOUR + 2 * MINUTE, 121 * MIB));
    again.add(START + 4 * HOUR, 0, BTreeMap::new());
    assert_eq!(again.of_disk(ONE, 0), None, "the disk was deleted");
}

#[test]
fn a_record_that_cannot_be_read_is_replaced() {
    let directory = directory();
    let disorder = GrowthRecord { datastore: Series(vec![(2, 0), (1, 0)]), disks: BTreeMap::new() };
    for damage in [&b"x"[..], b"lamina growth 9 crc32c=00000000\n{}\n", &KIND.encode(&disorder).unwrap()] {
        sealed::put(&*directory, FILE, damage).unwrap();
        let samples = Samples::open(Arc::clone(&directory));
        assert_eq!(samples.of_datastore(0), None);
        grow(&samples, START, 60);
        samples.write().unwrap();
        assert!(Samples::open(Arc::clone(&directory)).of_datastore(0).is_some());
    }
}

#[test]
fn the_format_page_shows_the_record() {
    let record = GrowthRecord {
        datastore: Series(vec![(1_795_000_000, 1_073_741_824), (1_795_000_060, 1_074_790_400)]),
        disks: [(ONE.to_owned(), Series(vec![(1_795_000_000, 0), (1_795_000_060, -4096)]))].into(),
    };
    let written = String::from_utf8(KIND.encode(&record).unwrap()).unwrap();
    let page = include_str!("../../../../docs/format/growth.md");
    assert!(page.contains(&written), "docs/format/growth.md should show:\n{written}");
}
