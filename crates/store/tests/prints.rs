//! Memory of deduplication for much data: a pass keeps as many prints as its limit says, whatever the number of blocks,
//! and finds all equal blocks; hints keep their memory; opening the store rebuilds nothing.
//!
//! `LAMINA_PRINTS` sets the number of blocks, 4 KiB each. Their content is not stored: the medium keeps the first eight
//! bytes of each block of a data file, from which the rest follows. So a run with 64 million blocks takes about 6 GiB
//! of disk space and 1 GiB of memory:
//!
//! ```text
//! LAMINA_PRINTS=64000000 cargo test --release -p lamina-store --test prints -- --nocapture
//! ```

#![allow(clippy::unwrap_used)]

use backend::local::{LocalDirectory, LocalQueues};
use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, Room, SharedSlice};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use store::catalog::Provisioning;
use store::engine::{InitParameters, NewDisk, PRINT_BYTES, PRINTS_MAX, PRINTS_MIN, SharePass};
use store::{Engine, EngineOptions};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks of a write.
const STEP: u64 = 1024;
/// The number of different blocks is that of all blocks, without one of so many.
const DUPLICATES: u64 = 64;
/// Space that the medium claims to have.
const ROOM: u64 = 16 << 40;

/// The first eight bytes of each block of a data file.
#[derive(Default)]
struct Seeds {
    length: u64,
    seeds: Vec<u64>,
}

/// A directory with data files that keep seeds, and other files in a folder.
struct Medium {
    folder: Arc<dyn Directory>,
    data: Mutex<BTreeMap<String, Arc<SeedFile>>>,
}

#[derive(Default)]
struct SeedFile(Mutex<Seeds>);

/// The content of a block: its seed, repeated.
fn fill(seed: u64, block: &mut [u8]) {
    block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&seed.to_le_bytes()));
}

impl File for SeedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.lock().unwrap().length = length;
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let file = self.0.lock().unwrap();
        for (block, number) in buffer.chunks_exact_mut(BLOCK_SIZE).zip(offset / BLOCK..) {
            fill(file.seeds.get(number as usize).copied().unwrap_or(0), block);
        }
        Ok(())
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, _durable: bool) -> io::Result<()> {
        let mut file = self.0.lock().unwrap();
        let mut number = (offset / BLOCK) as usize;
        for block in slices.iter().flat_map(|slice| slice.chunks_exact(BLOCK_SIZE)) {
            if file.seeds.len() <= number {
                file.seeds.resize(number + 1, 0);
            }
            file.seeds[number] = u64::from_le_bytes(block[..8].try_into().unwrap());
            number += 1;
        }
        file.length = file.length.max(number as u64 * BLOCK);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut file = self.0.lock().unwrap();
        let blocks = offset / BLOCK..(offset + length) / BLOCK;
        for number in blocks {
            if let Some(seed) = file.seeds.get_mut(number as usize) {
                *seed = 0;
            }
        }
        Ok(())
    }
}

impl Medium {
    fn seeds(&self, name: &str) -> Option<Arc<SeedFile>> {
        name.starts_with("data.0").then(|| Arc::clone(self.data.lock().unwrap().entry(name.into()).or_default()))
    }
}

impl Directory for Medium {
    backend::forward_directory!(folder: remove, rename, list, sync, lock, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let inner = self.folder.open(name, mode)?;
        Ok(self.seeds(name).map_or(inner, |seeds| seeds))
    }

    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let inner = self.folder.create(name, mode)?;
        Ok(self.seeds(name).map_or(inner, |seeds| seeds))
    }

    fn room(&self) -> io::Result<Room> {
        Ok(Room { total: ROOM, available: ROOM })
    }
}

/// Bytes of memory that the process uses.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The seed of a block: different for all blocks, except that the last one of each group is like that of another group.
fn seed(block: u64, blocks: u64) -> u64 {
    let number = if block % DUPLICATES == DUPLICATES - 1 { block / 2 / DUPLICATES * DUPLICATES } else { block };
    // Multiplied, so that checksums are spread as those of usual content.
    (number + blocks).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

fn write_all(engine: &Engine, disk: u64, blocks: u64) {
    let head = engine.head(disk);
    for from in (0..blocks).step_by(STEP as usize) {
        let count = STEP.min(blocks - from) as usize;
        let mut buffer = Buffer::zeroed(count);
        for (block, number) in buffer.chunks_exact_mut(BLOCK_SIZE).zip(from..) {
            fill(seed(number, blocks), block);
        }
        engine.write_blocks(&head, from, SharedSlice::new(Arc::new(buffer), 0..count * BLOCK_SIZE)).unwrap();
    }
    engine.settle(&head).unwrap();
    engine.flush().unwrap();
}

#[test]
fn a_pass_over_much_data_finds_all_equal_blocks_with_the_memory_of_its_limit() {
    let blocks = std::env::var("LAMINA_PRINTS").map_or(200_000, |value| value.parse::<u64>().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Directory> = Arc::new(LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap());
    let medium: Arc<dyn Directory> = Arc::new(Medium { folder, data: Mutex::default() });
    Engine::init(&medium, InitParameters { uuid: [7; 16], journal_size: 64 << 20 }).unwrap();
    let options = EngineOptions { metadata_cache: 64 << 20, ..EngineOptions::default() };
    let engine = Engine::open(Arc::clone(&medium), options).unwrap();
    let new = NewDisk {
        name: "vm".into(),
        capacity: blocks * BLOCK,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    };
    let disk = engine.create_disk(new).unwrap();
    let began = Instant::now();
    write_all(&engine, disk, blocks);
    println!("{blocks} blocks written in {:.1} s", began.elapsed().as_secs_f64());
    // In the small run several rounds are needed too.
    let prints = if blocks > 4 * PRINTS_MAX as u64 { PRINTS_MAX } else { PRINTS_MIN };
    let mut pass = SharePass::new(vec![(disk, blocks)], prints);
    let (began, before) = (Instant::now(), resident());
    let (mut most, mut shared, mut steps) = (before, 0, 0u64);
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        shared += step.shared;
        steps += 1;
        if steps % 64 == 0 {
            most = most.max(resident());
        }
        if step.ended {
            break;
        }
    }
    let used = most.max(resident()).saturating_sub(before);
    println!(
        "a pass with {prints} prints: {shared} of {blocks} blocks shared in {:.1} s and {} rounds, {} MiB of memory \
         for prints, the process grew by {} MiB",
        began.elapsed().as_secs_f64(),
        blocks.div_ceil(prints as u64),
        (prints * PRINT_BYTES) >> 20,
        used >> 20
    );
    // Each block that is last in its group is like the first one of an earlier group, or of its own.
    assert_eq!(shared, blocks / DUPLICATES);
    assert!(used <= 2 * (prints * PRINT_BYTES) as u64 + (256 << 20), "{used}");
    engine.close().unwrap();
    drop(engine);
    let began = Instant::now();
    let engine = Engine::open(medium, options).unwrap();
    let opened = began.elapsed();
    println!("opened in {:.3} s", opened.as_secs_f64());
    let head = engine.head(disk);
    let read = engine.read_blocks("vm", 0..blocks.min(5000), &|range| engine.plan_head(&head, range)).unwrap();
    for (block, number) in read.chunks_exact(BLOCK_SIZE).zip(0..) {
        assert_eq!(block[..8], seed(number, blocks).to_le_bytes());
    }
}
