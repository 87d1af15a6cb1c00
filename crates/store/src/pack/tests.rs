//! Packs in memory: every block is read as it was written, and damage gives the content or an error.

#![allow(clippy::unwrap_used)]

use super::*;
use std::cell::Cell;
use testkit::Random;

thread_local! {
    /// The decompressors that the thread has started.
    pub(super) static STARTED: Cell<u32> = const { Cell::new(0) };
}

/// Blocks of different compressibility; the last one cannot be compressed.
fn blocks(count: usize) -> Vec<Vec<u8>> {
    let mut random = Random::new(7);
    (0..count)
        .map(|number| {
            let noise = if number + 1 == count { BLOCK_SIZE } else { number * 97 % (BLOCK_SIZE / 2) };
            let mut block = vec![number as u8; BLOCK_SIZE];
            block[..noise].iter_mut().for_each(|byte| *byte = random.next() as u8);
            block
        })
        .collect()
}

#[test]
fn every_block_of_a_pack_is_read_as_it_was_written() {
    for codec in [Codec::Lz4, Codec::Zstd(1), Codec::Zstd(Codec::LEVEL_MAX)] {
        for count in [1, 2, 33, BLOCKS_MAX] {
            let blocks = blocks(count);
            let all: Vec<Option<&[u8]>> =
                blocks.iter().enumerate().map(|(i, block)| (i % 5 != 3).then_some(&block[..])).collect();
            let bytes = Packer::new(codec).unwrap().pack(&all);
            assert!(bytes.len().is_multiple_of(BLOCK_SIZE));
            let pack = Pack::decode(&bytes).unwrap();
            for (i, block) in all.iter().enumerate() {
                let mut out = vec![0xee; BLOCK_SIZE];
                let read = pack.read(i..i + 1, &mut out);
                match block {
                    Some(block) => assert!(read.unwrap() == [checksum(block)] && out == **block),
                    None => assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt),
                }
            }
            assert!(pack.read(count..count + 1, &mut vec![0; BLOCK_SIZE]).is_err());
        }
    }
}

#[test]
fn a_pack_with_a_changed_byte_gives_its_content_or_an_error() {
    for codec in [Codec::Lz4, Codec::Zstd(3)] {
        let blocks = blocks(4);
        let all: Vec<Option<&[u8]>> = blocks.iter().map(|block| Some(&block[..])).collect();
        let mut bytes = Packer::new(codec).unwrap().pack(&all);
        for at in 0..bytes.len() {
            bytes[at] ^= 1 << (at % 8);
            let mut out = vec![0; 4 * BLOCK_SIZE];
            if Pack::decode(&bytes).and_then(|pack| pack.read(0..4, &mut out)).is_ok() {
                assert!(out == blocks.concat(), "byte {at}");
            } else if at < HEAD {
                assert!(Pack::decode(&bytes).is_err(), "byte {at}");
            }
            bytes[at] ^= 1 << (at % 8);
        }
        (0..HEAD + ENTRY).for_each(|length| assert!(Pack::decode(&bytes[..length]).is_err()));
    }
}

#[test]
fn a_thread_starts_one_decompressor() {
    let blocks = blocks(4);
    let all: Vec<Option<&[u8]>> = blocks.iter().map(|block| Some(&block[..])).collect();
    let good = Packer::new(Codec::Zstd(3)).unwrap().pack(&all);
    let before = STARTED.get();
    let read = |bytes: &[u8]| {
        let mut out = vec![0; 4 * BLOCK_SIZE];
        Pack::decode(bytes).and_then(|pack| pack.read(0..4, &mut out)).map(|_| out)
    };
    for round in 0..10 {
        assert!(read(&good).unwrap() == blocks.concat());
        // A damaged frame does not affect the next one.
        let mut damaged = good.clone();
        damaged[HEAD + 4 * ENTRY + 6 + round] ^= 0x55;
        assert!(read(&damaged).is_err());
    }
    assert_eq!(STARTED.get() - before, 1);
}

#[test]
fn the_index_proves_the_blocks_in_which_everything_is_as_it_was_written() {
    let blocks = blocks(40);
    let all: Vec<Option<&[u8]>> =
        blocks.iter().enumerate().map(|(i, block)| (i % 5 != 3).then_some(&block[..])).collect();
    let bytes = Packer::new(Codec::Lz4).unwrap().pack(&all);
    let stored = bytes.len() / BLOCK_SIZE;
    assert_eq!(proven(&bytes), vec![true; stored]);
    for block in 1..stored {
        let mut bad = bytes.clone();
        bad[block * BLOCK_SIZE + 1] ^= 1;
        let found = proven(&bad);
        // What lies in the block may begin in the block before, and end in the one after it.
        assert!(!found[block] && found.iter().filter(|good| !**good).count() <= 3, "block {block}: {found:?}");
    }
    let mut bad = bytes.clone();
    *bad.last_mut().unwrap() ^= 1;
    assert!(!proven(&bad)[stored - 1]);
    let mut bad = bytes;
    bad[HEAD] ^= 1;
    assert_eq!(proven(&bad), vec![false; stored]);
    assert_eq!(proven(&[]), Vec::<bool>::new());
}
