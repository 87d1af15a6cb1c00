//! Arbitrary bytes as objects: there is a result or an error in bounded time. Most mutated blocks get the right
//! checksum, so that decoding reaches the other checks.

use super::*;
use crate::model::Random;
use crate::proving::damages;
use crate::vsansparse::header::seal;

const CAPACITY: u64 = 9 << 20;

/// An object with map pages, zeros, and changes that are only in the log.
fn image() -> Vec<u8> {
    let (_disk, file, layer) = object(CAPACITY);
    let mut random = Random::new(3);
    for step in 0..40 {
        let block = random.below(CAPACITY / BLOCK - 8);
        let count = 1 + random.below(8);
        match random.below(4) {
            0 => layer.zero(block * BLOCK..(block + count) * BLOCK, false).unwrap(),
            _ => layer.write(block * BLOCK, &[&vec![7; (count * BLOCK) as usize]]).unwrap(),
        }
        if step == 20 {
            layer.checkpoint().unwrap();
        }
    }
    layer.flush().unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn try_everything(file: &Arc<dyn File>, random: &mut Random, writable: bool) {
    let options = OpenOptions { writable, cache_bytes: 0, ..OpenOptions::reading("image") };
    let Ok(layer) = VsanSparse::open(Arc::clone(file), &options) else { return };
    let capacity = layer.capacity();
    for _ in 0..6 {
        let start = random.below(capacity / SECTOR) * SECTOR;
        let _ = layer.map(start..(start + (4 << 20)).min(capacity), 9, &mut Vec::new());
    }
    if writable {
        for _ in 0..4 {
            let start = random.below(capacity / BLOCK) * BLOCK;
            let _ = layer.write(start, &[&vec![1; (capacity - start).min(BLOCK) as usize]]);
            let _ = layer.zero(start..(start + 100 * BLOCK).min(capacity / BLOCK * BLOCK), false);
        }
        let _ = layer.flush();
    }
    if capacity <= 1 << 30 {
        let _ = layer.check();
        let _ = layer.usage();
    }
    let _ = layer.close();
}

#[test]
fn damaged_objects_never_panic() {
    let whole = image();
    let disk = SimulatedDisk::new(0, SimulatedOptions { unflushed_max: 0, ..SimulatedOptions::default() });
    let name = "image";
    let file = disk.directory().create(name, IoMode::Buffered).unwrap();
    // All bytes except the payload, which this test does not read.
    let restore = || {
        file.set_len(0).unwrap();
        file.set_len(whole.len() as u64).unwrap();
        for (start, block) in (0..300).map(|at| at * BLOCK).zip(whole.chunks_exact(BLOCK as usize)) {
            if block.iter().any(|byte| *byte != 0) {
                file.write_at(&[block], start, false).unwrap();
            }
        }
    };
    restore();
    // The metadata blocks with the offsets of their checksums; the last batch of the log is one block.
    let blocks: Vec<(usize, usize)> =
        vec![(0, 12), (1, 12), (3, 4), (258, 4), (259, 4), (260, 4), (261, 4), (262, 4), (264, 4)];
    for round in damages() {
        let mut random = Random::new(round);
        let mut touched = Vec::new();
        for _ in 0..1 + random.below(2) {
            let &(block, checksum) = &blocks[random.below(blocks.len() as u64) as usize];
            let start = block * BLOCK as usize;
            let mut bytes = whole[start..start + BLOCK as usize].to_vec();
            for _ in 0..1 + random.below(3) {
                let place = match random.below(3) {
                    0 => random.below(12) as usize * 8,
                    1 => 64 + random.below(64) as usize * 2,
                    _ => random.below(510) as usize * 8,
                };
                let value = match random.below(6) {
                    0 => 0,
                    1 => u64::MAX,
                    2 => random.below(4096),
                    3 => 1 << random.below(64),
                    4 => random.below(5) << 56 | random.below(2100),
                    _ => random.next(),
                };
                bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
            }
            if random.below(8) > 0 {
                seal(&mut bytes, checksum);
            }
            file.write_at(&[&bytes], start as u64, false).unwrap();
            touched.push(start);
        }
        if round % 512 == 0 {
            file.set_len(random.below(whole.len() as u64)).unwrap();
        }
        try_everything(&file, &mut random, round % 8 == 0);
        match round % 8 {
            0 => restore(),
            _ => {
                for start in touched {
                    file.write_at(&[&whole[start..start + BLOCK as usize]], start as u64, false).unwrap();
                }
            }
        }
    }
}

/// Objects with a changed byte and its old checksum: reads return the right data or an error.
#[test]
fn flipped_bits_are_detected() {
    let (disk, file, layer) = object(CAPACITY);
    for block in 0..600u64 {
        layer.write(block * 3 * BLOCK, &[&[block as u8; 4096]]).unwrap();
    }
    layer.close().unwrap();
    let mut random = Random::new(6);
    let mut noticed = 0;
    for _ in 0..2000 {
        let block = [0, 1, 258, 260, 262, 264][random.below(6) as usize];
        let (place, bit) = (block * BLOCK + random.below(BLOCK), random.below(8) as u8);
        disk.flip_bit("image", place, bit).unwrap();
        match VsanSparse::open(Arc::clone(&file), &OpenOptions::reading("image")) {
            Err(_) => noticed += 1,
            Ok(layer) => {
                let mut extents = Vec::new();
                let mut at = 0;
                while at < CAPACITY && layer.map(at..CAPACITY, 64, &mut extents).is_ok() {
                    at = extents.last().map_or(CAPACITY, |extent| extent.start + extent.length);
                }
                noticed += u32::from(at < CAPACITY);
                for extent in extents {
                    let block = extent.start / BLOCK;
                    let expected = block.is_multiple_of(3) && block < 1800;
                    assert_eq!(matches!(extent.content, Content::Data { .. }), expected, "block {block}");
                    if expected {
                        assert_eq!(read(&layer, extent.start), Some([(block / 3) as u8; 4096]));
                    }
                }
            }
        }
        disk.flip_bit("image", place, bit).unwrap();
    }
    assert!(noticed > 1000, "{noticed} of 2000; a damaged header has another copy");
}

#[test]
fn an_object_with_grains_after_the_end_of_its_file_is_not_written() {
    let (_disk, file, layer) = object(CAPACITY);
    layer.write(0, &[&vec![7; 100 * BLOCK as usize]]).unwrap();
    layer.close().unwrap();
    let Content::Data { offset: last, .. } = content(&layer, 99 * BLOCK) else { panic!("it is stored") };
    drop(layer);
    let open =
        |writable| VsanSparse::open(Arc::clone(&file), &OpenOptions { writable, ..OpenOptions::reading("image") });
    // The unused end of a unit may be missing.
    file.set_len(last + BLOCK).unwrap();
    open(true).unwrap().close().unwrap();
    file.set_len(last).unwrap();
    let refused = open(true).err().expect("opened for writing although it was truncated");
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
    assert!(refused.to_string().contains("truncated"), "{refused}");
    let reader = open(false).unwrap();
    assert_eq!(reader.map(99 * BLOCK..100 * BLOCK, 1, &mut Vec::new()).unwrap_err().kind(), ErrorKind::Corrupt);
}
