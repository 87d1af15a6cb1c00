//! Throughput against a plain sparse file, cell by cell: `cargo test --release -p lamina-layer --lib throughput --
//! --ignored --nocapture`. Both sides do the same requests on one thread, in turns; a cell is the median of its rounds.
//! Writing ends with a flush that counts.

use super::*;
use backend::local::{LocalDirectory, LocalQueues};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 1024 * MIB;
/// Time of one run.
const RUN: Duration = Duration::from_millis(400);
const ROUNDS: usize = 5;

/// One side of a comparison.
enum Side {
    Flat(Arc<dyn File>),
    Sparse(Box<SeSparse>),
}

impl Side {
    fn make(directory: &LocalDirectory, flat: bool, mode: IoMode, full: bool) -> Self {
        let name = if flat { "flat" } else { NAME };
        let _ = directory.remove(name);
        let file = directory.create(name, mode).unwrap();
        let side = if flat {
            file.set_len(CAPACITY).unwrap();
            Self::Flat(file)
        } else {
            Self::Sparse(Box::new(SeSparse::create(file, NAME, CAPACITY, writing()).unwrap()))
        };
        if full {
            let data = stamped(256, 3);
            for at in (0..CAPACITY).step_by(MIB as usize) {
                side.write(at, &data);
            }
            side.flush();
        }
        side
    }

    fn write(&self, at: u64, data: &[u8]) {
        match self {
            Self::Flat(file) => file.write_at(&[data], at, false).unwrap(),
            Self::Sparse(layer) => layer.write(at, &[data]).unwrap(),
        }
    }

    fn read(&self, at: u64, out: &mut [u8], extents: &mut Vec<Extent>) {
        match self {
            Self::Flat(file) => file.read_at(out, at).unwrap(),
            Self::Sparse(layer) => {
                let _epoch = layer.epoch();
                let end = at + out.len() as u64;
                let mut reached = at;
                while reached < end {
                    extents.clear();
                    layer.map(reached..end, 64, extents).unwrap();
                    for extent in extents.iter() {
                        let from = (extent.start - at) as usize;
                        let part = &mut out[from..from + extent.length as usize];
                        match extent.content {
                            Content::Data { offset, .. } => layer.file(0).unwrap().read_at(part, offset).unwrap(),
                            _ => part.fill(0),
                        }
                        reached = extent.start + extent.length;
                    }
                }
            }
        }
    }

    fn flush(&self) {
        match self {
            Self::Flat(file) => file.sync().unwrap(),
            Self::Sparse(layer) => layer.flush().unwrap(),
        }
    }

    /// Bytes per second.
    fn run(&self, size: u64, random: bool, write: bool, seed: u64) -> f64 {
        let mut order = Random(seed);
        let mut extents = Vec::new();
        let mut data = stamped(size / GRAIN, seed);
        let (begun, mut done) = (Instant::now(), 0);
        while begun.elapsed() < RUN && done < CAPACITY {
            let at = if random { order.below(CAPACITY / size) * size } else { done };
            if write {
                self.write(at, &data);
            } else {
                self.read(at, &mut data, &mut extents);
            }
            done += size;
        }
        if write {
            self.flush();
        }
        done as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Those to be measured: `LAMINA_BENCH_MODE`, or both.
fn modes() -> Vec<IoMode> {
    match std::env::var("LAMINA_BENCH_MODE").as_deref() {
        Ok("buffered") => vec![IoMode::Buffered],
        Ok("direct") => vec![IoMode::Direct],
        _ => vec![IoMode::Buffered, IoMode::Direct],
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement, to be run alone and optimised"]
fn throughput_against_a_sparse_file() {
    let place = std::env::var("LAMINA_BENCH_FOLDER").unwrap_or("/tmp".into());
    let folder = tempfile::tempdir_in(place).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    for mode in modes() {
        for full in [false, true] {
            // Full disks are made once and overwritten; what begins empty is made for each run.
            let kept = full.then(|| [false, true].map(|flat| Side::make(&directory, flat, mode, true)));
            for (write, random, size) in cells() {
                let mut rates = [Vec::new(), Vec::new()];
                for round in 0..ROUNDS {
                    for turn in 0..2 {
                        let flat = usize::from(turn == round % 2);
                        let made = kept.is_none().then(|| Side::make(&directory, flat == 1, mode, false));
                        let side = made.as_ref().or(kept.as_ref().map(|kept| &kept[flat])).unwrap();
                        rates[flat].push(side.run(size << 10, random, write, round as u64 + 1));
                    }
                }
                let [ours, flat] = rates.map(median);
                println!(
                    "{mode:?} {} {} {} {size:>3} KiB: {:8.1} MiB/s, flat {:8.1}, ratio {:.2}",
                    if full { "full " } else { "empty" },
                    if write { "write" } else { "read " },
                    if random { "random" } else { "seq   " },
                    ours / MIB as f64,
                    flat / MIB as f64,
                    ours / flat
                );
            }
        }
    }
}

/// Whether to write, whether at random, and KiB per request.
fn cells() -> impl Iterator<Item = (bool, bool, u64)> {
    let sizes = |write, random| [4, 64, 512].map(|size| (write, random, size));
    [(false, false), (false, true), (true, false), (true, true)].into_iter().flat_map(move |(w, r)| sizes(w, r))
}

/// Requests of a guest per second, half of them reads, while `beside` runs or for a while.
fn guest(side: &Side, beside: impl FnOnce() + Send) -> f64 {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let (mut random, mut extents, mut done) = (Random(3), Vec::new(), 0u64);
            let mut data = stamped(16, 9);
            let begun = Instant::now();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let at = random.below(CAPACITY / 2 / (16 * GRAIN)) * 16 * GRAIN;
                match done % 2 {
                    0 => side.read(at, &mut data, &mut extents),
                    _ => side.write(at, &stamped(16, done)),
                }
                done += 1;
                if done.is_multiple_of(2000) {
                    side.flush();
                }
            }
            done as f64 / begun.elapsed().as_secs_f64()
        });
        beside();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        guest.join().unwrap()
    })
}

#[test]
#[ignore = "a measurement, to be run alone and optimised"]
fn throughput_of_guests_during_wipe_and_shrink() {
    let place = std::env::var("LAMINA_BENCH_FOLDER").unwrap_or("/tmp".into());
    let folder = tempfile::tempdir_in(place).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    for mode in modes() {
        let side = Side::make(&directory, false, mode, true);
        let Side::Sparse(layer) = &side else { unreachable!() };
        let mut random = Random(1);
        for _ in 0..CAPACITY / GRAIN / 8 {
            let at = CAPACITY / 2 + random.below(CAPACITY / 2 / GRAIN - 8) * GRAIN;
            layer.zero(at..at + 8 * GRAIN, false).unwrap();
        }
        layer.flush().unwrap();
        let dead = layer.usage().unwrap().dead;
        let before = guest(&side, || std::thread::sleep(Duration::from_secs(4)));
        let begun = Instant::now();
        let mut moved = 0;
        let during = guest(&side, || {
            layer.wipe(false, Maintenance::at(Pace::GENTLE)).unwrap();
            moved = layer.shrink(Maintenance::at(Pace::GENTLE)).unwrap().moved;
        });
        let took = begun.elapsed();
        let after = guest(&side, || std::thread::sleep(Duration::from_secs(4)));
        let left = layer.usage().unwrap().dead;
        println!(
            "{mode:?}: {} MiB dead, {} left, {moved} grains moved in {took:.1?}; requests per second {before:.0} before, \
             {during:.0} during, {after:.0} after, ratio {:.2}",
            dead / MIB,
            left / MIB,
            during / ((before + after) / 2.0)
        );
    }
}
