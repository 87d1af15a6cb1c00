//! Arbitrary bytes as images: there is a result or an error in bounded time.

use super::*;
use crate::model::Random;
use crate::proving::damages;
use crate::vmfssparse::header::GRAIN_SECTORS_MAX;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use work::NoProgress;

/// A small image with data in each of its tables.
fn image() -> Vec<u8> {
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new((3 * 4096 + 77) * SECTOR)).unwrap();
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
    let mut random = Random::new(1);
    for _ in 0..60 {
        let lba = random.below(3 * 4096);
        layer.write(lba * SECTOR, &[&vec![7; 512 * (1 + random.below(20) as usize)]]).unwrap();
    }
    layer.close().unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Values that trigger errors more often than random ones.
fn value(random: &mut Random) -> u32 {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => u32::MAX,
        3 => u32::MAX - random.below(5000) as u32,
        4 => random.below(400) as u32,
        5 => 1 << random.below(32),
        6 => random.below(20_000) as u32,
        _ => random.next() as u32,
    }
}

fn try_everything(file: Arc<dyn File>, random: &mut Random) {
    for writable in [false, true] {
        let options = OpenOptions { writable, cache_bytes: 0, ..OpenOptions::reading("image") };
        let Ok(layer) = VmfsSparse::open(Arc::clone(&file), &options) else { continue };
        let mut extents = Vec::new();
        let capacity = layer.capacity();
        let mut at = 0;
        for _ in 0..40 {
            extents.clear();
            let start = match random.below(2) {
                0 => at,
                _ => random.below(capacity / SECTOR) * SECTOR,
            };
            let end = (start + 65536 * random.below(64)).min(capacity).max(start);
            match layer.map(start..end, 5, &mut extents) {
                Ok(()) => at = extents.last().map_or(end, |extent| extent.start + extent.length) % capacity,
                Err(_) => at = end % capacity,
            }
        }
        let grain = layer.grain();
        if writable {
            for _ in 0..4 {
                let start = random.below(capacity.div_ceil(grain)) * grain;
                let _ = layer.write(start, &[&vec![1; (capacity - start).min(grain) as usize]]);
                let end = (start + grain * random.below(200)).min(capacity);
                let _ = layer.zero(start..end, false);
            }
            let _ = layer.flush();
            if random.below(20) == 0 {
                let _ = layer.shrink(&NoProgress);
            }
        }
        if capacity < 64 << 30 {
            let _ = layer.check();
            let _ = layer.usage();
        }
        let _ = layer.close();
    }
}

#[test]
fn damaged_images_never_panic() {
    let whole = image();
    let disk = SimulatedDisk::new(0, SimulatedOptions { unflushed_max: 0, ..SimulatedOptions::default() });
    for round in damages() {
        let mut random = Random::new(round);
        let name = format!("{round}");
        let file = disk.directory().create(&name, IoMode::Buffered).unwrap();
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(3) {
            let place = match random.below(4) {
                0 => random.below(8) as usize * 4,
                1 => [4, 8, 12, 16, 20, 24, 28, 1648][random.below(8) as usize],
                2 => 2048 + random.below(4) as usize * 4,
                _ => 2560 + random.below(bytes.len() as u64 / 4 - 700) as usize * 4,
            };
            bytes[place..place + 4].copy_from_slice(&value(&mut random).to_le_bytes());
        }
        if random.below(10) == 0 {
            bytes.truncate(random.below(bytes.len() as u64) as usize);
        }
        // Most cases only open the image or read one table; some run all operations.
        match round % 16 {
            0 => {
                file.write_at(&[&bytes], 0, false).unwrap();
                try_everything(file, &mut random);
            }
            _ => {
                let length = bytes.len().min(2048 + 512 + 16384 * (round % 3) as usize);
                file.write_at(&[&bytes[..length]], 0, false).unwrap();
                let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::reading("image"));
                if let Ok(layer) = layer {
                    let end = layer.capacity().min(32 << 20);
                    let _ = layer.map(0..end, 64, &mut Vec::new());
                }
            }
        }
        disk.directory().remove(&name).unwrap();
        if round % 64 == 0 {
            disk.directory().sync().unwrap();
        }
    }
}

fn patched(offset: usize, value: u32) -> Arc<dyn File> {
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    let mut bytes = image();
    bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    file.write_at(&[&bytes], 0, false).unwrap();
    // The length differs from that of a closed image, so that opening for writing examines the tables.
    file.set_len(bytes.len() as u64 + 512).unwrap();
    file
}

fn open(file: &Arc<dyn File>, writable: bool) -> Result<VmfsSparse> {
    VmfsSparse::open(Arc::clone(file), &OpenOptions { writable, ..OpenOptions::reading("image") })
}

#[test]
fn damage_is_reported_and_not_written_to() {
    // The offset of the first table, and the indexes of its used entries.
    let bytes = image();
    let table = u32::from_le_bytes(bytes[2048..2052].try_into().unwrap()) as usize * 512;
    let used: Vec<usize> = (0..4096).filter(|at| bytes[table + at * 4..table + at * 4 + 4] != [0; 4]).collect();
    let entry = table + used[1] * 4;
    let first = u32::from_le_bytes(bytes[table + used[0] * 4..][..4].try_into().unwrap());
    for (offset, value, says) in [
        (entry, first, "overlap"),
        (entry, 0x00ff_ffff, "outside the file"),
        (entry, 3, "outside the file"),
        (2052, table as u32 / 512, "overlap"),
        (2052, 0x0fff_ffff, "outside the file"),
    ] {
        let file = patched(offset, value);
        let reader = open(&file, false).unwrap();
        let check = reader.check().unwrap();
        assert!(check.problem_count > 0 && check.problems[0].contains(says), "{check:?}");
        let refused = open(&file, true).err().expect("opened for writing despite the damage");
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
        // Undamaged parts can be read, damaged ones cannot.
        let mut extents = Vec::new();
        reader.map(0..512 * used[0] as u64 + 512, usize::MAX, &mut extents).unwrap();
        if offset == entry && says == "outside the file" {
            let start = 512 * used[1] as u64;
            assert_eq!(reader.map(start..start + 512, 1, &mut extents).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }
    // The entry 1 reads as zeros, and is replaced when the grain is written.
    let file = patched(entry, 1);
    let layer = open(&file, true).unwrap();
    assert_eq!(layer.check().unwrap().zero_entries, 1);
    let start = 512 * used[1] as u64;
    let mut extents = Vec::new();
    layer.map(start..start + 512, 1, &mut extents).unwrap();
    assert_eq!(extents[0].content, Content::Zero);
    layer.zero(start..start + 512, false).unwrap();
    layer.close().unwrap();
    assert_eq!(open(&file, false).unwrap().check().unwrap().zero_entries, 0);
}

#[test]
fn headers_with_false_sizes_are_refused() {
    for (offset, value, kind) in [
        (0, 0x4457_4f44, ErrorKind::Corrupt),
        (4, 3, ErrorKind::Unsupported),
        (12, 0, ErrorKind::Corrupt),
        (12, u32::MAX, ErrorKind::Corrupt),
        (16, 0, ErrorKind::Corrupt),
        (16, GRAIN_SECTORS_MAX + 1, ErrorKind::Corrupt),
        (20, 3, ErrorKind::Corrupt),
        (20, 1 << 30, ErrorKind::Corrupt),
        (24, 3, ErrorKind::Corrupt),
        (24, u32::MAX, ErrorKind::Corrupt),
    ] {
        let refused = open(&patched(offset, value), false).err().expect("opened");
        assert_eq!(refused.kind(), kind, "{refused}");
    }
}

/// A file with more tables than an opening for writing usually reads, without its last sectors.
#[test]
fn a_truncated_file_with_many_tables_is_not_written() {
    const TABLES: u64 = 4100;
    const SPAN: u64 = 4096 * SECTOR;
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(TABLES * SPAN)).unwrap();
    let layer = open(&file, true).unwrap();
    for table in 0..TABLES {
        layer.write(table * SPAN, &[&[7; SECTOR as usize]]).unwrap();
    }
    layer.close().unwrap();
    let mut extents = Vec::new();
    layer.map((TABLES - 1) * SPAN..(TABLES - 1) * SPAN + SECTOR, 1, &mut extents).unwrap();
    let Content::Data { offset, .. } = extents[0].content else { panic!("{extents:?}") };
    drop(layer);
    open(&file, true).unwrap().close().unwrap();
    file.set_len(offset).unwrap();
    let refused = open(&file, true).err().expect("opened for writing although it was truncated");
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
    let reader = open(&file, false).unwrap();
    let lost = reader.map((TABLES - 1) * SPAN..(TABLES - 1) * SPAN + SECTOR, 1, &mut extents);
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Corrupt);
}
