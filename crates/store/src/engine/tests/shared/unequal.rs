//! Blocks with equal checksums and different contents: the equal ones among them are found, in a time that is
//! proportional to their number.

use super::*;
use crate::engine::sharing::HASHED_MAX;

/// A block with this word in it, of which the CRC32C is that of a block of zeros.
pub(in crate::engine::tests) fn colliding(word: u32) -> Vec<u8> {
    let mut block = vec![0; BLOCK_SIZE];
    block[..4].copy_from_slice(&word.to_le_bytes());
    let wanted = crate::checksum(&[0; BLOCK_SIZE]);
    // CRC32C is affine over bits: the four last bytes are found bit by bit.
    let base = crate::checksum(&block);
    let mut rows: Vec<(u32, u32)> = (0..32)
        .map(|bit| {
            let mut one = block.clone();
            one[BLOCK_SIZE - 4..].copy_from_slice(&(1u32 << bit).to_le_bytes());
            (crate::checksum(&one) ^ base, 1 << bit)
        })
        .collect();
    let (mut difference, mut bits) = (wanted ^ base, 0);
    for column in (0..32).rev() {
        let Some(pivot) = rows.iter().position(|row| row.0 >> column & 1 == 1) else { continue };
        let row = rows.swap_remove(pivot);
        rows.iter_mut().filter(|other| other.0 >> column & 1 == 1).for_each(|other| {
            *other = (other.0 ^ row.0, other.1 ^ row.1);
        });
        if difference >> column & 1 == 1 {
            (difference, bits) = (difference ^ row.0, bits ^ row.1);
        }
    }
    block[BLOCK_SIZE - 4..].copy_from_slice(&bits.to_le_bytes());
    assert_eq!(crate::checksum(&block), wanted);
    block
}

fn put_bytes(engine: &Engine, block: u64, content: &[u8]) {
    let data = SharedSlice::new(Arc::new(Buffer::copy_of(content)), 0..BLOCK_SIZE);
    engine.write_blocks(&engine.head(1), block, data).unwrap();
}

/// A store with blocks of these contents, which all have one checksum.
fn collided(words: impl IntoIterator<Item = u32>) -> Arc<Engine> {
    let (_, engine) = made();
    (0..).zip(words).for_each(|(block, word)| put_bytes(&engine, block, &colliding(word)));
    quiet(&engine);
    engine
}

/// What a pass has read and shared.
fn pass_over(engine: &Engine, prints: usize) -> (u64, u64) {
    let mut pass = SharePass::new(vec![(1, BLOCKS)], prints);
    let (mut read, mut shared) = (0, 0);
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        assert!(step.read <= 2 * crate::tree::EXTENT_BLOCKS_MAX, "a step ends soon");
        (read, shared) = (read + step.read, shared + step.shared);
        if step.ended {
            return (read, shared);
        }
    }
}

fn is_kept(engine: &Engine, words: impl IntoIterator<Item = u32>) {
    let head = engine.head(1);
    for (block, word) in (0..).zip(words) {
        let read = engine.read_blocks("vm", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap();
        assert!(read[..] == colliding(word)[..], "block {block}");
    }
    is_whole(engine);
}

/// As the copies of a superblock, and other blocks of a file system that end with their own CRC32C.
#[test]
fn of_thousands_of_blocks_with_one_checksum_all_equal_ones_are_shared() {
    const CONTENTS: u32 = 400;
    let words = || (0..2000).map(|block| 1 + (block * 7) % CONTENTS);
    let engine = collided(words());
    let (read, shared) = pass_over(&engine, PRINTS_MAX);
    assert_eq!(shared, 2000 - u64::from(CONTENTS));
    // Both blocks of each comparison with the first one, each of the others for its hash, and both blocks of each pair.
    assert!(read <= 2 * 2000 + 2000 + 2 * 2000, "{read} blocks were read");
    quiet(&engine);
    assert_eq!(used(&engine), u64::from(CONTENTS));
    is_kept(&engine, words());
    assert_eq!(pass_over(&engine, PRINTS_MAX).1, 0);
}

#[test]
fn a_pass_that_ends_while_it_groups_blocks_keeps_what_it_has_shared() {
    let words = || (0..600).map(|block| 1 + block % 200);
    for grouped in [2, 7, 100] {
        let engine = collided(words());
        let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
        let (mut first, mut after) = (0, 0);
        while after < grouped {
            after += u32::from(after > 0 || pass.is_grouping());
            first += engine.share_step(&mut pass).unwrap().shared;
        }
        drop(pass);
        assert_eq!(first + pass_over(&engine, PRINTS_MAX).1, 400, "{first} in the first pass");
        quiet(&engine);
        assert_eq!(used(&engine), 200);
        is_kept(&engine, words());
    }
}

/// More than one block may have references, and more than are grouped at a time.
#[test]
fn blocks_with_one_checksum_are_grouped_in_chunks() {
    let many = HASHED_MAX as u32 + 600;
    let words = || (0..many).map(|block| 1 + block % 4);
    let engine = collided(words());
    pass_over(&engine, PRINTS_MAX);
    quiet(&engine);
    // 256 places use one block at most. Some blocks are left in each of the two chunks.
    assert!((11..=24).contains(&used(&engine)), "{}", used(&engine));
    is_kept(&engine, words());
}

#[test]
fn a_pass_with_little_memory_shares_blocks_with_one_checksum() {
    let words = || (0..1500).map(|block| 1 + block % 12);
    let engine = collided(words());
    // There is room for 64 prints, and for 16 that are kept when these have one checksum.
    assert_eq!(pass_over(&engine, 0).1, 1488);
    is_kept(&engine, words());
}

#[test]
fn a_block_that_changes_while_its_checksum_is_grouped_is_left() {
    let words = || (0..300).map(|block| 1 + block % 100);
    let engine = collided(words());
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    let mut steps = 0;
    while !pass.is_grouping() {
        engine.share_step(&mut pass).unwrap();
        steps += 1;
        assert!(steps < 1000);
    }
    engine.share_step(&mut pass).unwrap();
    // One that was read, and one that was not.
    let changed = [20, 280];
    changed.iter().for_each(|block| write(&engine, *block, 9));
    quiet(&engine);
    while !engine.share_step(&mut pass).unwrap().ended {}
    quiet(&engine);
    assert!(used(&engine) <= 103, "{}", used(&engine));
    changed.iter().for_each(|block| assert_eq!(value(&engine, *block).unwrap(), 9));
    is_whole(&engine);
}

/// A guest can give any number of blocks the same checksum.
#[test]
fn a_pass_leaves_many_blocks_that_have_only_their_checksum_in_common() {
    const MANY: u64 = 100;
    let engine = collided((0..MANY).map(|block| 1 + block as u32));
    // Both blocks of each comparison with the first one, and each of the others for its hash.
    assert_eq!(pass_over(&engine, PRINTS_MAX), (3 * (MANY - 1), 0));
}

#[test]
fn blocks_are_shared_only_if_all_their_bytes_are_equal() {
    let (_disk, engine) = made();
    let contents: Vec<Vec<u8>> = [1, 2, 1, 3, 2, 1].into_iter().map(colliding).collect();
    (0..).zip(&contents).for_each(|(block, content)| put_bytes(&engine, block, content));
    quiet(&engine);
    assert_eq!(share(&engine, &[1]), 3);
    quiet(&engine);
    assert_eq!(used(&engine), 3);
    let head = engine.head(1);
    for (block, content) in (0..).zip(&contents) {
        let read = engine.read_blocks("vm", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap();
        assert!(read[..] == content[..], "block {block}");
    }
    is_whole(&engine);
}
