//! The bytes of the format: examples of entries and layouts, and a small image in which every byte is known.

use super::super::entry::{Entry, Grain, Owner, Table, decode_slot, encode_slot};
use super::super::header::{Area, Layout, Volatile};
use super::super::touched::Touched;
use super::*;
use crate::ErrorKind;

#[test]
fn table_entries_encode_the_grain_number_rotated() {
    for (grain, raw) in [
        (0, 0x3000_0000_0000_0000),
        (1, 0x3001_0000_0000_0000),
        (4095, 0x3fff_0000_0000_0000),
        (4096, 0x3000_0000_0000_0001),
        (4097, 0x3001_0000_0000_0001),
        (0x12345, 0x3345_0000_0000_0012),
        ((1 << 60) - 1, 0x3fff_ffff_ffff_ffff),
    ] {
        assert_eq!(Entry::Data(Grain(grain)).encode(), raw, "{grain:#x}");
        assert_eq!(Entry::decode(raw), Some(Entry::Data(Grain(grain))));
    }
}

#[test]
fn invalid_entries_are_refused() {
    assert_eq!(Entry::decode(0), Some(Entry::Absent));
    assert_eq!(Entry::decode(1 << 60), Some(Entry::Unmapped));
    assert_eq!(Entry::decode(1 << 60 | 77), Some(Entry::Unmapped), "it may have the number of a former grain");
    assert_eq!(Entry::decode(2 << 60), Some(Entry::Zero));
    assert_eq!(Entry::decode(1), None);
    for kind in 4..16 {
        assert_eq!(Entry::decode(kind << 60), None);
    }
    assert_eq!(decode_slot(0), Some(None));
    assert_eq!(decode_slot(encode_slot(Table(7))), Some(Some(Table(7))));
    assert_eq!(encode_slot(Table(7)), 0x1000_0000_0000_0007);
    for raw in [1, 0x1000_0001_0000_0000, 0x2000_0000_0000_0000, u64::MAX] {
        assert_eq!(decode_slot(raw), None, "{raw:#x}");
    }
    assert_eq!(Owner { table: Table(0), entry: 4095 }.encode(), 0x1fff_0000_0000_0000);
    assert_eq!(Owner { table: Table(3), entry: 1 }.encode(), 0x1001_0000_0000_0003);
    assert_eq!(Owner::decode(0x1001_0000_0000_0003), Some(Owner { table: Table(3), entry: 1 }));
    assert_eq!(Owner::decode(0), None);
    assert_eq!(Owner::decode(0x1000_0001_0000_0000), None);
}

#[test]
fn areas_have_the_same_offsets_as_on_esxi() {
    let layout = Layout::for_capacity(204_800);
    assert_eq!(layout.slots(), 7);
    assert_eq!((layout.volatile, layout.journal_header), (Area::new(1, 1), Area::new(2, 2)));
    assert_eq!((layout.journal, layout.directory), (Area::new(2048, 2048), Area::new(4096, 2048)));
    assert_eq!((layout.tables, layout.bitmap), (Area::new(6144, 2048), Area::new(8192, 2048)));
    assert_eq!((layout.backmap, layout.grains), (Area::new(10240, 2048), Area::new(12288, 204_800)));
    assert_eq!(Layout::for_capacity(1 << 20).grains.offset, 12288);
    let layout = Layout::for_capacity(83_886_080);
    assert_eq!((layout.slots(), layout.directory), (2560, Area::new(4096, 2048)));
    assert_eq!((layout.tables, layout.bitmap), (Area::new(6144, 163_840), Area::new(169_984, 4096)));
    assert_eq!((layout.backmap, layout.grains.offset), (Area::new(174_080, 163_840), 337_920));
}

#[test]
fn encoded_headers_decode_to_the_same_values() {
    for capacity in [1, 8, 204_800, 83_886_080, (62 << 40) / 512] {
        let layout = Layout::for_capacity(capacity);
        let mut block = [0; 4096];
        layout.encode(&mut block);
        assert_eq!(Layout::decode(&block[..512]), Ok(layout));
        assert!(layout.check_writable().is_ok());
        let mut touched = Touched::new(layout.grains_max());
        for grain in [0, layout.grains_max() / 2, layout.grains_max() - 1] {
            touched.insert(grain);
        }
        touched.encode(&mut block, 36);
        assert_eq!(Touched::decode(&block, layout.grains_max(), 36), Some(touched.clone()));
        assert_eq!(Touched::decode(&block, layout.grains_max(), 37), None, "another program wrote after the mark");
        assert!(touched.regions().all(|region| touched.pages(region).start * 32768 <= layout.grains_max()));
    }
    let header = Volatile { free_table: 1, next_sequence: 36, replay: 0 };
    let mut sector = [0xff; 512];
    header.encode(&mut sector);
    assert_eq!(Volatile::decode(&sector), Ok(header));
    sector[511] = 1;
    assert!(Volatile::decode(&sector).is_err());
}

/// Reads little-endian words of the file.
fn words(file: &dyn File, offset: u64, count: usize) -> Vec<u64> {
    let mut bytes = vec![0; count * 8];
    file.read_at(&mut bytes, offset).unwrap();
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

#[test]
fn a_created_image_equals_the_bytes_on_the_format_page() {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    // Two grains in the fourth 16 MiB, one in the first; the second of the two is zeroed.
    layer.write(3 * 16 * MIB + 8 * GRAIN, &[&stamped(2, 5)]).unwrap();
    layer.write(0, &[&stamped(1, 6)]).unwrap();
    layer.zero(3 * 16 * MIB + 9 * GRAIN..3 * 16 * MIB + 10 * GRAIN, false).unwrap();
    layer.close().unwrap();
    assert_eq!(layer.write(0, &[&stamped(1, 7)]).unwrap_err().kind(), ErrorKind::ReadOnly);

    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    let constant = words(&*file, 0, 64);
    let areas = [1, 1, 2, 2, 2048, 2048, 4096, 2048, 6144, 2048, 8192, 2048, 10240, 2048, 12288, 204_800];
    let mut expected = vec![0xcafe_babe, 0x2_0000_0001, 204_800, 8, 64, 0, 0, 0, 0, 0];
    expected.extend(areas);
    expected.resize(64, 0);
    assert_eq!(constant, expected);
    let mut volatile = vec![0xcafe_cafe, 2, 0, 0];
    volatile.resize(64, 0);
    assert_eq!(words(&*file, 512, 64), volatile);
    assert_eq!(words(&*file, 1024, 4), [0xdead_c0de, 0, 1, 0]);
    assert_eq!(words(&*file, 1056, 4), [u64::from_le_bytes(*b"lamina\x01\0"), 0, 15, 0]);
    assert!(words(&*file, 1536, (2048 * 1024 - 1536) / 8).iter().all(|word| *word == 0), "marks, gap and journal");
    let slots = words(&*file, 4096 * 512, 8);
    assert_eq!(slots, [0x1000_0000_0000_0001, 0, 0, 0x1000_0000_0000_0000, 0, 0, 0, 0]);
    let table = words(&*file, 6144 * 512, 4096);
    assert_eq!(table[8..10], [0x3000_0000_0000_0000, 0x2000_0000_0000_0000]);
    assert_eq!(table.iter().filter(|word| **word != 0).count(), 2);
    let table = words(&*file, 6144 * 512 + 32768, 4096);
    assert_eq!((table[0], table[1]), (0x3002_0000_0000_0000, 0));
    assert_eq!(words(&*file, 8192 * 512, 2), [0b101, 0], "the middle grain is free again");
    assert_eq!(words(&*file, 10240 * 512, 4), [0x1008_0000_0000_0000, 0, 0x1000_0000_0000_0001, 0]);
    assert_eq!(words(&*file, 12288 * 512, 1), [5]);
    assert_eq!(words(&*file, 12288 * 512 + 2 * 4096, 1), [6]);
    assert_eq!(file.len().unwrap(), 12288 * 512 + 3 * 4096, "truncated after the last grain");
}

#[test]
fn entries_of_type_one_read_as_zeros() {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    layer.write(0, &[&stamped(3, 5)]).unwrap();
    layer.close().unwrap();
    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    file.write_at(&[&(1u64 << 60 | 9).to_le_bytes()], 6144 * 512 + 8, false).unwrap();
    let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
    assert_eq!(
        stamps(&layer, 0, 4 * GRAIN).unwrap()[4..28],
        [[5; 4], [0; 4], [0; 4], [5; 4], [5; 4], [ABSENT; 4]].concat()
    );
    layer.write(GRAIN, &[&stamped(1, 8)]).unwrap();
    assert_eq!(stamps(&layer, GRAIN, GRAIN).unwrap(), [8; 8]);
}

/// No program writes a zero entry with a number, and ESXi writes one into the entry of a discarded grain only.
#[test]
fn a_zero_entry_with_a_number_is_damaged_if_a_grain_belongs_to_it() {
    let after_repair = |raw: u64| {
        let disk = simulated(1);
        let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
        layer.write(0, &[&stamped(3, 5)]).unwrap();
        layer.close().unwrap();
        let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
        file.write_at(&[&raw.to_le_bytes()], 6144 * 512, false).unwrap();
        let layer = open(&*disk.directory(), IoMode::Buffered, Options { repair: true, ..writing() }).unwrap();
        let report = layer.check(true, &NoProgress).unwrap();
        assert_eq!(stamps(&layer, GRAIN, 2 * GRAIN).unwrap(), [5; 16]);
        (report.unproven, report.unnamed, stamps(&layer, 0, GRAIN).ok())
    };
    // One byte of the entry of grain 0, which is 3 << 60, is wrong.
    assert_eq!(after_repair(0x29 << 56), (1, 1, None));
    assert_eq!(after_repair(0x15 << 56), (1, 1, None));
    // The guest discarded grain 77 of the file. Then an interrupted write allocated grain 0 of the file.
    let (unproven, _, content) = after_repair(1 << 60 | 77 << 48 | 1);
    assert_eq!((unproven, content), (0, Some(vec![0; 8])));
}

#[test]
fn the_last_grain_may_be_partial() {
    for mode in [IoMode::Buffered, IoMode::Direct] {
        let disk = simulated(3);
        let capacity = 16 * MIB + 3 * 512;
        let layer = create(&disk, mode, capacity, writing());
        let data = stamped(3, 9);
        layer.write(16 * MIB - 2 * GRAIN, &[&data[..2 * GRAIN as usize + 3 * 512]]).unwrap();
        layer.close().unwrap();
        let layer = open(&*disk.directory(), mode, Options::default()).unwrap();
        assert_eq!(layer.capacity(), capacity);
        assert_eq!(stamps(&layer, 16 * MIB - GRAIN, GRAIN + 3 * 512).unwrap(), [9; 11]);
        assert!(layer.map(16 * MIB..16 * MIB + GRAIN, 1, &mut Vec::new()).is_err());
        let layer = open(&*disk.directory(), mode, writing()).unwrap();
        layer.zero(16 * MIB..capacity, false).unwrap();
        assert_eq!(stamps(&layer, 16 * MIB, 3 * 512).unwrap(), [0; 3]);
        assert_clean(&layer);
    }
}

#[test]
fn an_image_of_62_tebibytes_is_sparse_and_opens_quickly() {
    let folder = tempfile::tempdir().unwrap();
    let directory = backend::local::LocalDirectory::open(folder.path(), backend::local::LocalQueues::Threads).unwrap();
    // ext4 files end at 16 TiB: the tables of the largest disk fit, and a grain after them.
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let capacity = 62 << 40;
    let layer = SeSparse::create(Arc::clone(&file), NAME, capacity, writing()).unwrap();
    let last = capacity - 16 * GRAIN;
    layer.write(last, &[&stamped(16, 3)]).unwrap();
    layer.write(2 << 40, &[&stamped(1, 4)]).unwrap();
    layer.close().unwrap();
    let layer = open(&directory, IoMode::Buffered, writing()).unwrap();
    assert_eq!(stamps(&layer, last, 16 * GRAIN).unwrap(), [3; 128]);
    assert_eq!(stamps(&layer, 2 << 40, GRAIN).unwrap(), [4; 8]);
    let mut out = Vec::new();
    layer.map(0..capacity, 10, &mut out).unwrap();
    assert_eq!(out.len(), 1);
    assert!(layer.usage().unwrap().allocated < 4 * MIB, "{:?}", layer.usage());
    assert_clean(&layer);
    assert!(SeSparse::create(file, NAME, capacity, writing()).is_err(), "not empty");
    let other = directory.create("other", IoMode::Buffered).unwrap();
    for bad in [0, 511, 513, capacity + 512, u64::MAX] {
        let made = SeSparse::create(Arc::clone(&other), "other", bad, writing());
        assert_eq!(made.err().map(|error| error.kind()), Some(ErrorKind::Invalid));
    }
}
