//! Streams of other programs: directory and tables before the grains, and grains without markers.

use super::*;
use crate::hosted::header::{FLAG_COMPRESSED, FLAG_MARKERS, FLAG_NEWLINES, FLAG_REDUNDANT, Header};
use flate2::{Compress, Compression, FlushCompress};

fn deflated(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() * 2 + 1024);
    Compress::new(Compression::new(6), true).compress_vec(data, &mut out, FlushCompress::Finish).unwrap();
    out
}

/// The bytes before the compressed data of a grain.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Marker,
    Size,
    Nothing,
}

/// A stream with directory and tables at sector 21, as in Workstation's layout, and grains in any order; the last grain
/// is cut at the capacity, or whole.
fn preallocated(model: &[u8], before: Before, redundant: bool, whole_last: bool) -> Vec<u8> {
    let markers = if before == Before::Marker { FLAG_MARKERS } else { 0 };
    let capacity = model.len() as u64 / SECTOR;
    let header = Header {
        version: 3,
        flags: FLAG_NEWLINES | FLAG_COMPRESSED | markers | if redundant { FLAG_REDUNDANT } else { 0 },
        capacity,
        grain: 128,
        descriptor_offset: 1,
        descriptor_size: 20,
        table_entries: 512,
        redundant_offset: if redundant { 26 } else { 0 },
        directory_offset: 21,
        overhead: 128,
        unclean: false,
        compression: 1,
    };
    assert_eq!(header.directory_entries(), 1);
    let mut bytes = header.encode().to_vec();
    bytes.resize(128 * 512, 0);
    bytes[21 * 512..21 * 512 + 4].copy_from_slice(&22u32.to_le_bytes());
    bytes[26 * 512..26 * 512 + 4].copy_from_slice(&27u32.to_le_bytes());
    let mut grains: Vec<(usize, &[u8])> = model.chunks(GRAIN).enumerate().collect();
    grains.reverse();
    for (number, data) in grains {
        if data.iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut data = data.to_vec();
        if whole_last {
            data.resize(GRAIN, 0);
        }
        let sector = (bytes.len() / 512) as u32;
        for table in [22, 27] {
            let at = table * 512 + number * 4;
            bytes[at..at + 4].copy_from_slice(&sector.to_le_bytes());
        }
        let packed = deflated(&data);
        if before == Before::Marker {
            bytes.extend((number as u64 * 128).to_le_bytes());
        }
        if before != Before::Nothing {
            bytes.extend((packed.len() as u32).to_le_bytes());
        }
        bytes.extend(packed);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 512, 0);
    bytes
}

#[test]
fn streams_with_tables_before_grains_or_without_grain_markers() {
    for seed in 0..20 {
        let model = content(seed, (3 << 20) + seed as usize * 512);
        for before in [Before::Marker, Before::Size, Before::Nothing] {
            for (redundant, whole_last) in [(false, false), (true, true)] {
                let bytes = preallocated(&model, before, redundant, whole_last);
                let layer = Stream::open(memory_file(&bytes), "disk.vmdk").unwrap();
                assert!(read_all(&layer, None) == model, "seed {seed}");
                assert!(layer.warnings().is_empty(), "{:?}", layer.warnings());
            }
        }
    }
}

#[test]
fn the_redundant_tables_of_a_stream_are_used() {
    let model = content(5, 3 << 20);
    let mut bytes = preallocated(&model, Before::Marker, true, false);
    bytes[21 * 512..21 * 512 + 4].copy_from_slice(&0x00ff_ffffu32.to_le_bytes());
    let layer = Stream::open(memory_file(&bytes), "disk.vmdk").unwrap();
    assert!(read_all(&layer, None) == model);
    assert_eq!(layer.warnings().len(), 1);
}

#[test]
fn a_grain_that_decompresses_beyond_its_size_is_an_error() {
    let model = compressible(1, 2 * GRAIN);
    let mut bytes = preallocated(&model, Before::Marker, false, false);
    // 32 MiB of zeros compressed to 32 KiB, in place of a grain.
    let bomb = deflated(&vec![0; 32 << 20]);
    let sector = bytes.len() / 512;
    bytes[22 * 512 + 4..22 * 512 + 8].copy_from_slice(&(sector as u32).to_le_bytes());
    bytes.extend(128u64.to_le_bytes());
    bytes.extend((bomb.len() as u32).to_le_bytes());
    bytes.extend(bomb);
    let layer = Stream::open(memory_file(&bytes), "disk.vmdk").unwrap();
    let error = read(&layer, GRAIN as u64..2 * GRAIN as u64, None).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("more than a grain"), "{error}");
    assert!(read(&layer, 0..GRAIN as u64, None).unwrap() == model[..GRAIN]);
}
