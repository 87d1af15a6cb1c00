//! Files, names, locks and space.

use crate::queues::drain;
use crate::{SPAN, fill, range};
use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, Lock};
use std::io::ErrorKind;
use testkit::Random;

pub fn random_script_matches_bytes(directory: &dyn Directory, mode: IoMode, seed: u64) {
    let mut random = Random(seed);
    let mut file = directory.create("script", mode).unwrap();
    let mut model: Vec<u8> = Vec::new();
    for step in 0..300 {
        let (start, length) = range(&mut random, mode);
        let end = start + length;
        let choice = random.index(100);
        match choice {
            0..45 => {
                let mut data = Buffer::with_bytes(length);
                fill(&mut random, &mut data);
                let unit = if mode == IoMode::Direct { BLOCK_SIZE } else { 1 };
                let cut = random.index(length / unit + 1) * unit;
                let durable = random.index(8) == 0;
                file.write_at(&[&data[..cut], &[], &data[cut..length]], start as u64, durable).unwrap();
                model.resize(model.len().max(end), 0);
                model[start..end].copy_from_slice(&data[..length]);
            }
            45..60 => {
                file.punch(start as u64, length as u64).unwrap();
                let within = start.min(model.len())..end.min(model.len());
                model[within].fill(0);
            }
            60..66 => {
                file.reserve(start as u64, length as u64).unwrap();
                model.resize(model.len().max(end), 0);
            }
            66..70 if start < model.len() => {
                let cut = end.min(model.len());
                match file.zero_range(start as u64, (cut - start) as u64) {
                    Ok(()) => model[start..cut].fill(0),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "seed {seed} step {step}"),
                }
            }
            70..74 => {
                file.set_len(start as u64).unwrap();
                model.resize(start, 0);
            }
            74..78 => file.sync().unwrap(),
            78..80 => {
                drop(file);
                file = directory.open("script", mode).unwrap();
            }
            80..85 => check_allocation(file.as_ref(), &model),
            _ => {
                let mut buffer = Buffer::with_bytes(length);
                buffer.fill(0xee);
                let cached = choice < 90 && file.read_cached_at(&mut buffer[..length], start as u64).unwrap();
                if !cached {
                    file.read_at(&mut buffer[..length], start as u64).unwrap();
                }
                assert!(buffer[..length] == expected(&model, start, length), "seed {seed} step {step}");
            }
        }
        assert_eq!(file.len().unwrap(), model.len() as u64, "seed {seed} step {step}");
    }
    let mut all = Buffer::with_bytes(SPAN);
    file.read_at(&mut all, 0).unwrap();
    assert!(*all == expected(&model, 0, SPAN)[..], "seed {seed}");
    directory.remove("script").unwrap();
}

fn expected(model: &[u8], start: usize, length: usize) -> Vec<u8> {
    let mut bytes = model[start.min(model.len())..(start + length).min(model.len())].to_vec();
    bytes.resize(length, 0);
    bytes
}

/// Allocated ranges are in order, within the file, and cover all bytes that are not zero.
fn check_allocation(file: &dyn File, model: &[u8]) {
    let mut at = 0;
    while let Some(range) = file.next_allocated(at).unwrap() {
        assert!(range.start >= at && range.start < range.end && range.end <= model.len() as u64);
        assert!(model[at as usize..range.start as usize].iter().all(|byte| *byte == 0));
        at = range.end;
    }
    assert!(model[at as usize..].iter().all(|byte| *byte == 0));
}

pub fn names_behave(directory: &dyn Directory, mode: IoMode) {
    assert_eq!(directory.open("missing", mode).err().unwrap().kind(), ErrorKind::NotFound);
    assert_eq!(directory.remove("missing").err().unwrap().kind(), ErrorKind::NotFound);
    assert_eq!(directory.rename("missing", "other").err().unwrap().kind(), ErrorKind::NotFound);
    for bad in ["", ".", "..", "a/b", "a\0b"] {
        assert_eq!(directory.create(bad, mode).err().unwrap().kind(), ErrorKind::InvalidInput);
    }
    let first = directory.create("first", mode).unwrap();
    assert_eq!(directory.create("first", mode).err().unwrap().kind(), ErrorKind::AlreadyExists);
    first.set_len(4096).unwrap();
    let second = directory.create("second", mode).unwrap();
    second.set_len(8192).unwrap();
    assert_eq!(directory.list().unwrap(), ["first", "second"]);
    directory.rename("second", "first").unwrap();
    directory.sync().unwrap();
    assert_eq!(directory.list().unwrap(), ["first"]);
    assert_eq!(directory.open("first", mode).unwrap().len().unwrap(), 8192);
    // A removed file exists as long as its handles.
    assert_eq!(first.len().unwrap(), 4096);
    directory.remove("first").unwrap();
    assert_eq!(second.len().unwrap(), 8192);
    assert!(directory.list().unwrap().is_empty());
}

pub fn locks_exclude(directory: &dyn Directory) {
    let lock = directory.lock("lock").unwrap();
    assert_eq!(directory.lock("lock").err().unwrap().kind(), ErrorKind::WouldBlock);
    drop(lock);
    drop(directory.lock("lock").unwrap());
    assert_eq!(directory.lock_until_idle("missing").err().unwrap().kind(), ErrorKind::NotFound);
    assert!(!directory.list().unwrap().contains(&"missing".to_owned()));
    let lock = directory.lock_until_idle("lock").unwrap();
    assert_eq!(directory.lock("lock").err().unwrap().kind(), ErrorKind::WouldBlock);
    let is_held = |lock: &dyn Lock| lock.loss().unwrap().is_none();
    assert!(is_held(&*lock));
    directory.rename("lock", "moved").unwrap();
    assert!(!is_held(&*lock));
    // A new file with the locked name has its own lock, and the earlier lock reports its loss.
    let second = directory.lock("lock").unwrap();
    assert!(!is_held(&*lock) && is_held(&*second));
    directory.remove("lock").unwrap();
    assert!(!is_held(&*second));
    directory.remove("moved").unwrap();
}

pub fn past_the_end_is_zeros(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("short", mode).unwrap();
    let mut data = Buffer::with_bytes(2 * BLOCK_SIZE);
    data.fill(7);
    file.write_at(&[&data], 0, false).unwrap();
    // Direct reads have their own code for an end in the middle of a block.
    for length in [1, 511, 512, 4095, 4096, 4097, 8191] {
        file.write_at(&[&data], 0, false).unwrap();
        file.set_len(length).unwrap();
        let wanted: Vec<u8> = (0..4 * BLOCK_SIZE as u64).map(|at| if at < length { 7 } else { 0 }).collect();
        let mut buffer = Buffer::with_bytes(4 * BLOCK_SIZE);
        buffer.fill(0xee);
        file.read_at(&mut buffer, 0).unwrap();
        assert!(*buffer == wanted[..], "length {length}");
        let mut queue = directory.queue(4).unwrap();
        buffer.fill(0xee);
        queue.read(&file, 0, buffer, 1);
        let mut far = Buffer::with_bytes(BLOCK_SIZE);
        far.fill(0xee);
        queue.read(&file, 1 << 30, far, 2);
        for completion in drain(queue.as_mut()) {
            completion.result.unwrap();
            let buffer = completion.buffer.unwrap();
            match completion.token {
                1 => assert!(*buffer == wanted[..], "length {length}"),
                _ => assert!(buffer.iter().all(|byte| *byte == 0)),
            }
        }
        file.set_len(2 * BLOCK_SIZE as u64).unwrap();
    }
    directory.remove("short").unwrap();
}

pub fn space_is_taken_and_given_back(directory: &dyn Directory, mode: IoMode) {
    const MIB: u64 = 1 << 20;
    let file = directory.create("space", mode).unwrap();
    file.set_len(8 * MIB).unwrap();
    assert_eq!(file.next_allocated(0).unwrap(), None);
    file.reserve(2 * MIB, MIB).unwrap();
    file.sync().unwrap();
    // Reserved space that was never written counts as allocated; on local file systems only FIEMAP shows it.
    assert_eq!(file.next_allocated(0).unwrap(), Some(2 * MIB..3 * MIB));
    assert_eq!(file.next_allocated(2 * MIB + 4096).unwrap(), Some(2 * MIB + 4096..3 * MIB));
    assert_eq!(file.next_allocated(3 * MIB).unwrap(), None);
    assert!((MIB..MIB + 65536).contains(&file.allocated().unwrap()));
    let mut data = Buffer::with_bytes(MIB as usize);
    data.fill(1);
    file.write_at(&[&data], 5 * MIB, false).unwrap();
    assert_eq!(file.next_allocated(3 * MIB).unwrap(), Some(5 * MIB..6 * MIB));
    file.sync().unwrap();
    assert!((2 * MIB..2 * MIB + 65536).contains(&file.allocated().unwrap()));
    file.punch(2 * MIB, MIB).unwrap();
    file.punch(5 * MIB + MIB / 2, 8 * MIB).unwrap();
    assert_eq!(file.next_allocated(0).unwrap(), Some(5 * MIB..5 * MIB + MIB / 2));
    assert!((MIB / 2..MIB / 2 + 65536).contains(&file.allocated().unwrap()));
    assert_eq!(file.len().unwrap(), 8 * MIB);
    file.reserve(8 * MIB, MIB).unwrap();
    assert_eq!(file.len().unwrap(), 9 * MIB);
    file.reserve(0, 0).unwrap();
    file.punch(0, 0).unwrap();
    directory.remove("space").unwrap();
}

/// A file without a local part has the space of its length, also after a punch.
pub fn space_follows_the_length(directory: &dyn Directory) {
    const MIB: u64 = 1 << 20;
    let file = directory.create("space", IoMode::Buffered).unwrap();
    let room = || directory.room().unwrap().available;
    let before = room();
    file.reserve(2 * MIB, MIB).unwrap();
    assert_eq!((file.len().unwrap(), room()), (3 * MIB, before - 3 * MIB));
    file.reserve(0, MIB).unwrap();
    file.write_at(&[&[1; 4096]], MIB, false).unwrap();
    file.punch(MIB, 1024).unwrap();
    file.zero_range(MIB + 1024, 1024).unwrap();
    let mut found = [1; 4096];
    file.read_at(&mut found, MIB).unwrap();
    assert!(found[..2048] == [0; 2048] && found[2048..] == [1; 2048]);
    assert_eq!((file.allocated().unwrap(), room()), (3 * MIB, before - 3 * MIB));
    assert_eq!(file.next_allocated(MIB).unwrap(), Some(MIB..3 * MIB));
    assert_eq!(placements(&*file), [(0..3 * MIB, true)]);
    assert_eq!(file.next_allocated(3 * MIB).unwrap(), None);
    assert!(error::lacks_space(&file.reserve(0, before + MIB).unwrap_err()));
    assert_eq!(file.len().unwrap(), 3 * MIB);
    file.forget_cached().unwrap();
    file.set_len(0).unwrap();
    assert_eq!(room(), before);
    directory.remove("space").unwrap();
}

/// All placements of a file; adjacent ones with the same state are merged.
fn placements(file: &dyn File) -> Vec<(std::ops::Range<u64>, bool)> {
    let mut all: Vec<(std::ops::Range<u64>, bool)> = Vec::new();
    let mut at = 0;
    loop {
        let part = file.placements(at).unwrap();
        let Some(last) = part.last() else { return all };
        assert!(part[0].range.start >= at);
        at = last.range.end;
        for found in part {
            match all.last_mut() {
                Some((range, written)) if range.end == found.range.start && *written == found.written => {
                    range.end = found.range.end;
                }
                _ => all.push((found.range, found.written)),
            }
        }
    }
}

pub fn reserved_and_written_are_told_apart(directory: &dyn Directory, mode: IoMode) {
    const MIB: u64 = 1 << 20;
    let file = directory.create("placed", mode).unwrap();
    file.set_len(8 * MIB).unwrap();
    assert!(placements(&*file).is_empty());
    file.reserve(2 * MIB, 3 * MIB).unwrap();
    assert_eq!(placements(&*file), [(2 * MIB..5 * MIB, false)]);
    let mut data = Buffer::with_bytes(MIB as usize);
    data.fill(1);
    file.write_at(&[&data], 3 * MIB, false).unwrap();
    let three = [(2 * MIB..3 * MIB, false), (3 * MIB..4 * MIB, true), (4 * MIB..5 * MIB, false)];
    assert_eq!(placements(&*file), three);
    let from_within = file.placements(3 * MIB + MIB / 2).unwrap();
    assert_eq!(from_within[0].range.start, 3 * MIB + MIB / 2);
    assert!(from_within[0].written);
    match file.zero_range(3 * MIB + MIB / 2, 2 * MIB + MIB / 2) {
        Ok(()) => {
            let (half, end) = (3 * MIB + MIB / 2, 6 * MIB);
            assert_eq!(placements(&*file), [(2 * MIB..3 * MIB, false), (3 * MIB..half, true), (half..end, false)]);
            file.read_at(&mut data, half).unwrap();
            assert!(data.iter().all(|byte| *byte == 0));
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported),
    }
    assert_eq!(file.len().unwrap(), 8 * MIB);
    directory.remove("placed").unwrap();
}

pub fn offsets_are_checked(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("bounds", mode).unwrap();
    let mut buffer = Buffer::with_bytes(2 * BLOCK_SIZE);
    let far = u64::MAX - u64::MAX % BLOCK_SIZE as u64;
    assert_eq!(file.read_at(&mut buffer, far).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(file.write_at(&[&buffer], far, false).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(file.reserve(far, 8192).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(file.punch(far, 8192).unwrap_err().kind(), ErrorKind::InvalidInput);
    if mode == IoMode::Direct {
        assert_eq!(file.read_at(&mut buffer[..4096], 512).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(file.read_at(&mut buffer[512..4608], 0).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(file.write_at(&[&buffer[..512]], 0, false).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(file.len().unwrap(), 0);
    directory.remove("bounds").unwrap();
}
