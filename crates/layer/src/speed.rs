//! How fast a layer is beside a plain sparse file, which is what a thin flat disk is: {4 .. 512 KiB} x {in order, at
//! random} x {read, write} x {empty, full}, on one thread. Figures for people, printed; run optimised and alone, with
//! `--ignored --nocapture`. `LAMINA_BENCH_FOLDER` says where the files go, `LAMINA_BENCH_MODE` (`buffered`, `direct`)
//! how they are opened; with `LAMINA_BENCH_CLOCK=processor` the time counts that the thread has been running, which
//! others on the machine disturb less (and which says nothing of a medium).

use crate::model::Random;
use crate::{Content, Layer};
use backend::local::{LocalDirectory, LocalQueues};
use backend::{Buffer, Directory, File, IoMode};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

const CAPACITY: u64 = 512 << 20;
/// Most bytes and requests of a run.
const RUN_BYTES: u64 = 64 << 20;
const RUN_REQUESTS: u64 = 4000;
const ROUNDS: usize = 5;
const SIZES: [usize; 8] = [4, 8, 16, 32, 64, 128, 256, 512];

trait Target {
    fn write(&self, offset: u64, bytes: &[u8]);
    fn read(&self, offset: u64, out: &mut Buffer);
    fn flush(&self);
}

struct Plain(Arc<dyn File>);

impl Target for Plain {
    fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.write_at(&[bytes], offset, false).unwrap();
    }

    fn read(&self, offset: u64, out: &mut Buffer) {
        self.0.read_at(out, offset).unwrap();
    }

    fn flush(&self) {
        self.0.sync().unwrap();
    }
}

struct Mapped(Box<dyn Layer>);

impl Target for Mapped {
    fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.write(offset, &[bytes]).unwrap();
    }

    fn read(&self, offset: u64, out: &mut Buffer) {
        let _epoch = self.0.epoch();
        let mut extents = Vec::with_capacity(8);
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            extents.clear();
            self.0.map(at..end, 8, &mut extents).unwrap();
            for extent in &extents {
                let part = (at - offset) as usize..(at - offset + extent.length) as usize;
                match extent.content {
                    Content::Data { file, offset } => {
                        self.0.file(file).unwrap().read_at(&mut out[part], offset).unwrap();
                    }
                    _ => out[part].fill(0),
                }
                at += extent.length;
            }
        }
    }

    fn flush(&self) {
        self.0.flush().unwrap();
    }
}

/// What a run does.
#[derive(Clone, Copy)]
struct Cell {
    size: usize,
    random: bool,
    write: bool,
}

impl Cell {
    /// Megabytes per second; what is written is flushed, and that counts.
    fn run(self, target: &dyn Target, seed: u64) -> f64 {
        let mut random = Random::new(seed);
        let mut buffer = Buffer::with_bytes(self.size);
        buffer.fill(seed as u8 | 1);
        let size = self.size as u64;
        let count = (RUN_BYTES / size).min(RUN_REQUESTS);
        let order: Vec<u64> = (0..count)
            .map(|number| if self.random { random.below(CAPACITY / size) * size } else { number * size })
            .collect();
        let begun = now();
        for offset in order {
            match self.write {
                true => target.write(offset, &buffer),
                false => target.read(offset, &mut buffer),
            }
        }
        if self.write {
            target.flush();
        }
        (count * size) as f64 / 1e6 / (now() - begun)
    }
}

/// Seconds since some moment.
fn now() -> f64 {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    if std::env::var("LAMINA_BENCH_CLOCK").as_deref() != Ok("processor") {
        return BEGUN.elapsed().as_secs_f64();
    }
    // The kernel brings the figure up to date when it schedules.
    std::thread::yield_now();
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    figures.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

fn fill(target: &dyn Target) {
    let mut bytes = Buffer::with_bytes(1 << 20);
    bytes.fill(0x5a);
    (0..CAPACITY).step_by(bytes.len()).for_each(|offset| target.write(offset, &bytes));
    target.flush();
}

/// Prints the ratios of layers that `open` makes in new files to a plain sparse file.
pub(crate) fn compare(format: &str, open: &dyn Fn(Arc<dyn File>, u64) -> Box<dyn Layer>) {
    let parent = std::env::var_os("LAMINA_BENCH_FOLDER").map_or_else(std::env::temp_dir, Into::into);
    let folder = tempfile::tempdir_in(parent).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let modes = match std::env::var("LAMINA_BENCH_MODE").as_deref() {
        Ok("buffered") => vec![IoMode::Buffered],
        Ok("direct") => vec![IoMode::Direct],
        _ => vec![IoMode::Buffered, IoMode::Direct],
    };
    for mode in modes {
        let make = |layered: bool| -> Box<dyn Target> {
            let name = if layered { "layer" } else { "plain" };
            let _ = directory.remove(name);
            let file = directory.create(name, mode).unwrap();
            if layered {
                return Box::new(Mapped(open(file, CAPACITY)));
            }
            file.set_len(CAPACITY).unwrap();
            Box::new(Plain(file))
        };
        println!("{format}, {mode:?}: ratio to a plain sparse file (its MB/s), median of {ROUNDS}");
        println!("              {}", SIZES.map(|size| format!("{size:>7} KiB")).join(""));
        for (full, random, write) in (0..8).map(|case| (case & 4 > 0, case & 2 > 0, case & 1 > 0)).collect::<Vec<_>>() {
            let kept = full.then(|| [false, true].map(&make));
            kept.iter().flatten().for_each(|target| fill(target.as_ref()));
            let line = SIZES.map(|size| {
                let cell = Cell { size: size << 10, random, write };
                let mut figures = [Vec::new(), Vec::new()];
                for round in 0..ROUNDS {
                    for turn in 0..2 {
                        let layered = usize::from(turn == round % 2);
                        let made = kept.is_none().then(|| make(layered == 1));
                        let target = made.as_ref().or(kept.as_ref().map(|kept| &kept[layered])).unwrap();
                        figures[layered].push(cell.run(target.as_ref(), round as u64 + 1));
                    }
                }
                let [plain, layer] = figures.map(|mut figures| {
                    figures.sort_by(f64::total_cmp);
                    figures[ROUNDS / 2]
                });
                format!(" {:4.2}({plain:4.0})", layer / plain)
            });
            let word = |yes: bool, one, other| if yes { one } else { other };
            println!(
                "  {} {} {} {}",
                word(full, "full ", "empty"),
                word(random, "rand", "seq "),
                word(write, "w", "r"),
                line.join("")
            );
        }
    }
}
