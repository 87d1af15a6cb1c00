//! Partition tables, which are built here.

#![allow(clippy::unwrap_used)]

use error::Result;
use freemap::{Content, Layout, Scheme, Source, Volume, examine, partitions};
use std::ops::Range;

const SECTOR: usize = 512;

struct Memory(Vec<u8>);

impl Source for Memory {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let at = offset as usize;
        buffer.copy_from_slice(&self.0[at..at + buffer.len()]);
        Ok(())
    }
}

fn find(bytes: &[u8]) -> std::result::Result<Layout, String> {
    partitions(&Memory(bytes.to_vec()), bytes.len() as u64).unwrap()
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Writes an entry of an MBR, or of the table of a logical partition, into sector `table`.
fn entry(bytes: &mut [u8], table: usize, index: usize, kind: u8, sectors: Range<u32>) {
    let at = table * SECTOR + 446 + index * 16;
    bytes[at + 4] = kind;
    put(bytes, at + 8, &sectors.start.to_le_bytes());
    put(bytes, at + 12, &(sectors.end - sectors.start).to_le_bytes());
    put(bytes, table * SECTOR + 510, &[0x55, 0xAA]);
}

fn found(layout: &Layout) -> Vec<(u32, u64, u64)> {
    let sectors = |range: &Range<u64>| (range.start / 512, range.end / 512);
    layout.partitions.iter().map(|one| (one.number, sectors(&one.bytes).0, sectors(&one.bytes).1)).collect()
}

/// A GPT with the partitions of the given sectors, first and last.
fn gpt(sector: usize, of: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; 4096 * sector];
    entry(&mut bytes, 0, 0, 0xEE, 1..4096);
    let entries = 2 * sector;
    for (index, (first, last)) in of.iter().enumerate() {
        let at = entries + index * 128;
        put(&mut bytes, at, &[9; 32]);
        put(&mut bytes, at + 32, &first.to_le_bytes());
        put(&mut bytes, at + 40, &last.to_le_bytes());
    }
    put(&mut bytes, sector, b"EFI PART");
    put(&mut bytes, sector + 12, &92_u32.to_le_bytes());
    put(&mut bytes, sector + 24, &1_u64.to_le_bytes());
    put(&mut bytes, sector + 72, &2_u64.to_le_bytes());
    put(&mut bytes, sector + 80, &16_u32.to_le_bytes());
    put(&mut bytes, sector + 84, &128_u32.to_le_bytes());
    seal_gpt(&mut bytes, sector);
    bytes
}

/// Writes the checksums of a GPT with 16 entries behind its header.
fn seal_gpt(bytes: &mut [u8], sector: usize) {
    let entries = 2 * sector;
    let sum = crc_fast::crc32_iso_hdlc(&bytes[entries..entries + 16 * 128]);
    put(bytes, sector + 88, &sum.to_le_bytes());
    put(bytes, sector + 16, &[0; 4]);
    let sum = crc_fast::crc32_iso_hdlc(&bytes[sector..sector + 92]);
    put(bytes, sector + 16, &sum.to_le_bytes());
}

#[test]
fn primary_and_logical_partitions_are_found_in_order() {
    let mut bytes = vec![0; 1 << 20];
    assert_eq!(find(&bytes).unwrap().scheme, Scheme::Whole);
    entry(&mut bytes, 0, 0, 0x83, 1000..1100);
    entry(&mut bytes, 0, 1, 0x82, 64..128);
    entry(&mut bytes, 0, 3, 0x05, 200..900);
    // The first logical partition is 8 sectors behind its table; the second table is relative to the first one.
    entry(&mut bytes, 200, 0, 0x83, 8..100);
    entry(&mut bytes, 200, 1, 0x05, 300..400);
    entry(&mut bytes, 500, 0, 0x83, 8..64);
    let layout = find(&bytes).unwrap();
    assert_eq!(layout.scheme, Scheme::Mbr);
    assert_eq!(found(&layout), [(2, 64, 128), (5, 208, 300), (6, 508, 564), (1, 1000, 1100)]);

    let bad = |index: usize, sectors: Range<u32>| {
        let mut bytes = bytes.clone();
        entry(&mut bytes, 0, index, 0x83, sectors);
        find(&bytes).unwrap_err()
    };
    assert!(bad(2, 100..140).contains("overlap"));
    assert!(bad(2, 300..310).contains("overlap"), "within the extended partition");
    assert!(bad(2, 2000..2049).contains("not within the disk"));
    let mut cycle = bytes.clone();
    entry(&mut cycle, 500, 1, 0x05, 0..1);
    assert!(find(&cycle).unwrap_err().contains("ascend"));
    put(&mut bytes, 500 * SECTOR + 510, &[0, 0]);
    assert!(find(&bytes).unwrap_err().contains("damaged"));
}

#[test]
fn a_gpt_is_verified() {
    for sector in [512, 4096] {
        let bytes = gpt(sector, &[(64, 127), (34, 63)]);
        let layout = find(&bytes).unwrap();
        assert_eq!(layout.scheme, Scheme::Gpt);
        let scale = sector as u64 / 512;
        assert_eq!(found(&layout), [(2, 34 * scale, 64 * scale), (1, 64 * scale, 128 * scale)]);
        for at in [sector + 40, sector + 16, 2 * sector + 40] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert!(find(&bytes).unwrap_err().contains("damaged"), "{at}");
        }
    }
    assert!(find(&gpt(512, &[(34, 64), (64, 70)])).unwrap_err().contains("overlap"));
    assert!(find(&gpt(512, &[(34, 4096)])).unwrap_err().contains("not within the disk"));
    assert!(find(&gpt(512, &[(34, u64::MAX)])).unwrap_err().contains("not within the disk"));
    let mut bytes = gpt(512, &[(34, 63)]);
    put(&mut bytes, 512, b"NO  PART");
    assert!(find(&bytes).unwrap_err().contains("missing"));
}

#[test]
fn no_partition_contains_a_part_of_the_table() {
    // The second table of the chain has no partition, and lies in the partition of the first one.
    let mut bytes = vec![0; 1 << 20];
    entry(&mut bytes, 0, 0, 0x05, 200..1800);
    entry(&mut bytes, 200, 0, 0x83, 8..500);
    entry(&mut bytes, 200, 1, 0x05, 300..400);
    entry(&mut bytes, 500, 1, 0x05, 1000..1100);
    entry(&mut bytes, 1200, 0, 0x83, 8..100);
    assert!(find(&bytes).unwrap_err().contains("part of the partition table"));
    // It ends in front of the second table.
    entry(&mut bytes, 200, 0, 0x83, 8..300);
    assert_eq!(found(&find(&bytes).unwrap()), [(5, 208, 500), (7, 1208, 1300)]);
    // A second partition in place of a reference to a table.
    entry(&mut bytes, 500, 1, 0x83, 1000..1100);
    assert!(find(&bytes).unwrap_err().contains("not supported"));

    // The copy of the GPT is at the end: 4 sectors of entries and the header.
    for (of, is_valid) in [((34, 4090), true), ((34, 4091), false), ((5, 4090), false), ((6, 4090), true)] {
        let mut bytes = gpt(512, &[of]);
        put(&mut bytes, 512 + 32, &4095_u64.to_le_bytes());
        seal_gpt(&mut bytes, 512);
        let outcome = find(&bytes);
        assert_eq!(outcome.is_ok(), is_valid, "{of:?} {outcome:?}");
        assert!(outcome.is_ok() || outcome.unwrap_err().contains("part of the partition table"));
    }
}

#[test]
fn an_mbr_beside_a_gpt_has_no_other_partitions() {
    let mut bytes = gpt(512, &[(34, 63), (64, 2047)]);
    entry(&mut bytes, 0, 1, 0x83, 34..64);
    assert_eq!(found(&find(&bytes).unwrap()), [(1, 34, 64), (2, 64, 2048)]);
    // Windows, which uses the MBR, has made two partitions of the second one.
    entry(&mut bytes, 0, 2, 0x07, 64..1024);
    entry(&mut bytes, 0, 3, 0x07, 1024..2048);
    assert!(find(&bytes).unwrap_err().contains("MBR"));
}

#[test]
fn partitions_of_types_without_file_systems_of_linux_or_windows_are_marked() {
    let marked = |bytes: &[u8]| -> Vec<bool> {
        find(bytes).unwrap().partitions.iter().map(|partition| partition.unsuited.is_some()).collect()
    };
    let mut bytes = vec![0; 1 << 20];
    // A dynamic disk of Windows, and Linux, FreeBSD, NTFS and LVM, of which two are logical.
    entry(&mut bytes, 0, 0, 0x42, 64..128);
    entry(&mut bytes, 0, 1, 0x83, 128..200);
    entry(&mut bytes, 0, 2, 0x05, 200..900);
    entry(&mut bytes, 0, 3, 0xA5, 900..1000);
    entry(&mut bytes, 200, 0, 0x07, 8..100);
    entry(&mut bytes, 200, 1, 0x05, 300..400);
    entry(&mut bytes, 500, 0, 0x8E, 8..64);
    assert_eq!(marked(&bytes), [true, false, false, true, true]);

    // Linux, data of dynamic disks of Windows, and basic data of Windows, as sgdisk writes these types.
    let types = [
        [0xAF, 0x3D, 0xC6, 0x0F, 0x83, 0x84, 0x72, 0x47, 0x8E, 0x79, 0x3D, 0x69, 0xD8, 0x47, 0x7D, 0xE4],
        [0xA0, 0x60, 0x9B, 0xAF, 0x31, 0x14, 0x62, 0x4F, 0xBC, 0x68, 0x33, 0x11, 0x71, 0x4A, 0x69, 0xAD],
        [0xA2, 0xA0, 0xD0, 0xEB, 0xE5, 0xB9, 0x33, 0x44, 0x87, 0xC0, 0x68, 0xB6, 0xB7, 0x26, 0x99, 0xC7],
    ];
    let mut bytes = gpt(512, &[(34, 63), (64, 99), (100, 127)]);
    for (index, of_type) in types.iter().enumerate() {
        put(&mut bytes, 1024 + index * 128, of_type);
    }
    seal_gpt(&mut bytes, 512);
    assert_eq!(marked(&bytes), [false, true, false]);
    let whole = vec![0; 1 << 20];
    assert_eq!(marked(&whole), [false]);
}

#[test]
fn two_signatures_are_none() {
    let mut bytes = vec![0; 1 << 20];
    entry(&mut bytes, 0, 0, 0x83, 100..200);
    put(&mut bytes, 0x438, &[0x53, 0xEF]);
    assert!(find(&bytes).unwrap_err().contains("ext2/3/4"), "a table and a file system");
    put(&mut bytes, 510, &[0, 0]);
    put(&mut bytes, 0x218, b"LVM2 001");
    let source = Memory(bytes);
    let whole = Volume::new(&source, 0, source.0.len() as u64);
    let Content::Other { name: None, reason } = examine(&whole).unwrap() else { panic!("an ambiguous volume") };
    assert!(reason.contains("ext2/3/4") && reason.contains("LVM"), "{reason}");
}

/// The reason for which a volume that is ambiguous has no file system.
fn ambiguous(bytes: Vec<u8>) -> String {
    let length = bytes.len() as u64;
    let Content::Other { name: None, reason } = examine(&Volume::new(&Memory(bytes), 0, length)).unwrap() else {
        panic!("an ambiguous volume")
    };
    reason
}

#[test]
fn the_superblock_of_a_former_ext4_beside_the_data_of_another_file_system_is_none() {
    // Neither the pool nor newfs of FreeBSD writes the place of the superblock of ext.
    for (at, signature) in
        [(131 << 10, 0x00BA_B10C_u64.to_le_bytes()), (65_536 + 0x55C, [0x19, 1, 0x54, 0x19, 0, 0, 0, 0])]
    {
        let mut bytes = vec![0; 1 << 20];
        put(&mut bytes, 0x438, &[0x53, 0xEF]);
        put(&mut bytes, at, &signature);
        let reason = ambiguous(bytes);
        assert!(reason.contains("ext2/3/4") && reason.contains(" and of "), "{reason}");
    }
}

#[test]
fn the_first_sector_of_a_former_xfs_before_another_file_system_is_none() {
    for (at, signature) in
        [(1030, &[0x34, 0x34][..]), (1024, &[0xE2, 0xE1, 0xF5, 0xE0]), (1024, b"H+\0\x04"), (1024, b"HX\0\x05")]
    {
        let mut bytes = vec![0; 1 << 20];
        put(&mut bytes, 0, b"XFSB");
        put(&mut bytes, at, signature);
        let reason = ambiguous(bytes);
        assert!(reason.contains(" and of ") && reason.contains("xfs"), "{reason}");
    }
}

#[test]
fn a_hibernated_system_is_named_also_beside_another_signature() {
    let mut bytes = vec![0; 1 << 20];
    put(&mut bytes, 4086, b"S1SUSPEND\0");
    put(&mut bytes, (1 << 20) - 8192, &0xA92B_4EFC_u32.to_le_bytes());
    let source = Memory(bytes);
    let Content::Other { name, reason } = examine(&Volume::new(&source, 0, 1 << 20)).unwrap() else {
        panic!("an ambiguous volume")
    };
    assert!(name.is_some_and(|name| name.contains("hibernated")) && reason.contains("Linux RAID"), "{reason}");
}

#[test]
fn what_has_no_free_map_is_named() {
    let named = |at: usize, signature: &[u8]| {
        let mut bytes = vec![0; 1 << 20];
        put(&mut bytes, at, signature);
        let source = Memory(bytes);
        match examine(&Volume::new(&source, 0, source.0.len() as u64)).unwrap() {
            Content::Other { name, .. } => name.unwrap_or_default(),
            Content::FileSystem(_) => panic!("no file system"),
        }
    };
    let raid = 0xA92B_4EFC_u32.to_le_bytes();
    for (at, signature, name) in [
        (4086, &b"SWAPSPACE2"[..], "swap space"),
        (4086, b"S1SUSPEND\0", "swap space with a hibernated system"),
        (65_526, b"S1SUSPEND\0", "swap space with a hibernated system"),
        (16_374, b"S2SUSPEND\0", "swap space with a hibernated system"),
        (4086, b"ULSUSPEND\0", "swap space with a hibernated system"),
        (4086, b"LINHIB0001", "swap space with a hibernated system"),
        (32_758, b"SWAPSPACE2", "swap space"),
        (512, &[0x57, 0x45, 0x56, 0x82], "BSD disklabel"),
        (0, b"LUKS\xBA\xBE", "LUKS"),
        (0x218, b"LVM2 001", "LVM"),
        (0x1_0040, b"_BHRfS_M", "btrfs"),
        (0x52, b"FAT32   ", "FAT"),
        (3, b"-FVE-FS-", "BitLocker"),
        (4096, &raid, "Linux RAID"),
        ((1 << 20) - 8192, &raid, "Linux RAID"),
        ((1 << 20) - 65_536, &raid, "Linux RAID"),
        (65_536 + 0x55C, &[0x19, 0x01, 0x54, 0x19], "UFS"),
        (8192 + 0x55C, &[0x54, 0x19, 0x01, 0x00], "UFS"),
        (0x8000, b"JFS1", "JFS"),
        (0x1_0034, b"ReIsEr2Fs", "ReiserFS"),
        (0x1_0000, &[0x01, 0x16, 0x19, 0x70], "GFS2"),
        (4096 + 24, &[0xC6, 0x85, 0x73, 0xF6, 0x4E, 0x1A, 0x45, 0xCA], "bcache"),
        (128 << 10, &0x00BA_B10C_u64.to_le_bytes(), "ZFS"),
        (255 << 10, &0x00BA_B10C_u64.to_be_bytes(), "ZFS"),
        (0, b"nothing", ""),
    ] {
        assert_eq!(named(at, signature), name);
    }
    for length in [0, 1, 511, 512, 4096, 70_000] {
        let source = Memory(vec![0xFF; length]);
        assert!(matches!(examine(&Volume::new(&source, 0, length as u64)).unwrap(), Content::Other { .. }));
        let _ = partitions(&source, length as u64).unwrap();
    }
}
