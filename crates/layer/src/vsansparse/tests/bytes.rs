//! The bytes of objects equal those on the format's page, and space is allocated and freed as the page says.

use super::*;
use crate::proving::{Gated, Request};
use crate::vsansparse::header::is_sealed;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

fn dump(file: &Arc<dyn File>, block: u64, blocks: u64) -> Vec<u8> {
    let mut bytes = vec![0; (blocks * BLOCK) as usize];
    file.read_at(&mut bytes, block * BLOCK).unwrap();
    bytes
}

fn u64s(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|field| u64::from_le_bytes(field.try_into().unwrap())).collect()
}

/// The example in docs/format/vsansparse.md: 10 MiB, one block, two blocks, zeros, closed.
#[test]
fn a_created_image_equals_the_example_on_the_format_page() {
    let (_disk, file, layer) = object(10 << 20);
    layer.write(0x5000, &[&[0x11; 4096]]).unwrap();
    layer.write(3 << 20, &[&[0x22; 8192]]).unwrap();
    layer.zero(0x5000..0x7000, false).unwrap();
    layer.zero(4 << 20..6 << 20, false).unwrap();
    layer.flush().unwrap();

    // One batch: the data records, then the zeros.
    let log = dump(&file, 2, 1);
    assert_eq!(&log[..4], b"LVSL");
    assert!(is_sealed(&log, 4));
    assert_eq!(log[8..24], ID);
    assert_eq!(u64s(&log[24..56]), [1, 1, 0, 4]);
    let record = |grain: u64, count: u64, kind: u64, place: u64| [grain | count << 40, kind << 56 | place];
    let records = [record(5, 1, 1, 1024), record(768, 2, 1, 1025), record(5, 2, 2, 0), record(1024, 512, 2, 0)];
    assert_eq!(u64s(&log[64..128]), records.concat());
    assert!(log[128..].iter().all(|byte| *byte == 0));

    layer.close().unwrap();
    let header = dump(&file, 0, 1);
    assert_eq!(&header[..8], b"LMVSANSP");
    assert_eq!(u32::from_le_bytes(header[8..12].try_into().unwrap()), 1);
    assert!(is_sealed(&header, 12));
    assert_eq!(header[16..32], ID);
    assert_eq!(u64s(&header[32..88]), [6, 10 << 20, 1, 1, 2, 1027, 1]);
    assert!(header[88..].iter().all(|byte| *byte == 0));

    // Root: pages 0 and 1 are stored, page 2 is zeros, page 3 is absent.
    let root = dump(&file, 258, 2);
    assert_eq!(&root[..4], b"LVSM");
    assert_eq!((u64s(&root[24..40]), root[64], root[65]), (vec![2 << 32, 1 << 32 | 1], 0b10_0101, 0));
    assert!(root[4096..].iter().all(|byte| *byte == 0), "the other copy was never written");
    // Map pages: six bytes per entry.
    let page = dump(&file, 260, 1);
    assert_eq!(u64s(&page[24..40]), [1 << 32, 1 << 32 | 1]);
    let entry = |page: &[u8], at: usize| {
        let mut field = [0; 8];
        field[..6].copy_from_slice(&page[64 + at * 6..70 + at * 6]);
        u64::from_le_bytes(field)
    };
    assert_eq!([4, 5, 6, 7].map(|at| entry(&page, at)), [0, 2 << 46 | 1024, 2 << 46, 0]);
    let page = dump(&file, 262, 1);
    assert_eq!([255, 256, 257, 258].map(|at| entry(&page, at)), [0, 1 << 46 | 1025, 1 << 46 | 1026, 0]);
    assert_eq!(dump(&file, 1025, 2), vec![0x22; 8192]);
    assert_eq!(file.len().unwrap(), 8 << 20, "the map, and one unit");
}

#[test]
fn invalid_parameters_and_ranges_are_refused() {
    let (disk, file, layer) = object(10 << 20);
    for capacity in [0, 1000, (64 << 40) + 512] {
        let file = disk.directory().create(&format!("{capacity}"), IoMode::Buffered).unwrap();
        let refused = create(file, "image", &CreateOptions { capacity, id: ID }).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
    for (start, length) in [(10 << 20, 4096), (512, 4096), (0, 512), (u64::MAX - 4095, 4096)] {
        assert_eq!(layer.write(start, &[&vec![0; length]]).unwrap_err().kind(), ErrorKind::Invalid);
        let end = start.saturating_add(length as u64);
        assert_eq!(layer.zero(start..end, false).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let reader = VsanSparse::open(file, &OpenOptions::reading("image")).unwrap();
    assert_eq!(reader.write(0, &[&[0; 4096]]).unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(reader.zero(0..4096, false).unwrap_err().kind(), ErrorKind::ReadOnly);
}

/// The largest disk: its cost depends on the written data, not on the capacity.
#[test]
fn a_disk_of_64_tebibytes() {
    let (disk, file, layer) = object(64 << 40);
    let capacity = layer.capacity();
    layer.zero(0..capacity, false).unwrap();
    layer.write(capacity - BLOCK, &[&[7; 4096]]).unwrap();
    layer.write(1 << 45, &[&[8; 4096]]).unwrap();
    layer.flush().unwrap();
    // One call may return only a part of the extents; the next call continues.
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = 0;
    while at < capacity {
        let mut part = Vec::new();
        layer.map(at..capacity, 16, &mut part).unwrap();
        for extent in part {
            at = extent.start + extent.length;
            match extents.last_mut() {
                Some(last) if last.content == extent.content && extent.content == Content::Zero => {
                    last.length += extent.length;
                }
                _ => extents.push(extent),
            }
        }
    }
    let lengths: Vec<u64> = extents.iter().map(|extent| extent.length).collect();
    assert_eq!(lengths, [1 << 45, 4096, (1 << 45) - 8192, 4096]);
    assert!(file.allocated().unwrap() < 64 << 20, "{} bytes", file.allocated().unwrap());
    drop(layer);
    let layer = after_cut(&disk, false).unwrap();
    assert_eq!(read(&layer, capacity - BLOCK), Some([7; 4096]));
    assert_eq!(content(&layer, 1 << 44), Content::Zero);
}

/// Space is allocated in units; discarding frees it, and the grain keeps its location.
#[test]
fn units_are_freed_by_discards_and_grains_keep_their_location() {
    let (_disk, file, layer) = object(1 << 30);
    let empty = file.allocated().unwrap();
    layer.write(512 << 20, &[&[1; 4096]]).unwrap();
    let one = file.allocated().unwrap();
    assert!((one - empty).abs_diff(UNIT) <= 64 << 10, "one unit, and map pages in two copies");
    for block in 1..1024u64 {
        layer.write((512 << 20) + block * 7919 % 1000 * BLOCK, &[&[2; 4096]]).unwrap();
    }
    assert!(file.allocated().unwrap() < one + (64 << 10));
    // Newly written grains are adjacent in the file, whatever their order on the disk.
    let usage = layer.usage().unwrap();
    assert_eq!((usage.mapped, usage.dead), (1000 * BLOCK, 0));
    let before: Vec<Content> = (0..1000).map(|block| content(&layer, (512 << 20) + block * BLOCK)).collect();

    let range = 512 << 20..(512 << 20) + 1000 * BLOCK;
    let allocated = file.allocated().unwrap();
    layer.zero(range.clone(), true).unwrap();
    assert_eq!(file.allocated().unwrap(), allocated, "kept");
    layer.write(range.start, &[&vec![3; 1000 * BLOCK as usize]]).unwrap();
    layer.zero(range.clone(), false).unwrap();
    assert_eq!(content(&layer, range.start), Content::Zero);
    // First writes in random order: no run of blocks is long enough to be punched.
    assert_eq!(layer.usage().unwrap().mapped, 0);
    layer.write(range.start, &[&vec![4; 1000 * BLOCK as usize]]).unwrap();
    let after: Vec<Content> = (0..1000).map(|block| content(&layer, (512 << 20) + block * BLOCK)).collect();
    assert_eq!(before, after);

    layer.write(0, &[&vec![5; 4 << 20]]).unwrap();
    let allocated = file.allocated().unwrap();
    layer.zero(0..4 << 20, false).unwrap();
    assert_eq!(file.allocated().unwrap(), allocated - (4 << 20));
    layer.close().unwrap();
}

/// Without a parent, zeros need no change of the map.
#[test]
fn zeros_without_a_parent_take_no_space() {
    let (_disk, file, layer) = object(1 << 30);
    layer.close().unwrap();
    let options = OpenOptions { parent: false, ..OpenOptions::writing("image") };
    let layer = VsanSparse::open(file, &options).unwrap();
    layer.write(0, &[&[1; 8192]]).unwrap();
    layer.zero(0..1 << 30, false).unwrap();
    assert_eq!(content(&layer, 4096), Content::Zero);
    assert_eq!(content(&layer, 8192), Content::Absent);
    assert_eq!(layer.check().unwrap().pages, 1);
}

#[test]
fn a_full_file_system_causes_errors_and_no_damage() {
    let (disk, _file, layer) = object(1 << 30);
    layer.write(0, &[&[1; 8192]]).unwrap();
    layer.flush().unwrap();
    disk.set_capacity(0);
    // The file system is full. Writes within the allocated unit succeed; writes that need a new map page or the next
    // unit are refused.
    layer.write(65536, &[&[2; 4096]]).unwrap();
    assert_eq!(layer.write(100 << 20, &[&[3; 4096]]).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(layer.write(0, &[&vec![3; 6 << 20]]).unwrap_err().kind(), ErrorKind::NoSpace);
    layer.zero(4096..8192, false).unwrap();
    layer.flush().unwrap();
    layer.checkpoint().unwrap();
    // Writes use up the rest of the unit. A grain of zeros has kept its space and can be written again.
    let mut at = 1 << 20;
    while layer.write(at, &[&[5; 4096]]).is_ok() {
        at += 4096;
    }
    layer.write(4096, &[&[6; 4096]]).unwrap();
    layer.zero(4096..8192, false).unwrap();
    disk.set_capacity(1 << 40);
    layer.write(100 << 20, &[&[4; 4096]]).unwrap();
    layer.flush().unwrap();
    drop(layer);
    let layer = after_cut(&disk, true).unwrap();
    assert_eq!(read(&layer, 0), Some([1; 4096]));
    assert_eq!(content(&layer, 4096), Content::Zero);
    assert_eq!(read(&layer, 65536), Some([2; 4096]));
    assert_eq!(read(&layer, 100 << 20), Some([4; 4096]));
}

#[test]
fn after_a_failed_flush_all_changes_are_refused() {
    let (disk, _file, layer) = object(1 << 30);
    layer.write(0, &[&[1; 4096]]).unwrap();
    disk.fail_syncs(1);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.write(0, &[&[1; 4096]]).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.close().unwrap_err().kind(), ErrorKind::Stopped);
}

/// The file system reports lost writes to one of two flushes. If the flush of a checkpoint gets the report, the flush
/// of a client at the same time must not succeed.
#[test]
fn a_flush_fails_while_the_flush_of_a_checkpoint_does() {
    let [syncs, written, failing] = [(); 3].map(|()| Arc::new(AtomicU32::new(u32::MAX / 2)));
    let gate = {
        let (syncs, written, failing) = (Arc::clone(&syncs), Arc::clone(&written), Arc::clone(&failing));
        move |request| {
            // The second flush of a checkpoint, after its commit.
            if !matches!(request, Request::Sync) || syncs.fetch_add(1, Ordering::SeqCst) != 1 {
                return Ok(());
            }
            failing.store(1, Ordering::SeqCst);
            wait_for(Duration::from_secs(60), || written.load(Ordering::SeqCst) == 1);
            // The client's flush begins. It waits for this one.
            wait_for(Duration::from_millis(200), || syncs.load(Ordering::SeqCst) > 2);
            Err(std::io::Error::other("the device fails"))
        }
    };
    let (_disk, inner, layer) = object(1 << 30);
    layer.close().unwrap();
    let file: Arc<dyn File> = Arc::new(Gated { inner, gate });
    let layer = VsanSparse::open(file, &OpenOptions::writing("image")).unwrap();
    layer.write(0, &[&[1; 4096]]).unwrap();
    [&syncs, &written, &failing].into_iter().for_each(|count| count.store(0, Ordering::SeqCst));
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| layer.checkpoint());
        wait_for(Duration::from_secs(60), || failing.load(Ordering::SeqCst) == 1);
        layer.write(4096, &[&[2; 4096]]).unwrap();
        written.store(1, Ordering::SeqCst);
        assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped);
        assert_eq!(checkpoint.join().unwrap().unwrap_err().kind(), ErrorKind::Io);
    });
}

fn wait_for(limit: Duration, is_true: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_true() && started.elapsed() < limit {
        std::thread::yield_now();
    }
}
