//! How fast a layer is beside a plain file: sequential 512 KiB and random 4 KiB, empty and full, on one thread.
//! Figures for people, printed; run with `--ignored --nocapture`.

use crate::model::Random;
use crate::{Content, Layer};
use backend::local::{LocalDirectory, LocalQueues};
use backend::{Buffer, Directory, File, IoMode};
use std::sync::Arc;
use std::time::Instant;

const SIZE: u64 = 1 << 30;
const LARGE: usize = 512 << 10;
const SMALL: usize = 4096;
const SMALL_COUNT: u64 = 60_000;
const ROUNDS: usize = 3;

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

fn megabytes(bytes: u64, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    bytes as f64 / 1e6 / start.elapsed().as_secs_f64()
}

/// MB/s of each case in turn.
fn measure(target: &dyn Target, order: &[u64]) -> Vec<(&'static str, f64)> {
    let large = {
        let mut bytes = Buffer::with_bytes(LARGE);
        bytes.fill(0x5a);
        bytes
    };
    let small = Buffer::copy_of(&large[..SMALL]);
    let blocks = order.len() as u64 * SMALL as u64;
    let sequential_write = || {
        for offset in (0..SIZE).step_by(LARGE) {
            target.write(offset, &large);
        }
        target.flush();
    };
    let random_write = || {
        for block in order {
            target.write(block * SMALL as u64, &small);
        }
        target.flush();
    };
    let sequential_read = || {
        let mut out = Buffer::with_bytes(LARGE);
        for offset in (0..SIZE).step_by(LARGE) {
            target.read(offset, &mut out);
        }
    };
    let random_read = || {
        let mut out = Buffer::with_bytes(SMALL);
        for block in order {
            target.read(block * SMALL as u64, &mut out);
        }
    };
    vec![
        ("random write, empty", megabytes(blocks, random_write)),
        ("random read, sparse", megabytes(blocks, random_read)),
        ("sequential read, sparse", megabytes(SIZE, sequential_read)),
        ("sequential write, fills", megabytes(SIZE, sequential_write)),
        ("random write, full", megabytes(blocks, random_write)),
        ("random read, full", megabytes(blocks, random_read)),
        ("sequential read, filled", megabytes(SIZE, sequential_read)),
    ]
}

/// A new layer is filled in order, then written and read.
fn measure_ordered(target: &dyn Target, order: &[u64]) -> Vec<(&'static str, f64)> {
    let large = Buffer::with_bytes(LARGE);
    let empty = || {
        for offset in (0..SIZE).step_by(LARGE) {
            target.write(offset, &large);
        }
        target.flush();
    };
    let full = || empty();
    let read = || {
        let mut out = Buffer::with_bytes(LARGE);
        for offset in (0..SIZE).step_by(LARGE) {
            target.read(offset, &mut out);
        }
    };
    let random = || {
        let mut out = Buffer::with_bytes(SMALL);
        for block in order {
            target.read(block * SMALL as u64, &mut out);
        }
    };
    vec![
        ("sequential write, empty", megabytes(SIZE, empty)),
        ("sequential write, full", megabytes(SIZE, full)),
        ("sequential read, full", megabytes(SIZE, read)),
        ("random read, in order", megabytes(order.len() as u64 * SMALL as u64, random)),
    ]
}

/// Prints the figures of layers that `open` makes in new files, beside a plain sparse file.
pub(crate) fn compare(format: &str, open: &dyn Fn(Arc<dyn File>, u64) -> Box<dyn Layer>) {
    let folder = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let mut random = Random::new(1);
    let order: Vec<u64> = (0..SMALL_COUNT).map(|_| random.below(SIZE / SMALL as u64)).collect();
    for mode in [IoMode::Buffered, IoMode::Direct] {
        let order = match mode {
            IoMode::Buffered => &order[..],
            IoMode::Direct => &order[..order.len() / 4],
        };
        let mut figures: Vec<(&str, Vec<f64>, Vec<f64>)> = Vec::new();
        for _ in 0..ROUNDS {
            for layered in [false, true] {
                for measure in [measure, measure_ordered] {
                    let file = directory.create("file", mode).unwrap();
                    let target: Box<dyn Target> = match layered {
                        true => Box::new(Mapped(open(Arc::clone(&file), SIZE))),
                        false => {
                            file.set_len(SIZE).unwrap();
                            Box::new(Plain(Arc::clone(&file)))
                        }
                    };
                    for (case, figure) in measure(target.as_ref(), order) {
                        let at = figures.iter().position(|(name, ..)| *name == case).unwrap_or_else(|| {
                            figures.push((case, Vec::new(), Vec::new()));
                            figures.len() - 1
                        });
                        if layered { &mut figures[at].2 } else { &mut figures[at].1 }.push(figure);
                    }
                    directory.remove("file").unwrap();
                }
            }
        }
        println!("{format}, {mode:?}: MB/s, median of {ROUNDS}");
        for (case, mut plain, mut layer) in figures {
            plain.sort_by(f64::total_cmp);
            layer.sort_by(f64::total_cmp);
            let (plain, layer) = (plain[ROUNDS / 2], layer[ROUNDS / 2]);
            println!("  {case:26} plain {plain:7.0}   layer {layer:7.0}   {:.2}", layer / plain);
        }
    }
}
