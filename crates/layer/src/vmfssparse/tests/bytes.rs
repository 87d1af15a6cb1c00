//! The bytes of images equal those on the format's page.

use super::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use work::NoProgress;

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn sector(bytes: &[u8], sector: usize) -> &[u8] {
    &bytes[sector * 512..(sector + 1) * 512]
}

/// The worked example in docs/format/vmfssparse.md.
#[test]
fn a_created_image_equals_the_example_on_the_format_page() {
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(8195 * SECTOR)).unwrap();
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
    for lba in [0u64, 5, 4096, 8194] {
        layer.write(lba * SECTOR, &[&[lba as u8 + 1; 512]]).unwrap();
    }
    layer.write(8 * SECTOR, &[&[0x77; 4096]]).unwrap();
    let open = {
        let mut bytes = vec![0; 2048];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert_eq!(u32_at(&open, 1648), 1, "in use");
    layer.close().unwrap();

    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let mut header = [0u8; 2048];
    let fields = [(0, 0x4457_4f43), (4, 1), (8, 3), (12, 8195), (16, 1), (20, 4), (24, 3), (28, 128)];
    for (offset, value) in fields {
        header[offset..offset + 4].copy_from_slice(&u32::to_le_bytes(value));
    }
    assert!(bytes[..2048] == header, "{:x?}", &bytes[..64]);
    // The layout: directory, table 0, its grains, table 1, ...
    let directory = sector(&bytes, 4);
    assert_eq!([0, 4, 8, 12].map(|at| u32_at(directory, at)), [8, 48, 88, 0]);
    let entries = |table: usize, entries: &[(usize, u32)]| {
        let mut expected = vec![0; 16384];
        for (entry, value) in entries {
            expected[entry * 4..entry * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
        assert!(bytes[table * 512..table * 512 + 16384] == expected, "table at {table}");
    };
    let block: Vec<(usize, u32)> = (8..16).map(|lba| (lba, 112 + lba as u32)).collect();
    entries(8, &[&[(0, 40), (5, 41)], &block[..]].concat());
    entries(48, &[(0, 80)]);
    entries(88, &[(2, 42)]);
    assert_eq!([40, 41, 42, 80, 120, 127].map(|at| sector(&bytes, at)[511]), [1, 6, 3, 1, 0x77, 0x77]);
    assert_eq!(bytes.len(), 128 * 512);
}

/// Other programs append grains at the end that the header of a closed image states.
#[test]
fn the_header_of_a_closed_image_states_its_end() {
    let mut closed = 0;
    for seed in 0..400 {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let file = disk.directory().create("image", IoMode::Buffered).unwrap();
        create(Arc::clone(&file), "image", &CreateOptions::new(8195 * SECTOR)).unwrap();
        disk.directory().sync().unwrap();
        let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
        for lba in 0..1 + seed % 40 {
            layer.write(lba * 200 * SECTOR, &[&[1; 512]]).unwrap();
        }
        layer.flush().unwrap();
        disk.cut_after(disk.operations() + 1 + seed % 8);
        let _ = layer.close();
        drop((layer, file));
        let disk = disk.crash();
        let file = disk.directory().open("image", IoMode::Buffered).unwrap();
        let mut header = vec![0; 2048];
        file.read_at(&mut header, 0).unwrap();
        if u32_at(&header, 1648) == 0 {
            assert_eq!(u64::from(u32_at(&header, 28)) * SECTOR, file.len().unwrap(), "seed {seed}");
            closed += 1;
        }
    }
    assert!(closed > 0);
}

#[test]
fn invalid_parameters_and_ranges_are_refused() {
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    let kind = |capacity: u64, grain_sectors: u32| {
        create(Arc::clone(&file), "image", &CreateOptions { capacity, grain_sectors }).unwrap_err().kind()
    };
    for (capacity, grain) in [(0, 1), (1000, 1), (2 << 40, 1), (1 << 30, 0), (1 << 30, 4096)] {
        assert_eq!(kind(capacity, grain), ErrorKind::Invalid);
    }
    create(Arc::clone(&file), "image", &CreateOptions::new((2 << 40) - 512)).unwrap();
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
    assert_eq!(layer.capacity(), (2 << 40) - 512);
    layer.write(layer.capacity() - 512, &[&[9; 512]]).unwrap();
    for (start, length) in [(layer.capacity() - 512, 1024), (100, 512), (0, 100), (u64::MAX - 511, 512)] {
        assert_eq!(layer.write(start, &[&vec![0; length]]).unwrap_err().kind(), ErrorKind::Invalid);
        let end = start.saturating_add(length as u64);
        assert_eq!(layer.map(start..end, 1, &mut Vec::new()).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(layer.zero(start..end, false).unwrap_err().kind(), ErrorKind::Invalid);
    }
    // The file would have to grow past the last sector that an entry can name.
    layer.writer().unwrap().space.lock().cut((1 << 32) - 100);
    assert_eq!(layer.write(0, &[&[9; 51_200]]).unwrap_err().kind(), ErrorKind::NoSpace);
    layer.write(layer.capacity() - 1024, &[&[8; 512]]).unwrap();
    layer.close().unwrap();
    assert!(file.len().unwrap() > (2 << 40) - 51_200);
    let layer = VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap();
    let mut extents = Vec::new();
    layer.map(layer.capacity() - 1024..layer.capacity(), 2, &mut extents).unwrap();
    assert!(extents.iter().all(|extent| matches!(extent.content, Content::Data { .. })));
    assert_eq!(layer.write(512 * 4096, &[&[9; 51_200]]).unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn unknown_header_fields_are_kept() {
    let disk = SimulatedDisk::new(0, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(1 << 20)).unwrap();
    file.write_at(&[b"parent.vmdk"], 32, false).unwrap();
    file.write_at(&[&7u32.to_le_bytes()], 1060, false).unwrap();
    let before = {
        let mut bytes = vec![0; 2048];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap().close().unwrap();
    let mut after = vec![0; 2048];
    file.read_at(&mut after, 0).unwrap();
    assert_eq!(before, after);
}

/// A full file system refuses only writes that need space, and the image continues when there is space again.
#[test]
fn a_full_file_system_causes_errors_and_no_damage() {
    let disk = SimulatedDisk::new(3, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    disk.directory().sync().unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(1 << 30)).unwrap();
    let layer = VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap();
    layer.write(0, &[&[1; 8192]]).unwrap();
    layer.flush().unwrap();
    disk.set_capacity(0);
    assert_eq!(layer.write(65536, &[&[2; 4096]]).unwrap_err().kind(), ErrorKind::NoSpace);
    layer.write(0, &[&[3; 4096]]).unwrap();
    // Space for the table of an acknowledged write is allocated.
    disk.set_capacity(1 << 40);
    layer.write(100 << 20, &[&[4; 4096]]).unwrap();
    disk.set_capacity(0);
    layer.flush().unwrap();
    disk.set_capacity(1 << 40);
    layer.write(65536, &[&[5; 4096]]).unwrap();
    layer.flush().unwrap();
    drop(layer);
    let file = disk.crash().directory().open("image", IoMode::Buffered).unwrap();
    let layer = VmfsSparse::open(file, &OpenOptions::reading("image")).unwrap();
    for (start, value) in [(0, 3), (4096, 1), (65536, 5), (100 << 20, 4)] {
        let mut extents = Vec::new();
        layer.map(start..start + 4096, 1, &mut extents).unwrap();
        let Content::Data { offset, .. } = extents[0].content else { panic!("{start}: {extents:?}") };
        let mut bytes = [0; 4096];
        layer.file.read_at(&mut bytes, offset).unwrap();
        assert_eq!(bytes, [value; 4096]);
    }
}

#[test]
fn after_a_failed_flush_all_changes_are_refused() {
    let disk = SimulatedDisk::new(3, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(1 << 30)).unwrap();
    let layer = VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap();
    layer.write(0, &[&[1; 4096]]).unwrap();
    disk.fail_syncs(1);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.write(0, &[&[1; 4096]]).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.close().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.shrink(&NoProgress).unwrap_err().kind(), ErrorKind::Stopped);
}

/// The number of changed tables is bounded, also if no other thread makes the commits that are due: random writes over
/// a large disk cause commits.
#[test]
fn tables_are_committed_at_the_limit_of_their_number() {
    let disk = SimulatedDisk::new(3, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(100 << 30)).unwrap();
    let layer = VmfsSparse::open(file, &OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::writing("image") }).unwrap();
    for table in 0..20_000u64 {
        layer.write(table * 4096 * 512 + 4096, &[&[1; 4096]]).unwrap();
        assert!(layer.tables.cache.changed() <= 2 * 2048 + 1);
        assert!(layer.tables.cache.bytes() < 5 << 20, "{} bytes", layer.tables.cache.bytes());
    }
    layer.close().unwrap();
    assert_eq!(layer.check().unwrap().grains, 160_000);
}

#[test]
fn aligned_guest_blocks_are_aligned_in_the_file() {
    let disk = SimulatedDisk::new(3, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions::new(1 << 30)).unwrap();
    let layer = VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap();
    for step in 0..2000u64 {
        let block = step * 7919 % 200_000;
        match step % 3 {
            0 => layer.write(block * 4096 + 512 * (step % 8), &[&[1; 512]]).unwrap(),
            _ => layer.write(block * 4096, &[&[1; 4096]]).unwrap(),
        }
    }
    let mut extents = Vec::new();
    layer.map(0..layer.capacity(), usize::MAX, &mut extents).unwrap();
    for extent in extents.iter().filter(|extent| extent.length >= 4096) {
        let Content::Data { offset, .. } = extent.content else { continue };
        assert_eq!(offset % 4096, extent.start % 4096);
    }
    // Sectors skipped for alignment are used by small writes.
    let usage = layer.usage().unwrap();
    assert!(usage.dead * 20 < usage.mapped, "{usage:?}");
}

/// QEMU appends grains without updating the header; ESX leaves free space at the end.
#[test]
fn the_end_is_found_if_the_header_is_wrong() {
    for lie in [0u32, 9, 48, 0x00ff_ffff] {
        let disk = SimulatedDisk::new(3, SimulatedOptions::default());
        let file = disk.directory().create("image", IoMode::Buffered).unwrap();
        create(Arc::clone(&file), "image", &CreateOptions::new(1 << 30)).unwrap();
        let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
        layer.write(0, &[&[1; 4096]]).unwrap();
        layer.close().unwrap();
        file.write_at(&[&lie.to_le_bytes()], 28, false).unwrap();
        // The file gets space after its used part.
        file.set_len(4 << 20).unwrap();
        let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
        assert_eq!(layer.writer().unwrap().space.lock().free(), 48);
        layer.write(8192, &[&[2; 4096]]).unwrap();
        layer.close().unwrap();
        assert_eq!(file.len().unwrap(), 56 * 512);
        assert_eq!(layer.check().unwrap().problems, Vec::<String>::new());
    }
}
