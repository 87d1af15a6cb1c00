//! Tests of the pack format: round trips, limits, and damage.

#![allow(clippy::unwrap_used)]

use super::*;
use testkit::Random;

const ID: [u8; 16] = [7; 16];

fn chunk(number: u32, runs: &[(u8, u8)], random: &mut Random, compressible: bool) -> (Chunk, Vec<u8>) {
    let runs: Vec<BlockRun> = runs.iter().map(|(first, last)| BlockRun { first: *first, last: *last }).collect();
    let length = runs.iter().map(|run| run.blocks()).sum::<usize>() * BLOCK_SIZE;
    let plain = if compressible { vec![random.next() as u8 | 1; length] } else { random.bytes(length) };
    let compressed = zstd::bulk::compress(&plain, 3).unwrap();
    let (codec, stored) =
        if compressed.len() < length { (Codec::Zstd, compressed) } else { (Codec::Plain, plain.clone()) };
    let sums = (checksum(&stored), checksum(&plain));
    let stored_length = stored.len() as u32;
    let chunk = Chunk { number, runs, codec, stored: stored_length, stored_sum: sums.0, plain_sum: sums.1, offset: 0 };
    (chunk, stored)
}

/// A pack of segments 2 to 8, with content in segments 2 and 4.
fn pack() -> (Head, Vec<u8>) {
    let mut random = Random::new(1);
    let mut builder = Builder::new(2);
    for (number, runs, compressible) in
        [(32, &[(0, 0), (3, 9), (255, 255)][..], false), (47, &[(0, 255)], true), (64, &[(1, 1)], true)]
    {
        let (chunk, stored) = chunk(number, runs, &mut random, compressible);
        builder.chunk(&chunk, &stored);
        if number == 47 {
            builder.zeros(Zeros { first: 2 * SEGMENT_BLOCKS + 1, blocks: 2 });
            builder.zeros(Zeros { first: 2 * SEGMENT_BLOCKS + 300, blocks: 1 });
        }
    }
    let pack = builder.finish(ID, 5, 8, None).unwrap();
    (pack.head, pack.bytes)
}

/// The pack with another index, whose checksums are right.
fn with_index(change: &dyn Fn(&mut Vec<u8>)) -> Result<Index> {
    let (head, bytes) = pack();
    let mut index = bytes[HEAD..HEAD + head.index as usize].to_vec();
    change(&mut index);
    let payload = &bytes[HEAD + head.index as usize..];
    let body = [&index[..], payload].concat();
    let head = Head {
        index: index.len() as u32,
        body: body.len() as u32,
        body_sum: checksum(&body),
        index_sum: checksum(&index),
        ..head
    };
    Head::decode(&head.encode())?.decode_body(&body, None).map(|(index, _)| index)
}

#[test]
fn a_pack_is_decoded_as_it_was_made() {
    let (head, bytes) = pack();
    assert_eq!(Head::decode(&bytes).unwrap(), head);
    assert_eq!((head.number, head.first, head.end, head.length()), (5, 2, 8, bytes.len() as u64));
    let index = head.decode_body(&bytes[HEAD..], None).unwrap().0;
    assert_eq!(index.keys().copied().collect::<Vec<_>>(), [2, 4]);
    assert_eq!(index[&2].zeros.iter().map(|zeros| zeros.blocks).collect::<Vec<_>>(), [2, 1]);
    let mut blocks = 0;
    for chunk in index.values().flat_map(|content| &content.chunks) {
        let stored = &bytes[chunk.offset as usize..(chunk.offset + u64::from(chunk.stored)) as usize];
        assert_eq!(unpack(chunk, stored).unwrap().len(), chunk.blocks() * BLOCK_SIZE);
        blocks += chunk.blocks();
        let mut bad = stored.to_vec();
        bad[0] ^= 1;
        assert_eq!(unpack(chunk, &bad).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    assert_eq!(blocks, 9 + 256 + 1);
    assert_eq!(with_index(&|_| {}).unwrap(), index);
}

#[test]
fn every_damaged_byte_is_found() {
    let (_, good) = pack();
    let mut random = Random::new(2);
    let decode = |bytes: &[u8]| {
        Head::decode(bytes).and_then(|head| head.decode_body(&bytes[HEAD..], None).map(|(index, _)| index))
    };
    let places = (0..HEAD + 100).chain((0..300).map(|_| random.index(good.len()))).collect::<Vec<_>>();
    for at in places {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        assert_eq!(decode(&bad).unwrap_err().kind(), ErrorKind::Corrupt, "byte {at}");
    }
    for length in [0, 1, HEAD - 1, HEAD, HEAD + 40, good.len() - 1] {
        assert!(decode(&good[..length]).is_err(), "{length}");
    }
    let (head, _) = pack();
    let mut newer = head.encode();
    newer[8] = 2;
    let sum = checksum(&newer[..60]);
    newer[60..].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Head::decode(&newer).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn an_index_that_contradicts_itself_is_refused() {
    // The entries: chunk 32 at 0 with 3 runs, chunk 47 at 26 with 1 run, zeros at 48 and 68, chunk 64 at 88.
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let changes: [(&str, Change<'_>); 16] = [
        ("an unknown kind", &|index| index[0] = 3),
        ("an unknown codec", &|index| index[1] = 2),
        ("no runs", &|index| index[2] = 0),
        ("more runs than bytes", &|index| index[3] = 1),
        ("a chunk before the pack", &|index| index[4] = 31),
        ("a chunk after the pack", &|index| index[88 + 4] = 128),
        ("chunks out of order", &|index| index[26 + 4] = 32),
        ("a stored length that is not the plain length", &|index| index[8] ^= 1),
        ("a run that ends before it begins", &|index| index[22] = 10),
        ("adjacent runs", &|index| index[22] = 1),
        ("a block of zeros that has data", &|index| index[48 + 4] = 0),
        ("zeros out of order", &|index| index[72..74].copy_from_slice(&[0, 0x20])),
        ("zeros beyond their segment", &|index| index[68 + 14] = 1),
        ("no zeros", &|index| index[68 + 12] = 0),
        ("reserved bytes", &|index| index[68 + 16] = 1),
        ("a cut entry", &|index| index.truncate(index.len() - 1)),
    ];
    for (what, change) in changes {
        assert_eq!(with_index(change).err().map(|error| error.kind()), Some(ErrorKind::Corrupt), "{what}");
    }
}
