//! Malicious images: every header field, table, bitmap and journal is changed at random. There must be no panic,
//! bounded time and memory, and no extent outside the file.

use super::super::DirtyJournal;
use super::super::entry::{Entry, Grain};
use super::*;
use crate::ErrorKind;
use crate::proving::damages;
use std::time::{Duration, Instant};

/// A small valid image with three tables, some zeros, and an empty journal.
fn honest() -> Vec<u8> {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    for (first, count, stamp) in [(0, 20, 1), (2 * 4096 + 500, 30, 2), (6 * 4096, 5, 3)] {
        layer.write(first * GRAIN, &[&stamped(count, stamp)]).unwrap();
    }
    layer.zero(3 * GRAIN..6 * GRAIN, false).unwrap();
    layer.close().unwrap();
    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Numbers at the limits of checks.
fn nasty(random: &mut Random) -> u64 {
    let edges = [0, 1, 7, 8, 63, 64, 512, 2048, 4096, u64::from(u32::MAX), 1 << 32, 1 << 54, i64::MAX as u64, u64::MAX];
    match random.below(5) {
        0 => random.next(),
        1 => random.next() >> random.below(64),
        2 => 1 << random.below(64),
        3 => edges[random.below(edges.len() as u64) as usize].wrapping_add(random.below(3)).wrapping_sub(1),
        _ => (random.below(16) << 60) | random.below(40) << 48 | random.below(3),
    }
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Changes one field, or the length of the file. The area is chosen first: a random offset would mostly hit the tables.
fn lie(random: &mut Random, file: &MemoryFile) {
    let word = |at: u64, range: u64, random: &mut Random| at + random.below(range / 8) * 8;
    let at = match random.below(16) {
        0..4 => word(0, 208, random),
        4 => word(0, 512, random),
        5 => word(512, 512, random),
        6 => word(512, 32, random),
        7 => word(1024, 1024, random),
        8..10 => word(4096 * 512, 64, random),
        10..13 => word(6144 * 512, 3 * 32768, random),
        13 => word(8192 * 512, 16, random),
        14 => word(10240 * 512, 512, random),
        _ => {
            let length = nasty(random).min(64 * MIB);
            file.set_len(length).unwrap();
            return;
        }
    };
    file.write_at(&[&nasty(random).to_le_bytes()], at, false).unwrap();
}

/// Opens an image and uses it as far as possible.
fn exercise(file: Arc<MemoryFile>, write: bool, deep: bool) {
    let options = Options { write, journal: DirtyJournal::Replay, cache: 0, ..Options::default() };
    let Ok(layer) = SeSparse::open(Arc::clone(&file) as Arc<dyn File>, NAME, options) else { return };
    let capacity = layer.capacity();
    for at in [0, 2 * 16 * MIB + 400 * GRAIN, 6 * 16 * MIB, capacity / 2 / GRAIN * GRAIN] {
        let end = (at + 4 * MIB).min(capacity);
        let mut out = Vec::new();
        if at < end && layer.map(at..end, 20, &mut out).is_ok() {
            for extent in &out {
                if let Content::Data { offset, .. } = extent.content {
                    assert!(offset < file.len().unwrap(), "{extent:?}");
                }
            }
        }
    }
    let _ = layer.usage();
    if write {
        let data = stamped(3, 7);
        for at in [0, GRAIN, 4 * 16 * MIB] {
            if at + 3 * GRAIN <= capacity && layer.write(at, &[&data]).is_ok() {
                assert_eq!(stamps(&layer, at, 3 * GRAIN).unwrap(), [7; 24]);
            }
        }
        let _ = layer.zero(0..GRAIN.min(capacity), false);
        let _ = layer.flush();
    }
    if deep {
        let started = Instant::now();
        let watch = steps(|_, _| started.elapsed() < Duration::from_millis(50));
        let _ = layer.check(write, &watch);
        if write {
            let _ = layer.wipe(true, &watch);
            let _ = layer.shrink(&watch);
        }
    }
    let _ = layer.close();
}

#[test]
fn wrong_header_fields_cause_errors_and_no_panic() {
    let base = Arc::new(honest());
    let mut slowest = (Duration::ZERO, 0);
    for number in damages() {
        let mut random = Random::new(number);
        let file = Arc::new(MemoryFile::over(Arc::clone(&base)));
        for _ in 0..1 + random.below(3) {
            lie(&mut random, &file);
        }
        let begun = Instant::now();
        exercise(file, number % 2 == 0, number % 50 < 2);
        slowest = slowest.max((begun.elapsed(), number));
    }
    assert!(slowest.0 < Duration::from_secs(5), "one took {slowest:?}");
}

/// Opens a copy of the valid image with some words changed.
fn opened(changes: &[(u64, u64)], write: bool) -> Result<SeSparse> {
    let file = MemoryFile::over(Arc::new(honest()));
    for (at, value) in changes {
        file.write_at(&[&value.to_le_bytes()], *at, false).unwrap();
    }
    SeSparse::open(Arc::new(file), NAME, Options { write, ..Options::default() })
}

#[test]
fn images_that_qemu_refuses_are_refused() {
    assert!(opened(&[], true).is_ok());
    let cases: [(u64, u64, &str); 24] = [
        (0, 1, "magic"),
        (8, 0x1_0000_0001, "version"),
        (16, 0, "no capacity"),
        (16, 1 << 40, "a capacity of 512 TiB"),
        (24, 16, "grain size"),
        (32, 128, "table size"),
        (40, 1, "flags"),
        (48, 1, "reserved"),
        (72, 1, "reserved"),
        (208, 1, "padding"),
        (504, 1, "padding"),
        (128, 0, "a directory that overlaps the headers"),
        (128, 1 << 60, "a directory beyond everything"),
        (136, 0, "an empty directory"),
        (144, 4096, "tables that overlap the directory"),
        (152, 32, "half a table"),
        (152, u64::MAX, "tables of unlimited length"),
        (160, 6200, "a bitmap within the tables"),
        (192, 1 << 50, "grains beyond the file"),
        (80, 0, "a volatile header over the constant one"),
        (512, 0xcafe_babe, "volatile magic"),
        (520, 1 << 20, "more tables allocated than the area holds"),
        (544, 1, "volatile padding"),
        (536, 1, "a dirty journal"),
    ];
    for (at, value, what) in cases {
        for write in [false, true] {
            let error = opened(&[(at, value)], write).err().unwrap_or_else(|| panic!("{what} was accepted"));
            let kind = if at == 536 { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
            assert_eq!(error.kind(), kind, "{what}: {error}");
        }
    }
}

#[test]
fn damaged_tables_cause_errors_only_for_their_ranges() {
    const SLOTS: u64 = 4096 * 512;
    const TABLE: u64 = 6144 * 512;
    for raw in [5, 4 << 60, u64::MAX, 3 << 60 | 1 << 40, 0x3000_0000_0000_0001] {
        let layer = opened(&[(TABLE + 80, raw)], false).unwrap();
        assert_eq!(stamps(&layer, 0, 3 * GRAIN).unwrap(), [1; 24]);
        let mut out = Vec::new();
        layer.map(6 * GRAIN..20 * GRAIN, 9, &mut out).unwrap();
        assert_eq!((out.len(), out[0].length), (1, 4 * GRAIN), "up to the damage");
        assert_eq!(layer.map(10 * GRAIN..11 * GRAIN, 9, &mut out).unwrap_err().kind(), ErrorKind::Corrupt);
        let report = layer.check(false, &NoProgress).unwrap();
        assert!(report.is_damaged() && report.invalid + report.outside == 1, "{report:?}");
    }
    for raw in [1, 0x1000_0001_0000_0000, 0x1000_0000_ffff_ffff] {
        assert_eq!(opened(&[(SLOTS, raw)], true).err().unwrap().kind(), ErrorKind::Corrupt);
        let layer = opened(&[(SLOTS, raw)], false).unwrap();
        assert_eq!(layer.map(0..GRAIN, 9, &mut Vec::new()).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(layer.check(false, &NoProgress).unwrap().invalid, 1);
    }
    // Two slots name one table: it can be read, but not written.
    assert!(opened(&[(SLOTS, 0x1000_0000_0000_0001)], true).is_err());
    let shared = opened(&[(SLOTS, 0x1000_0000_0000_0001)], false).unwrap();
    assert!(shared.check(false, &NoProgress).unwrap().is_damaged());
    // Two entries name one grain.
    let overlap = opened(&[(TABLE, 0x3001_0000_0000_0000)], false).unwrap();
    assert_eq!(overlap.check(false, &NoProgress).unwrap().overlapping, 1);
}

#[test]
fn bitmap_and_backmap_are_repaired_from_the_tables() {
    const BITMAP: u64 = 8192 * 512;
    const BACKMAP: u64 = 10240 * 512;
    let layer = opened(&[(BITMAP, 0xff00_0000_0000_fff0), (BACKMAP + 8, 0x1000_0000_0000_0005)], true).unwrap();
    let report = layer.check(false, &NoProgress).unwrap();
    assert!(!report.is_damaged());
    assert!(report.unallocated > 10 && report.misowned == 1 && report.unnamed > 1, "{report:?}");
    let repaired = layer.check(true, &NoProgress).unwrap();
    assert_eq!(repaired.repaired, report.unallocated + report.misowned + report.unnamed);
    assert_clean(&layer);
    assert_eq!(stamps(&layer, 0, 3 * GRAIN).unwrap(), [1; 24]);
}

#[test]
fn an_image_of_another_program_is_appended_to_until_it_is_wiped() {
    // lamina's mark is removed, the bitmap is meaningless, and the backmap has directory slots instead of tables.
    let mut bytes = honest();
    put(&mut bytes, 1056, 0x6c61_7473_6e49_2063);
    bytes[8192 * 512..8192 * 512 + 64].fill(0);
    put(&mut bytes, 8192 * 512 + 8, u64::MAX);
    for grain in 0..60 {
        put(&mut bytes, 10240 * 512 + grain * 8, 0x1000_0000_0000_0006);
    }
    let grains = (bytes.len() as u64 - 12288 * 512) / GRAIN;
    let file: Arc<dyn File> = Arc::new(MemoryFile::over(Arc::new(bytes)));
    let layer = SeSparse::open(Arc::clone(&file), NAME, writing()).unwrap();
    let before = stamps(&layer, 0, 20 * GRAIN).unwrap();
    layer.write(16 * MIB, &[&stamped(30, 9)]).unwrap();
    let Content::Data { offset, .. } = map_all(&layer, 16 * MIB, GRAIN).unwrap()[0].content else { panic!() };
    assert_eq!(offset, 12288 * 512 + grains * GRAIN, "at the end");
    assert_eq!(layer.shrink(&NoProgress).unwrap_err().kind(), ErrorKind::Unsupported);
    let report = layer.wipe(false, &NoProgress).unwrap();
    assert!(report.repaired >= 52 && report.unnamed > 0, "{report:?}");
    assert_clean(&layer);
    layer.shrink(&NoProgress).unwrap();
    layer.close().unwrap();
    let layer = SeSparse::open(Arc::clone(&file), NAME, writing()).unwrap();
    assert_eq!(stamps(&layer, 0, 20 * GRAIN).unwrap(), before);
    assert_eq!(stamps(&layer, 16 * MIB, 30 * GRAIN).unwrap(), [9; 240]);
    assert_clean(&layer);
    assert_eq!(file.len().unwrap(), 12288 * 512 + (52 + 30) * GRAIN);
}

#[test]
fn images_with_grains_in_use_after_the_end_of_the_file_are_not_written() {
    /// The third table, of the part at 96 MiB.
    const TABLE: u64 = 6144 * 512 + 2 * 32768;
    // Of a grain that is cut in the middle, nothing is read in an image of lamina.
    for (ours, cut) in [(true, 5 * GRAIN), (true, 5 * GRAIN - 512), (false, 5 * GRAIN)] {
        let mut bytes = honest();
        if !ours {
            put(&mut bytes, 1056, 0x6c61_7473_6e49_2063);
        }
        bytes.truncate(bytes.len() - cut as usize);
        let file: Arc<dyn File> = Arc::new(MemoryFile::over(Arc::new(bytes)));
        let refused = SeSparse::open(Arc::clone(&file), NAME, writing()).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
        assert!(refused.to_string().contains("truncated"), "{refused}");
        let reader = SeSparse::open(Arc::clone(&file), NAME, Options::default()).unwrap();
        assert_eq!(stamps(&reader, 0, 3 * GRAIN).unwrap(), [1; 24]);
        let lost = reader.map(96 * MIB..96 * MIB + GRAIN, 9, &mut Vec::new());
        assert_eq!(lost.unwrap_err().kind(), ErrorKind::Corrupt);
        drop(reader);
        let layer = SeSparse::open(Arc::clone(&file), NAME, Options { repair: true, ..writing() }).unwrap();
        assert_eq!(layer.check(true, &NoProgress).unwrap().outside, 5);
        layer.close().unwrap();
        // A crash leaves allocated grains after the end too, but no entry names them.
        file.write_at(&[&[0; 5 * 8]], TABLE, false).unwrap();
        let layer = SeSparse::open(Arc::clone(&file), NAME, writing()).unwrap();
        layer.write(96 * MIB, &[&stamped(5, 8)]).unwrap();
        assert_eq!(stamps(&layer, 96 * MIB, 5 * GRAIN).unwrap(), [8; 40]);
        assert_eq!(stamps(&layer, 0, 3 * GRAIN).unwrap(), [1; 24]);
    }
}

#[test]
fn zeros_in_place_of_an_entry_after_the_end_of_the_file_change_no_other_data() {
    const TABLE: u64 = 6144 * 512;
    // Its owner would be after the backmap: in the first grain of the file.
    let entry = Entry::Data(Grain(256 * 512 + 5)).encode();
    for keep in [false, true] {
        let file: Arc<dyn File> = Arc::new(MemoryFile::over(Arc::new(honest())));
        file.write_at(&[&entry.to_le_bytes()], TABLE + 10 * 8, false).unwrap();
        let layer = SeSparse::open(Arc::clone(&file), NAME, writing()).unwrap();
        layer.zero(10 * GRAIN..11 * GRAIN, keep).unwrap();
        layer.close().unwrap();
        let layer = SeSparse::open(file, NAME, Options::default()).unwrap();
        assert_eq!(stamps(&layer, 0, 3 * GRAIN).unwrap(), [1; 24]);
        assert_eq!(stamps(&layer, 10 * GRAIN, GRAIN).unwrap(), [0; 8]);
    }
}

#[test]
fn the_file_is_not_truncated_before_grains_that_only_the_bitmap_marks_as_free() {
    const BITMAP: u64 = 8192 * 512;
    for shrink in [false, true] {
        let file: Arc<dyn File> = Arc::new(MemoryFile::over(Arc::new(honest())));
        let length = file.len().unwrap();
        let mut bits = [0; 8];
        file.read_at(&mut bits, BITMAP).unwrap();
        // The last two of 55 grains.
        let bits = u64::from_le_bytes(bits) & !(3 << 53);
        file.write_at(&[&bits.to_le_bytes()], BITMAP, false).unwrap();
        let layer = SeSparse::open(Arc::clone(&file), NAME, writing()).unwrap();
        if shrink {
            layer.shrink(&NoProgress).unwrap();
        }
        layer.close().unwrap();
        assert_eq!(file.len().unwrap(), length);
        let layer = SeSparse::open(file, NAME, writing()).unwrap();
        assert_eq!(stamps(&layer, 96 * MIB, 5 * GRAIN).unwrap(), [3; 40]);
        assert_eq!(layer.check(true, &NoProgress).unwrap().repaired, 2);
        assert_clean(&layer);
    }
}
