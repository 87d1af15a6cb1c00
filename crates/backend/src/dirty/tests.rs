//! The account of dirty data, with write-out that is slow, fast or stuck.

#![allow(clippy::unwrap_used)]

use super::*;
use testkit::Random;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The most that a region counts: one block less than it has.
const FULL: u64 = MIB - BLOCK;

impl DirtyFile {
    /// Takes everything that is counted, as if it were written out.
    pub(crate) fn take_counted(&self) -> u64 {
        let mut counted = 0;
        self.map.take(|_, bytes| {
            self.medium.subtract(bytes);
            counted += bytes;
        });
        counted
    }
}

/// Write-out that reaches `speed` bytes per second; 0 for none at all, until that changes.
struct SlowTarget {
    speed: AtomicU64,
    written: AtomicU64,
}

impl WriteOut for SlowTarget {
    fn write_out(&self, _: u64, length: u64, wait: bool) {
        if wait {
            while self.speed.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_secs_f64(length as f64 / self.speed.load(Ordering::Relaxed) as f64));
            self.written.fetch_add(length, Ordering::Relaxed);
        }
    }
}

fn file(bound: u64, speed: u64) -> (Arc<DirtyMedium>, Arc<SlowTarget>, Arc<DirtyFile>) {
    let medium = Arc::new(DirtyMedium::new(DirtyLimit::Bytes(bound)));
    let target = Arc::new(SlowTarget { speed: AtomicU64::new(speed), written: AtomicU64::new(0) });
    let file = DirtyFile::new(Arc::clone(&medium), Arc::clone(&target) as _);
    (medium, target, file)
}

#[test]
fn the_map_counts_each_region_up_to_its_size_and_returns_it_once() {
    let (map, mut model) = (DirtyMap::default(), BTreeMap::<u64, u64>::new());
    let mut random = Random::new(5);
    for _ in 0..20_000 {
        // At the borders of chunks and groups, and at the end of what is counted.
        let place = [0, (4 << 30) - 3 * MIB, (512 << 30) - 3 * MIB, (64 << 40) - 6 * MIB][random.index(4)];
        let (offset, length) = (place + random.below(6 * MIB), random.below(3 * MIB) * random.below(2));
        let mut added = 0;
        for region in offset / MIB..(offset + length).div_ceil(MIB).min(64 << 20) {
            let part = offset.max(region * MIB)..(offset + length).min((region + 1) * MIB);
            if !part.is_empty() {
                let count = model.entry(region * MIB).or_default();
                let more = (part.end.div_ceil(BLOCK) - part.start / BLOCK) * BLOCK;
                added += (*count + more).min(FULL) - *count;
                *count = (*count + more).min(FULL);
            }
        }
        assert_eq!(map.mark(offset, length), added, "{offset} {length}");
        if random.once_in(100) {
            map.take(|offset, bytes| assert_eq!(model.remove(&offset), Some(bytes)));
            assert!(model.is_empty());
        }
    }
}

#[test]
fn repeated_writes_of_a_block_count_as_one_region_until_they_are_written_out() {
    let (medium, _, file) = file(64 * MIB, MIB);
    let dirty = || medium.used().dirty;
    file.wrote(8192, 4096);
    assert_eq!(dirty(), BLOCK);
    for _ in 0..100_000 {
        file.wrote(8192, 4096);
    }
    assert_eq!(dirty(), FULL);
    // A write during a flush may not be covered by it.
    file.flushed_by(|| {
        assert_eq!(dirty(), FULL, "it is not written yet");
        file.wrote(8192, 4096);
    });
    assert_eq!(dirty(), BLOCK);
    drop(file);
    assert_eq!(dirty(), 0, "what a closed file leaves dirty is not counted");
}

#[test]
fn background_work_waits_before_writes_do_and_both_the_more_the_more_is_dirty() {
    let (bound, speed) = (64 * MIB, 100 * MIB);
    let (mut rate_before, mut pause_before) = (u64::MAX, Duration::ZERO);
    for dirty in (0..=2 * bound).step_by(MIB as usize) {
        let rate = match background_rate(dirty, bound, speed) {
            0 => u64::MAX,
            rate => rate,
        };
        let wait = pause(dirty, bound, speed, MIB);
        assert!(rate <= rate_before && wait >= pause_before, "at {dirty}");
        assert_eq!(rate < u64::MAX, dirty > bound / 2, "at {dirty}");
        assert_eq!(!wait.is_zero(), dirty > bound / 4 * 3, "at {dirty}");
        assert!(wait.is_zero() || rate <= speed / 50, "writes wait beside fast background work at {dirty}");
        // No cliff: a MiB more changes the pause by at most a factor, except at the end of the scale.
        let gentle = pause_before.max(Duration::from_millis(2)) * 3;
        assert!(dirty >= bound - 2 * MIB || wait <= gentle, "{pause_before:?} and {wait:?} at {dirty}");
        (rate_before, pause_before) = (rate, wait);
    }
    assert!((BACKGROUND_RATE_MIN..speed / 50).contains(&rate_before) && pause_before == PAUSE_MAX);
    assert_eq!(background_rate(bound, bound, 1), BACKGROUND_RATE_MIN, "background work ends on any medium");
    // Halfway through its step, each goes at the speed of the medium.
    assert_eq!(pause(bound / 8 * 7, bound, speed, MIB), Duration::from_millis(10));
    assert_eq!(background_rate(bound / 8 * 5, bound, speed), speed);
}

#[test]
fn the_automatic_bound_is_below_the_kernels() {
    // Each amount in bytes, or as a part of the memory.
    let bound = |background: (&str, &str), most: (&str, &str), kilobytes: u64| {
        let memory = format!("MemTotal:  99999999 kB\nMemAvailable:   {kilobytes} kB\nBuffers: 1 kB\n");
        automatic(|path| match path {
            "/proc/sys/vm/dirty_background_bytes" => Some(format!("{}\n", background.0)),
            "/proc/sys/vm/dirty_background_ratio" => Some(format!("{}\n", background.1)),
            "/proc/sys/vm/dirty_bytes" => Some(format!("{}\n", most.0)),
            "/proc/sys/vm/dirty_ratio" => Some(format!("{}\n", most.1)),
            "/proc/meminfo" => Some(memory.clone()),
            _ => None,
        })
    };
    let percent = (4 << 30) / 100;
    assert_eq!(bound(("0", "10"), ("0", "20"), 4 << 20), percent * 15 / 10 * 9);
    assert_eq!(bound(("67108864", "0"), ("134217728", "0"), 4 << 20), 96 * MIB / 10 * 9);
    // The kernel starts write-out at half of the amount at which it stops writes, if that is less.
    assert_eq!(bound(("0", "50"), ("134217728", "0"), 4 << 20), 96 * MIB / 10 * 9);
    assert_eq!(bound(("4096", "0"), ("8192", "0"), 4 << 20), BOUND_MIN);
    assert_eq!(bound(("0", "0"), ("0", "0"), 4 << 20), BOUND_MIN);
    assert_eq!(bound(("0", "10"), ("0", "20"), 1 << 30), BOUND_AUTO_MAX);
    assert_eq!(bound(("?", "?"), ("0", "20"), 0), BOUND_UNKNOWN);
    assert_eq!(automatic(|_| None), BOUND_UNKNOWN);
}

/// Writes as fast as it may for a second, as a client or as background work. Returns the bytes, and the most that was
/// dirty.
fn write(medium: &DirtyMedium, file: &DirtyFile, background: bool, from: u64) -> (u64, u64) {
    let (began, step) = (Instant::now(), 64 << 10);
    let (mut at, mut most) = (from, 0);
    while began.elapsed() < Duration::from_secs(1) {
        file.wrote(at, step);
        at += step;
        most = most.max(medium.used().dirty);
        let rate = medium.background_rate();
        if background && rate > 0 {
            std::thread::sleep(Duration::from_secs_f64(step as f64 / rate as f64));
        }
    }
    (at - from, most)
}

#[test]
fn with_a_slow_medium_background_work_waits_first_and_the_bound_is_held() {
    let (bound, speed) = (16 * MIB, 20 * MIB);
    let (medium, target, file) = file(bound, speed);
    let (copied, most) = write(&medium, &file, true, 0);
    assert!(copied < bound + 2 * speed && most < bound / 4 * 3, "{copied} bytes, {most} dirty");
    assert!(medium.used().waited.is_zero(), "background work alone makes no write wait");
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| write(&medium, &file, true, 1 << 40));
        let (written, most) = write(&medium, &file, false, 1 << 30);
        assert!(most <= bound, "{most}");
        assert!(written < bound + 2 * speed, "{written}");
        let (copied, _) = copy.join().unwrap();
        assert!(copied * 2 < written, "{copied} copied while {written} were written");
    });
    assert!(!medium.used().waited.is_zero() && target.written.load(Ordering::Relaxed) > 0);
}

/// Waits until less than `bytes` are dirty.
fn settle(medium: &DirtyMedium, bytes: u64) {
    let began = Instant::now();
    while medium.used().dirty >= bytes {
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", medium.used());
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn write_out_starts_at_a_half_of_the_bound_and_a_medium_that_keeps_up_delays_nothing() {
    let (medium, target, file) = file(16 * MIB, 1 << 40);
    for at in (0..256 * MIB).step_by(64 << 10) {
        file.wrote(at, 64 << 10);
        if at % (4 * MIB) == 0 {
            settle(&medium, 8 * MIB);
        }
    }
    assert!(medium.used().waited.is_zero(), "{:?}", medium.used());
    settle(&medium, 8 * MIB);
    assert!(target.written.load(Ordering::Relaxed) > 200 * MIB);
}

#[test]
fn a_medium_that_does_not_answer_delays_a_write_for_a_limited_time() {
    let (medium, target, file) = file(4 * MIB, 0);
    file.wrote(0, 8 * MIB);
    let began = Instant::now();
    file.wrote(1 << 30, 1 << 16);
    assert!(began.elapsed() < 20 * PAUSE_MAX && medium.used().waited >= PAUSE_MAX, "{:?}", medium.used());
    target.speed.store(1 << 40, Ordering::Relaxed);
    settle(&medium, MIB);
}
