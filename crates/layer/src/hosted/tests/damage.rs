//! Reads avoid damaged copies and report them; invalid images are refused or fail, in bounded time and memory.

use super::*;
use crate::proving::{damages, failing_at_a_flush, memory_file, memory_since, mutate, pattern, peak_memory};
use std::sync::atomic::{AtomicU32, Ordering};

/// A closed image of the small geometry with data, and its content.
fn image(zero_grains: bool) -> (Vec<u8>, Vec<u8>) {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let capacity = 70 * GRAIN;
    let file = small(disk.directory().as_ref(), capacity, zero_grains);
    let layer = open(&file, true, true).unwrap();
    let mut model = vec![0; capacity as usize];
    for (at, range) in [0..5, 14..20, 33..34, 60..70].into_iter().enumerate() {
        let bytes = pattern(at as u64, (range.end - range.start) * GRAIN as usize);
        layer.write(range.start as u64 * GRAIN, &[&bytes]).unwrap();
        model[range.start * GRAIN as usize..range.end * GRAIN as usize].copy_from_slice(&bytes);
    }
    layer.zero(2 * GRAIN..3 * GRAIN, false).unwrap();
    model[2 * GRAIN as usize..3 * GRAIN as usize].fill(0);
    layer.close().unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    (bytes, model)
}

#[test]
fn the_redundant_directory_is_used_with_a_warning() {
    let (bytes, model) = image(true);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let directory = (header.directory_offset * SECTOR) as usize;
    let table = u32::from_le_bytes(bytes[directory..directory + 4].try_into().unwrap()) as usize * SECTOR as usize;
    let cases: [(&str, usize, u32); 4] = [
        ("a table outside the file", directory, 0x00ff_ffff),
        ("no table", directory + 4, 0),
        ("a grain outside the file", table + 8, 0x7fff_ffff),
        ("the directory itself", 56, 0x00ff_ffff),
    ];
    for (what, at, word) in cases {
        let mut damaged = bytes.clone();
        damaged[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let file = memory_file(&damaged);
        let layer = open(&file, false, true).unwrap();
        assert_eq!(read_all(&layer, None), model, "{what}");
        assert!(!layer.warnings().is_empty(), "{what}");
    }
    // The sectors of the primary table cannot be read; writing repairs the table.
    let disk = SimulatedDisk::new(2, SimulatedOptions::default());
    let file = disk.directory().create("disk.vmdk", IoMode::Buffered).unwrap();
    file.write_at(&[&bytes], 0, true).unwrap();
    disk.fail_reads("disk.vmdk", table as u64..table as u64 + 1).unwrap();
    let layer = open(&file, true, true).unwrap();
    assert_eq!(read_all(&layer, None), model);
    assert!(!layer.warnings().is_empty());
    layer.write(0, &[&model[..GRAIN as usize]]).unwrap();
    layer.zero(GRAIN..2 * GRAIN, false).unwrap();
    layer.close().unwrap();
    let layer = open(&file, false, true).unwrap();
    let check = layer.check().unwrap();
    assert!(check.is_sound() && layer.warnings().is_empty(), "{check:?}");
}

/// Neither copy of the first table can be read.
#[test]
fn a_discard_that_cannot_read_a_table_stops_no_writes_elsewhere() {
    let (bytes, model) = image(false);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let tables = [header.directory_offset, header.redundant_offset].map(|at| word((at * SECTOR) as usize));
    let disk = SimulatedDisk::new(2, SimulatedOptions::default());
    let file = disk.directory().create("disk.vmdk", IoMode::Buffered).unwrap();
    file.write_at(&[&bytes], 0, true).unwrap();
    let layer = open(&file, true, true).unwrap();
    for table in tables.map(|table| u64::from(table) * SECTOR) {
        disk.fail_reads("disk.vmdk", table..table + 1).unwrap();
    }
    assert_eq!(layer.zero(0..GRAIN, false).unwrap_err().kind(), ErrorKind::Io);
    let last = (model.len() as u64 - 1) / GRAIN * GRAIN;
    let content = vec![9; model.len() - last as usize];
    layer.write(last, &[&content]).unwrap();
    layer.flush().unwrap();
    assert!(read(&layer, last..model.len() as u64, None).unwrap() == content);
}

#[test]
fn an_extent_with_sectors_used_twice_is_not_written() {
    let (bytes, _) = image(false);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let tables = [header.directory_offset, header.redundant_offset].map(|at| word((at * SECTOR) as usize));
    for name_of in [word(tables[0] as usize * SECTOR as usize), header.overhead as u32 + 3] {
        let mut lying = bytes.clone();
        for table in tables {
            let at = table as usize * SECTOR as usize + 4 * 7;
            lying[at..at + 4].copy_from_slice(&name_of.to_le_bytes());
        }
        let file = memory_file(&lying);
        assert!(open(&file, false, false).unwrap().check().unwrap().shared > 0);
        let error = open(&file, true, false).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let mut after = vec![0; lying.len()];
        file.read_at(&mut after, 0).unwrap();
        assert!(after == lying, "refused before anything was changed");
    }
}

/// If the file grew, the entries would name new grains.
#[test]
fn an_extent_with_entries_after_its_end_is_not_written() {
    let (bytes, model) = image(false);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let directories = [header.directory_offset, header.redundant_offset].map(|at| (at * SECTOR) as usize);
    let entries = directories.map(|at| word(at) as usize * SECTOR as usize + 4 * 7);
    let after = (bytes.len() as u64 / SECTOR).next_multiple_of(GRAIN / SECTOR) as u32 + 8;
    for (places, lost) in [(entries, 7..8), (directories.map(|at| at + 4), 16..32)] {
        let mut cut = bytes.clone();
        places.iter().for_each(|at| cut[*at..at + 4].copy_from_slice(&after.to_le_bytes()));
        let file = memory_file(&cut);
        let reader = open(&file, false, false).unwrap();
        assert_eq!(reader.check().unwrap().outside, 1, "{lost:?}");
        assert!(read(&reader, lost.start * GRAIN..lost.end * GRAIN, None).is_err());
        let whole = 33 * GRAIN..34 * GRAIN;
        let found = read(&reader, whole.clone(), None).unwrap();
        assert!(found == model[whole.start as usize..whole.end as usize]);
        let error = open(&file, true, false).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("converted to a new image with --skip-damaged"), "{error}");
        let mut left = vec![0; cut.len()];
        file.read_at(&mut left, 0).unwrap();
        assert!(left == cut, "refused before anything was changed");
        // One copy after the end is damage that the other copy corrects.
        cut[places[0]..places[0] + 4].copy_from_slice(&bytes[places[0]..places[0] + 4]);
        let layer = open(&memory_file(&cut), true, false).unwrap();
        assert_eq!(read_all(&layer, None), model);
        assert!(layer.check().unwrap().is_sound());
    }
}

#[test]
fn changed_line_ends_and_invalid_headers_are_reported() {
    let (bytes, _) = image(false);
    let with = |at: usize, field: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        open(&memory_file(&bytes), false, false).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(with(73, b"\n \n\n").contains("as text"));
    assert!(with(0, b"kdmv").contains("never finished"));
    assert!(with(4, &[9]).contains("version is 9"));
    assert!(with(8, &[3, 0, 8, 0]).contains("unknown"));
    assert!(with(12, &u64::MAX.to_le_bytes()).contains("64 TiB"));
    assert!(with(12, &0u64.to_le_bytes()).contains("capacity is 0"));
    assert!(with(20, &7u64.to_le_bytes()).contains("grain"));
    assert!(with(44, &0u32.to_le_bytes()).contains("entries"));
    assert!(with(64, &u64::MAX.to_le_bytes()).contains("was truncated"));
    let cut = open(&memory_file(&bytes[..3000]), false, false).err().unwrap();
    assert_eq!(cut.kind(), ErrorKind::Corrupt, "{cut}");
}

#[test]
fn mutated_images_cause_errors_and_no_panic() {
    let images = [image(false).0, image(true).0];
    let header = super::super::read_header(memory_file(&images[0]).as_ref()).unwrap();
    let metadata = 512 * header.redundant_offset as usize..512 * header.overhead as usize;
    let weak = [0..80, 0..80, metadata.clone(), metadata];
    let start = std::time::Instant::now();
    let memory = peak_memory();
    for seed in damages() {
        let mut random = Random::new(seed);
        let mut bytes = images[(seed % 2) as usize].clone();
        mutate(&mut random, &mut bytes, &weak);
        let file = memory_file(&bytes);
        let writable = seed % 4 == 0;
        let Ok(layer) = open(&file, writable, random.percent(50)) else { continue };
        let capacity = layer.capacity();
        let mut extents = Vec::new();
        let _ = layer.map(0..capacity, 64, &mut extents);
        let end = capacity.min(70 * GRAIN);
        let _ = read(&layer, 0..end / SECTOR * SECTOR, None);
        let _ = layer.check();
        if writable && layer.grain() <= 1 << 20 {
            let grain = layer.grain();
            let first = random.below(capacity / grain + 1) * grain;
            let length = grain.min(capacity - first) as usize;
            let _ = layer.write(first, &[&pattern(seed, length)]);
            let _ = layer.zero(first..(first + length as u64), random.percent(50));
            let _ = layer.close();
        }
    }
    assert!(memory_since(memory) < 1 << 30, "{} bytes more", memory_since(memory));
    assert!(start.elapsed().as_secs() < 600, "{:?}", start.elapsed());
}

/// A read that fails once while an image is opened for writing and used does not make the two directories differ.
#[test]
fn after_a_failed_read_both_directories_stay_equal() {
    let (bytes, _) = image(true);
    let (mut refused, mut used) = (0, 0);
    for read in 0..24 {
        let disk = SimulatedDisk::new(read, SimulatedOptions::default());
        let file = disk.directory().create("disk.vmdk", IoMode::Buffered).unwrap();
        file.write_at(&[&bytes], 0, true).unwrap();
        disk.fail_reads_after(read, 1);
        match open(&file, true, true) {
            Ok(layer) => {
                for grain in (0..70).step_by(9) {
                    let _ = layer.write(grain * GRAIN, &[&[7; GRAIN as usize]]);
                    let _ = layer.zero((grain + 1) * GRAIN..(grain + 2) * GRAIN, false);
                }
                used += 1;
                disk.mend();
                let _ = layer.close();
            }
            Err(_) => {
                refused += 1;
                disk.mend();
            }
        }
        let check = open(&file, false, true).unwrap().check().unwrap();
        assert!(check.is_sound(), "read {read}: {check:?}");
    }
    assert!(refused > 2 && used > 10, "{refused} {used}");
}

/// The figures of a disk are counted by the same scan as a check.
#[test]
fn a_repair_is_reported_by_the_next_check_and_not_lost_with_figures() {
    let (mut bytes, model) = image(true);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let directory = (header.directory_offset * SECTOR) as usize;
    let table = u32::from_le_bytes(bytes[directory..directory + 4].try_into().unwrap()) as usize * SECTOR as usize;
    bytes[table + 8..table + 12].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    let layer = open(&memory_file(&bytes), true, true).unwrap();
    assert!(layer.usage().unwrap().mapped > 0);
    let check = layer.check().unwrap();
    assert_eq!((check.repaired, check.mended.len()), (1, 1), "{check:?}");
    assert_eq!(layer.check().unwrap().repaired, 0, "reported already");
    assert_eq!(read_all(&layer, None), model);
}

#[test]
fn an_image_stops_if_a_flush_of_a_repair_fails() {
    const FAILING: u32 = 1000;
    let (bytes, _) = image(true);
    let header = super::super::read_header(memory_file(&bytes).as_ref()).unwrap();
    let directory = (header.directory_offset * SECTOR) as usize;
    let table = u64::from(u32::from_le_bytes(bytes[directory..directory + 4].try_into().unwrap())) * SECTOR;
    // The flush of the commit before the repair, and the two of the repair.
    for before in 0..3 {
        let (inner, count) = (memory_file(&bytes), Arc::new(AtomicU32::new(0)));
        let layer = open(&failing_at_a_flush(Arc::clone(&inner), Arc::clone(&count), FAILING), true, true).unwrap();
        inner.write_at(&[&0x7fff_ffff_u32.to_le_bytes()], table + 8, true).unwrap();
        count.store(FAILING - 1 - before, Ordering::SeqCst);
        assert_eq!(layer.repair().unwrap_err().kind(), ErrorKind::Io, "after {before} flushes");
        assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped, "after {before} flushes");
    }
}
