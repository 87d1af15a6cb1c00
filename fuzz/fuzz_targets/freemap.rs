//! A disk of a guest: its partitions and the free maps of its file systems. Free ranges lie within the file system, and
//! do not overlap. If the first byte of the input is odd, the checksums of XFS and of the superblock of ext4 are
//! corrected when their structures are read.

#![no_main]

use error::{Error, ErrorKind, Result};
use freemap::{Content, Source, Volume, examine, partitions};
use lamina_fuzz::{Input, seal};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;

const SECTOR: u64 = 512;
/// Most sectors of a disk.
const SECTORS_MAX: u64 = 1 << 20;
/// Most free ranges of one file system.
const RANGES_MAX: usize = 1 << 16;

/// The sectors that are not zeros.
struct Disk {
    length: u64,
    sectors: BTreeMap<u64, Vec<u8>>,
    is_sealed: bool,
}

impl Source for Disk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset + buffer.len() as u64;
        assert!(end <= self.length, "a read beyond the disk");
        buffer.fill(0);
        for (sector, bytes) in self.sectors.range(offset / SECTOR..end.div_ceil(SECTOR)) {
            let at = sector * SECTOR;
            let (from, to) = (at.max(offset), (at + bytes.len() as u64).min(end));
            if from < to {
                let part = &bytes[(from - at) as usize..(to - at) as usize];
                buffer[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
        }
        if self.is_sealed {
            correct(buffer);
        }
        Ok(())
    }
}

/// Corrects the checksum of a structure that begins with the buffer.
fn correct(buffer: &mut [u8]) {
    for (magic, field) in [(&b"XFSB"[..], 0xE0), (b"XAGF", 0xD8), (b"AB3B", 0x34)] {
        if buffer.starts_with(magic) && buffer.len() >= 512 {
            seal(buffer, field);
        }
    }
    if buffer.len() == 1024 && buffer[0x38..0x3A] == [0x53, 0xEF] {
        let sum = !checksums::checksum(&buffer[..0x3FC]);
        buffer[0x3FC..].copy_from_slice(&sum.to_le_bytes());
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let is_sealed = input.u8() & 1 == 1;
    let length = (input.word(4) % SECTORS_MAX + 1) * SECTOR;
    let mut sectors = BTreeMap::new();
    while !input.is_empty() {
        let sector = input.word(4) % (length / SECTOR);
        sectors.insert(sector, input.bytes(SECTOR as usize).to_vec());
    }
    let disk = Disk { length, sectors, is_sealed };
    let layout = partitions(&disk, length).expect("no read fails");
    let mut volumes = vec![0..length];
    if let Ok(layout) = layout {
        let mut end = 0;
        for partition in layout.partitions {
            assert!(partition.bytes.start >= end && partition.bytes.end <= length);
            end = partition.bytes.end;
            volumes.push(partition.bytes);
        }
    }
    for bytes in volumes {
        let volume = Volume::new(&disk, bytes.start, bytes.end - bytes.start);
        let Content::FileSystem(file_system) = examine(&volume).expect("no read fails") else { continue };
        assert!(file_system.size() <= volume.length());
        let mut free = Vec::new();
        let outcome = file_system.free_ranges(&mut |range| {
            assert!(range.start < range.end && range.end <= file_system.size());
            free.push(range);
            match free.len() < RANGES_MAX {
                true => Ok(()),
                false => Err(Error::new(ErrorKind::Interrupted, "enough")),
            }
        });
        if outcome.is_ok() {
            free.sort_by_key(|range| range.start);
            assert!(free.windows(2).all(|two| two[0].end <= two[1].start), "free ranges overlap");
        }
    }
});
