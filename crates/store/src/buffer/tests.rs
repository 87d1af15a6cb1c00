//! Compares the layers with a model that has one map item per block.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::testbed::Random;
use std::sync::Arc;

/// The model of one block of a layer: its stamp, and for data the number that fills its bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Cell {
    stamp: u64,
    claimed: bool,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum What {
    Data(u32),
    Unmapped,
    Zero,
}

#[derive(Default)]
struct Model {
    /// Oldest first, each with the snapshot that closed it.
    layers: VecDeque<(BTreeMap<u64, Cell>, Option<u64>)>,
}

const SPAN: u64 = 64;

fn contents(random: &mut Random, blocks: u64) -> (Content, Vec<What>) {
    match random.below(4) {
        0 => (Content::Unmapped, vec![What::Unmapped; blocks as usize]),
        1 => (Content::Zero, vec![What::Zero; blocks as usize]),
        _ => {
            let numbers: Vec<u32> = (0..blocks).map(|_| random.next() as u32).collect();
            let mut buffer = backend::Buffer::zeroed(blocks as usize + 1);
            for (block, number) in buffer[BLOCK_SIZE..].chunks_exact_mut(BLOCK_SIZE).zip(&numbers) {
                block[..4].copy_from_slice(&number.to_le_bytes());
            }
            // The slice starts after the first block of its buffer, so that a confusion of offsets in the buffer and
            // in the slice is found.
            let slice = SharedSlice::new(Arc::new(buffer), BLOCK_SIZE..(blocks as usize + 1) * BLOCK_SIZE);
            let sums = Checksums::of(&slice);
            (Content::Data(slice, sums), numbers.into_iter().map(What::Data).collect())
        }
    }
}

fn cells(piece: &DirtyPiece) -> Vec<(u64, Cell)> {
    let whats: Vec<What> = match &piece.entry.content {
        Content::Unmapped => vec![What::Unmapped; piece.entry.blocks as usize],
        Content::Zero => vec![What::Zero; piece.entry.blocks as usize],
        Content::Data(slice, sums) => {
            assert_eq!(slice.len() as u64, piece.entry.blocks * BLOCK_SIZE as u64);
            assert_eq!(sums.as_slice().len() as u64, piece.entry.blocks);
            let blocks = slice.chunks_exact(BLOCK_SIZE);
            assert!(
                blocks.clone().map(crate::checksum).eq(sums.as_slice().iter().copied()),
                "checksums of other blocks"
            );
            blocks.map(|block| What::Data(u32::from_le_bytes(block[..4].try_into().unwrap()))).collect()
        }
    };
    let (stamp, claimed) = (piece.entry.stamp, piece.entry.claimed);
    (piece.logical..).zip(whats).map(|(at, what)| (at, Cell { stamp, claimed, what })).collect()
}

/// The numbers of claimed blocks and of blocks of data among the removed cells.
fn tally<'a>(gone: impl Iterator<Item = &'a Cell>) -> (u64, u64) {
    gone.fold((0, 0), |(claimed, data), cell| {
        (claimed + u64::from(cell.claimed), data + u64::from(matches!(cell.what, What::Data(_))))
    })
}

impl Model {
    fn newest(&mut self) -> &mut BTreeMap<u64, Cell> {
        &mut self.layers.back_mut().unwrap().0
    }

    fn is_empty(&self) -> bool {
        self.layers.len() == 1 && self.layers[0].0.is_empty()
    }

    fn compare(&self, layers: &Layers) {
        assert_eq!(layers.is_empty(), self.is_empty());
        assert_eq!(layers.iter().count(), self.layers.len());
        for (layer, (model, snapshot)) in layers.iter().zip(&self.layers) {
            let pieces = layer.take(0, u64::MAX);
            let found: Vec<(u64, Cell)> = pieces.iter().flat_map(cells).collect();
            assert!(found.iter().map(|(at, cell)| (at, cell)).eq(model.iter()), "a layer differs");
            assert_eq!((layer.len(), layer.is_empty()), (pieces.len(), model.is_empty()));
            assert_eq!(layer.data_blocks, tally(model.values()).1);
            assert_eq!(layer.snapshot, *snapshot);
        }
    }
}

fn overlay(layers: &Layers, model: &Model, range: Range<u64>) {
    let mut pieces = Vec::new();
    let mut gaps = Vec::new();
    gaps.push(77..99);
    layers.overlay(range.clone(), &mut pieces, &mut gaps);
    let mut found: Vec<(u64, Option<Cell>)> =
        pieces.iter().flat_map(cells).map(|(at, cell)| (at, Some(cell))).collect();
    found.extend(gaps.into_iter().flatten().map(|at| (at, None)));
    found.sort_unstable_by_key(|(at, _)| *at);
    let newest = |at: u64| model.layers.iter().rev().find_map(|(layer, _)| layer.get(&at).copied());
    let expected: Vec<(u64, Option<Cell>)> = range.map(|at| (at, newest(at))).collect();
    assert_eq!(found, expected);
}

#[test]
fn buffer_layers_equal_a_model() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let mut layers = Layers::default();
        let mut model = Model { layers: VecDeque::from([Default::default()]) };
        let (mut stamp, mut snapshot, mut changes) = (0, 0, 0);
        for _ in 0..120 {
            let logical = random.below(SPAN);
            let blocks = 1 + random.below(SPAN - logical);
            let range = logical..logical + blocks;
            match random.below(100) {
                0..55 => {
                    stamp += 1;
                    let claimed = random.percent(50);
                    let (content, whats) = contents(&mut random, blocks);
                    let entry = DirtyEntry { blocks, content, stamp, claimed, covered: true };
                    changes += entry.content.changes(blocks);
                    changes += if layers.cuts_discard(&range) { DISCARD_CHANGES } else { 0 };
                    let gone = layers.insert(logical, entry);
                    changes -= gone.changes;
                    let replaced: Vec<Cell> = (logical..)
                        .zip(whats)
                        .filter_map(|(at, what)| model.newest().insert(at, Cell { stamp, claimed, what }))
                        .collect();
                    assert_eq!((gone.claimed, gone.data), tally(replaced.iter()));
                }
                55..65 => {
                    // Write-back has written an entry: the parts of it that no newer write has replaced are removed.
                    let oldest = &mut model.layers[0].0;
                    let Some((_, cell)) = oldest.range(logical..).next() else { continue };
                    let done = cell.stamp;
                    let mine = |at: &u64, cell: &Cell| range.contains(at) && cell.stamp == done;
                    let gone = tally(oldest.iter().filter(|(at, cell)| mine(at, cell)).map(|(_, cell)| cell));
                    let (layer, closed) = layers.oldest();
                    if layer.cuts_discard(&range) {
                        // Write-back removes discards from one end.
                        continue;
                    }
                    oldest.retain(|at, cell| !mine(at, cell));
                    let removed = layer.remove(logical, blocks, done);
                    assert_eq!((removed.claimed, removed.data), gone);
                    assert_eq!(layer.still(&range, done), None);
                    changes -= removed.changes;
                    assert_eq!(closed, model.layers.len() > 1);
                }
                65..72 => {
                    snapshot += 1;
                    let waits = !model.is_empty();
                    assert_eq!(layers.close(snapshot), waits);
                    if waits {
                        model.layers.back_mut().unwrap().1 = Some(snapshot);
                        model.layers.push_back(Default::default());
                    }
                }
                72..80 => {
                    // Write-back moves all entries of the oldest layer into the map, which completes its snapshot.
                    let (layer, closed) = layers.oldest();
                    for piece in layer.take(0, u64::MAX) {
                        changes -= layer.remove(piece.logical, piece.entry.blocks, piece.entry.stamp).changes;
                    }
                    assert!(layer.is_empty());
                    model.layers[0].0.clear();
                    let expected = if closed { model.layers.pop_front().unwrap().1 } else { None };
                    assert_eq!(layers.retire(), expected);
                    assert_eq!(expected.is_some(), closed);
                }
                80..82 => {
                    let gone = tally(model.layers.iter().flat_map(|(layer, _)| layer.values()));
                    let cleared = layers.clear();
                    assert_eq!((cleared.claimed, cleared.data), gone);
                    changes -= cleared.changes;
                    model = Model { layers: VecDeque::from([Default::default()]) };
                }
                82..90 => {
                    let most = 1 + random.below(20);
                    let pieces = layers.oldest().0.take(logical, most);
                    let data: u64 = pieces
                        .iter()
                        .map(|piece| if let Content::Data(..) = piece.entry.content { piece.entry.blocks } else { 0 })
                        .sum();
                    let last = pieces.last().map_or(0, |piece| piece.entry.blocks);
                    assert!(data < most + last && pieces.len() as u64 <= most);
                    assert!(pieces.iter().all(|piece| piece.logical >= logical));
                }
                _ => overlay(&layers, &model, range),
            }
            if !model.layers[0].0.is_empty() || model.layers.len() == 1 {
                // A closed layer is retired only when it is empty.
                assert_eq!(layers.retire(), None);
            }
            model.compare(&layers);
            // The changes reserved for entries equal those that are released with them, however the entries were cut.
            let entries = layers.iter().flat_map(|layer| layer.entries.values());
            assert_eq!(changes, entries.map(|entry| entry.content.changes(entry.blocks)).sum::<u64>());
        }
        overlay(&layers, &model, 0..SPAN);
    }
}

#[test]
fn a_partial_overwrite_starts_again_after_a_concurrent_write() {
    let mut layers = Layers::default();
    let write = |layers: &mut Layers, logical: u64, blocks: u64| {
        layers.insert(
            logical,
            DirtyEntry { blocks, content: Content::Unmapped, stamp: 1, claimed: false, covered: true },
        );
    };
    assert!(layers.begin_partial(5));
    assert!(!layers.begin_partial(5), "one at a time");
    assert!(layers.begin_partial(6));
    write(&mut layers, 0, 5);
    write(&mut layers, 6, 10);
    assert!(layers.end_partial(5));
    assert!(!layers.end_partial(6), "block 6 was written while it was being read");
    assert!(!layers.end_partial(5), "it has ended");
    assert!(layers.begin_partial(5) && layers.begin_partial(6));
}

#[test]
fn a_run_is_mapped_to_its_file_and_offset() {
    let file = crate::FILE_BLOCKS;
    assert_eq!(place(Run { start: 0, blocks: 2 }), (0, 0, 8192));
    assert_eq!(place(Run { start: file - 1, blocks: 1 }), (0, (file - 1) * 4096, 4096));
    assert_eq!(place(Run { start: 3 * file + 7, blocks: 1 }), (3, 7 * 4096, 4096));
}
