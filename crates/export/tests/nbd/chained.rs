//! Chains of layers as exports: grains smaller and larger than blocks, O_DIRECT files, page cache and queue, and
//! snapshots and merges while requests are in progress.

use crate::Running;
use crate::layer_mock::{DirectFile, Manner, MemoryFile, Mock, Table};
use crate::model::{PART, play};
use backend::{File, Queue, portable};
use chain::{Chain, Options};
use disk::NoProgress;
use disk::device::Device;
use disk::{Allocation, ChainedDevice};
use export::exports::{ExportName, Exports};
use layer::Layer;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use testkit::protocol::Mode;

/// Variants of a chain: grain size, whether locations change, whether files are opened with O_DIRECT, bytes of data
/// cache.
const MANNERS: [(u64, bool, bool, u64); 4] =
    [(512, false, false, 0), (4096, true, true, 0), (65536, true, false, 2 << 20), (512, true, true, 1 << 20)];

struct One {
    device: Arc<ChainedDevice>,
    workers: Arc<portable::Workers>,
}

impl Exports for One {
    fn names(&self) -> Vec<ExportName> {
        vec![ExportName { name: "vm".to_owned(), description: "a chain".to_owned() }]
    }
    fn open(&self, _name: &str, _read_only: bool) -> error::Result<Arc<dyn Device>> {
        Ok(Arc::clone(&self.device) as Arc<dyn Device>)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(portable::PortableQueue::new(Arc::clone(&self.workers), depth)?))
    }
}

fn layer(grain: u64, moves: bool, direct: bool) -> Arc<dyn Layer> {
    let mut file = Arc::new(MemoryFile::default()) as Arc<dyn File>;
    if direct {
        file = Arc::new(DirectFile(file));
    }
    Mock::over(Manner { moves, ..Manner::new(3 * PART, grain) }, file, Table::default())
}

#[test]
fn a_chain_is_served_like_a_native_disk() {
    for (seed, (grain, moves, direct, data_cache)) in (0..).zip(MANNERS) {
        let options = Options { data_cache, ..Options::default() };
        let chain = Chain::open("vm", vec![layer(4096, false, direct)], options).unwrap();
        let chain = Arc::new(chain);
        let device = Arc::new(ChainedDevice::new("vm", Arc::clone(&chain)));
        let running = Running::start(Arc::new(One { device, workers: portable::Workers::new() }));
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for (part, mode) in [Mode::Simple, Mode::Structured, Mode::Extended].into_iter().enumerate() {
                let (socket, done) = (&running.socket, &done);
                scope.spawn(move || {
                    let part = part as u64;
                    let finished = std::panic::catch_unwind(|| play(socket, part, mode, seed * 3 + part, 600));
                    done.fetch_add(1, Ordering::SeqCst);
                    finished.unwrap();
                });
            }
            let mut round = 0;
            while done.load(Ordering::SeqCst) < 3 {
                round += 1;
                let keys = chain.keys();
                match round % 5 {
                    4 if keys.len() > 2 => {
                        drop(chain.merge_down(keys[0], keys[1], 0, &NoProgress, &mut || Ok(())).unwrap())
                    }
                    _ if keys.len() < 20 => drop(chain.push(layer(grain, moves, direct)).unwrap()),
                    _ => drop(chain.consolidate(&NoProgress, &mut || Ok(())).unwrap()),
                }
                std::thread::sleep(Duration::from_millis(3));
            }
        });
    }
}

#[test]
fn status_and_changed_blocks_of_a_chain() {
    let chain = Arc::new(Chain::open("vm", vec![layer(4096, false, false)], Options::default()).unwrap());
    let device = ChainedDevice::new("vm", Arc::clone(&chain));
    chain.write(8192, &[1; 8192]).unwrap();
    let base = chain.keys()[0];
    chain.push(layer(4096, false, false)).unwrap();
    device.set_bases(vec![("monday".to_owned(), base)]);
    chain.write(12288, &[2; 100]).unwrap();
    chain.zero(8192, 4096, false).unwrap();
    let status = device.status(0, 20_000, 10).unwrap();
    let runs: Vec<(u64, Allocation)> = status.iter().map(|extent| (extent.length, extent.allocation)).collect();
    assert_eq!(runs, [(12288, Allocation::Hole), (4096, Allocation::Data), (3616, Allocation::Hole)]);
    let changed = device.changed_since("monday", 0, 20_000, 10).unwrap();
    let runs: Vec<(u64, bool)> = changed.iter().map(|extent| (extent.length, extent.dirty)).collect();
    assert_eq!(runs, [(8192, false), (8192, true), (3616, false)]);
    assert!(device.changed_since("tuesday", 0, 1, 1).is_err());
    assert_eq!(device.dirty_bases(), ["monday"]);
    assert!(device.resize(1 << 30).is_err());
    device.prefetch(5, 100_000).unwrap();
    assert_eq!(device.read(12287, 3).unwrap(), [0, 2, 2]);
    device.write(100, backend::SharedSlice::copy_of(&[3; 3996]), true).unwrap();
    assert_eq!(device.read(99, 2).unwrap()[1], 3);
    let end = device.capacity() - 1;
    assert!(device.write(end, backend::SharedSlice::copy_of(&[3; 2]), true).is_err(), "beyond the end");
}
