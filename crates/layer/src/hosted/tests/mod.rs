//! Sparse extents against a plain model, against QEMU, across power cuts, and damaged.

mod damage;
mod model;
mod power;
mod qemu;
mod threads;

use super::create::create_shaped;
use super::{CreateOptions, Hosted, OpenOptions, create};
use crate::proving::{Gated, Random, Request, read, read_all};
use crate::{ErrorKind, Layer, Result, SECTOR};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, File, IoMode};
use std::sync::Arc;

/// Grains and tables of the small geometry: many tables in little space.
const GRAIN: u64 = 8 * SECTOR;
const TABLE_ENTRIES: u32 = 16;

fn options(writable: bool, parent: bool) -> OpenOptions {
    OpenOptions { image: "disk.vmdk".to_owned(), writable, parent, force: false }
}

fn open(file: &Arc<dyn File>, writable: bool, parent: bool) -> Result<Hosted> {
    Hosted::open(Arc::clone(file), &options(writable, parent))
}

/// An extent of the small geometry in a new file.
fn small(directory: &dyn Directory, capacity: u64, zero_grains: bool) -> Arc<dyn File> {
    let file = directory.create("disk.vmdk", IoMode::Buffered).unwrap();
    let descriptor = Some(&b"# Disk DescriptorFile\nversion=1\n"[..]);
    let options = CreateOptions { capacity, descriptor, zero_grains };
    create_shaped(file.as_ref(), "disk.vmdk", &options, GRAIN / SECTOR, TABLE_ENTRIES).unwrap();
    directory.sync().unwrap();
    file
}

/// Removes tables from both directories: an image of a writer that allocates tables on demand.
fn drop_tables(file: &dyn File, mut which: impl FnMut(u64) -> bool) {
    let header = super::read_header(file).unwrap();
    for index in 0..header.directory_entries() {
        if which(index) {
            for offset in [header.directory_offset, header.redundant_offset] {
                file.write_at(&[&[0; 4]], offset * SECTOR + index * 4, true).unwrap();
            }
        }
    }
}

/// A random range of whole grains.
fn grains(random: &mut Random, capacity: u64, most: u64) -> std::ops::Range<u64> {
    let count = capacity.div_ceil(GRAIN);
    let first = random.below(count);
    let end = first + 1 + random.below(most.min(count - first));
    first * GRAIN..(end * GRAIN).min(capacity)
}

/// Cuts bytes into slices of random lengths.
fn slices<'a>(random: &mut Random, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let (first, rest) = bytes.split_at(1 + random.below(bytes.len() as u64) as usize);
        out.push(first);
        bytes = rest;
    }
    out
}

#[test]
fn a_new_extent_has_the_usual_layout() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("disk.vmdk", IoMode::Buffered).unwrap();
    let options = CreateOptions { capacity: 32 << 20, descriptor: Some(b"text"), zero_grains: false };
    create(file.as_ref(), "disk.vmdk", &options).unwrap();
    let header = super::read_header(file.as_ref()).unwrap();
    assert_eq!((header.descriptor_offset, header.descriptor_size), (1, 20));
    assert_eq!((header.redundant_offset, header.directory_offset, header.overhead), (21, 26, 128));
    let layer = open(&file, false, false).unwrap();
    assert_eq!(layer.descriptor().unwrap().unwrap(), b"text");
    assert!(layer.check().unwrap().is_sound());
    assert_eq!(file.len().unwrap(), 128 * SECTOR);
    // The new file, and the file after one written grain, equal the bytes on the page.
    let shown = |name| crate::proving::shown("hosted.md", name, 128 * SECTOR as usize);
    let mut bytes = vec![0; 128 * SECTOR as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes[512..516].fill(0);
    assert!(bytes == shown("new extent"), "docs/format/hosted.md: {}", dump(&bytes));
    let layer = open(&file, true, false).unwrap();
    layer.write(3 << 16, &[&[7; 65_536]]).unwrap();
    layer.flush().unwrap();
    file.read_at(&mut bytes, 0).unwrap();
    bytes[512..516].fill(0);
    let changed: Vec<u8> = bytes.iter().zip(shown("new extent")).map(|(new, old)| new ^ old).collect();
    assert!(changed == shown("after one grain"), "docs/format/hosted.md: {}", dump(&changed));
}

fn dump(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).enumerate().filter(|(_, line)| line.iter().any(|byte| *byte != 0));
    let hex = |line: &[u8]| line.iter().map(|byte| format!(" {byte:02x}")).collect::<String>();
    lines.map(|(at, line)| format!("\n{:04x} {}", at * 16, hex(line))).collect()
}

#[test]
fn invalid_ranges_are_refused() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let capacity = 10 * GRAIN + 3 * SECTOR;
    let file = small(disk.directory().as_ref(), capacity, false);
    let layer = open(&file, true, false).unwrap();
    let invalid = |result: Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid);
    invalid(layer.write(SECTOR, &[&[0; GRAIN as usize]]));
    invalid(layer.write(0, &[&[0; SECTOR as usize]]));
    invalid(layer.write(10 * GRAIN, &[&[0; GRAIN as usize]]));
    invalid(layer.write(u64::MAX - GRAIN + 1, &[&[0; GRAIN as usize]]));
    invalid(layer.zero(0..GRAIN + SECTOR, false));
    invalid(layer.map(0..capacity + 1, 1, &mut Vec::new()));
    layer.write(10 * GRAIN, &[&[7; 3 * SECTOR as usize]]).unwrap();
    layer.close().unwrap();
    assert_eq!(layer.write(0, &[&[1; GRAIN as usize]]).unwrap_err().kind(), ErrorKind::ReadOnly);
    let before = disk.operations();
    layer.flush().unwrap();
    layer.close().unwrap();
    assert_eq!(disk.operations(), before, "a closed image accepts no writes");
    let reader = open(&file, false, false).unwrap();
    assert_eq!(reader.write(0, &[&[1; GRAIN as usize]]).unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(read(&reader, 10 * GRAIN..capacity, None).unwrap(), vec![7; 3 * SECTOR as usize]);
    assert!(read_all(&reader, None)[..10 * GRAIN as usize].iter().all(|byte| *byte == 0));
}

#[test]
fn reading_changes_nothing() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = small(disk.directory().as_ref(), 40 * GRAIN, false);
    let writer = open(&file, true, false).unwrap();
    writer.write(0, &[&[9; 5 * GRAIN as usize]]).unwrap();
    writer.flush().unwrap();
    drop(writer);
    let before = disk.operations();
    let layer = open(&file, false, false).unwrap();
    assert_eq!(layer.warnings().len(), 1, "the image was not closed");
    read_all(&layer, None);
    layer.check().unwrap();
    layer.flush().unwrap();
    layer.close().unwrap();
    assert_eq!(disk.operations(), before);
}

/// A write, or zeros over a parent, is refused if it needs a new table, because the directory of the second copy has no
/// space: the sectors of the first copy are used again, and no sectors are allocated for the grain.
#[test]
fn refused_tables_use_up_no_sectors() {
    for zeros in [false, true] {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file = small(disk.directory().as_ref(), 20 * GRAIN, false);
        drop_tables(file.as_ref(), |_| true);
        let second = super::read_header(file.as_ref()).unwrap().redundant_offset * SECTOR;
        let gate = move |request| match request {
            Request::Reserve(range) if range.contains(&second) => Err(std::io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        };
        let gated: Arc<dyn File> = Arc::new(Gated { inner: file, gate });
        let layer = open(&gated, true, zeros).unwrap();
        let used = || layer.writer.as_ref().unwrap().space.used();
        let before = used();
        for _ in 0..40 {
            let refused = match zeros {
                true => layer.zero(0..GRAIN, false),
                false => layer.write(0, &[&[1; GRAIN as usize]]),
            };
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
        }
        assert!(used() <= before + GRAIN / SECTOR, "{} sectors for one table", used() - before);
    }
}
