//! Queues: overlapping operations, polls, waiting, dropping, moving.

use crate::{SPAN, fill};
use backend::{BLOCK_SIZE, Buffer, Completion, Directory, File, IoMode, Queue, SharedSlice};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::Random;

/// Waits until nothing is in flight.
pub fn drain(queue: &mut dyn Queue) -> Vec<Completion> {
    let mut completions = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, None).unwrap();
    }
    completions
}

pub fn queued_script_matches_bytes(directory: &dyn Directory, mode: IoMode, seed: u64) {
    let file = directory.create("queued", mode).unwrap();
    let mut queue = directory.queue(16).unwrap();
    run_queued_script(queue.as_mut(), &file, mode, seed);
    drop(queue);
    directory.remove("queued").unwrap();
}

/// Many operations in flight on ranges that do not overlap, so that the outcome does not depend on their order.
pub fn run_queued_script(queue: &mut dyn Queue, file: &Arc<dyn File>, mode: IoMode, seed: u64) {
    const LANE: usize = 4 * BLOCK_SIZE;
    let mut random = Random(seed);
    let mut model = vec![0u8; SPAN];
    let mut busy = [false; SPAN / LANE];
    let mut running: std::collections::HashMap<u64, (usize, usize, usize)> = Default::default();
    let mut completions = Vec::new();
    let mut pushed = 0u64;
    let mut finished = 0u64;
    while finished < 600 {
        while pushed < 600 && queue.in_flight() < 16 && busy.iter().any(|busy| !busy) {
            let lane = random.index(busy.len());
            if busy[lane] {
                continue;
            }
            let unit = if mode == IoMode::Direct { BLOCK_SIZE } else { 1 };
            let from = random.index(LANE / unit) * unit;
            let length = (1 + random.index((LANE - from) / unit)) * unit;
            let start = lane * LANE + from;
            match random.index(10) {
                0..5 => {
                    let mut data = Buffer::with_bytes(length);
                    fill(&mut random, &mut data);
                    model[start..start + length].copy_from_slice(&data[..length]);
                    let data = Arc::new(data);
                    let cut = random.index(length / unit + 1) * unit;
                    let slices =
                        vec![SharedSlice::new(data.clone(), 0..cut), SharedSlice::new(data.clone(), cut..length)];
                    queue.write(file, start as u64, slices, random.index(4) == 0, pushed);
                    running.insert(pushed, (lane, 0, 0));
                }
                5 => {
                    queue.sync(file, pushed);
                    running.insert(pushed, (lane, 0, 0));
                }
                _ => {
                    // Buffers are whole blocks; the lane's start keeps the read inside the lane.
                    let blocks = 1 + random.index(LANE / BLOCK_SIZE);
                    let mut buffer = Buffer::zeroed(blocks);
                    buffer.fill(0xee);
                    let start = lane * LANE;
                    queue.read(file, start as u64, buffer, pushed);
                    running.insert(pushed, (lane, start, blocks * BLOCK_SIZE));
                }
            }
            busy[lane] = true;
            pushed += 1;
            if random.index(5) == 0 {
                queue.submit().unwrap();
            }
        }
        let timeout = if random.index(3) == 0 { Some(Duration::ZERO) } else { None };
        queue.wait(&mut completions, timeout).unwrap();
        for completion in completions.drain(..) {
            completion.result.unwrap();
            let (lane, start, length) = running.remove(&completion.token).expect("a token completes once");
            busy[lane] = false;
            finished += 1;
            assert_eq!(completion.buffer.is_some(), length > 0);
            if let Some(buffer) = completion.buffer {
                assert_eq!(buffer.len(), length);
                assert!(*buffer == model[start..start + length], "seed {seed} token {}", completion.token);
            }
        }
    }
    assert_eq!(queue.in_flight(), 0);
    let mut all = Buffer::with_bytes(SPAN);
    file.read_at(&mut all, 0).unwrap();
    assert!(*all == model[..], "seed {seed}");
}

/// A write with more slices than one system call takes, some of them empty.
pub fn many_slices_in_one_write(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("slices", mode).unwrap();
    let mut random = Random(11);
    let mut data = Buffer::zeroed(2600);
    fill(&mut random, &mut data);
    let data = Arc::new(data);
    let mut slices = Vec::new();
    for block in 0..data.blocks() {
        slices.push(SharedSlice::new(data.clone(), block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE));
        if block % 100 == 0 {
            slices.push(SharedSlice::new(data.clone(), 0..0));
        }
    }
    let mut queue = directory.queue(2).unwrap();
    queue.write(&file, 4096, slices.clone(), true, 1);
    queue.write(&file, 0, Vec::new(), false, 2);
    for completion in drain(queue.as_mut()) {
        completion.result.unwrap();
    }
    let check = || {
        let mut back = Buffer::zeroed(data.blocks());
        file.read_at(&mut back, 4096).unwrap();
        assert!(*back == **data);
    };
    check();
    file.punch(0, data.len() as u64 + 4096).unwrap();
    let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
    file.write_at(&bytes, 4096, false).unwrap();
    check();
    directory.remove("slices").unwrap();
}

pub fn queue_reports_errors(directory: &dyn Directory) {
    let file = directory.create("errors", IoMode::Direct).unwrap();
    let mut queue = directory.queue(4).unwrap();
    let mut wanted = 2;
    if file.mode() == IoMode::Direct {
        let data = Arc::new(Buffer::with_bytes(BLOCK_SIZE));
        queue.write(&file, 512, vec![SharedSlice::new(data.clone(), 0..BLOCK_SIZE)], false, 1);
        queue.write(&file, 0, vec![SharedSlice::new(data, 0..512)], false, 2);
        wanted += 2;
    }
    queue.read(&file, u64::MAX - 4095, Buffer::with_bytes(BLOCK_SIZE), 3);
    queue.poll_readable(-1, 4);
    let mut completions = Vec::new();
    while completions.len() < wanted {
        queue.wait(&mut completions, None).unwrap();
    }
    assert!(completions.iter().all(|completion| completion.result.is_err()));
    assert_eq!(file.len().unwrap(), 0);
    directory.remove("errors").unwrap();
}

pub fn polls_complete_once(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("polled", mode).unwrap();
    let mut queue = directory.queue(4).unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let (closing, closed_soon) = std::io::pipe().unwrap();
    queue.poll_readable(reader.as_raw_fd(), 100);
    queue.poll_readable(closing.as_raw_fd(), 101);
    assert_eq!(queue.in_flight(), 0);
    let mut completions = Vec::new();
    queue.wait(&mut completions, Some(Duration::from_millis(5))).unwrap();
    assert!(completions.is_empty());
    // Operations complete while a poll stays pending.
    for token in 0..20 {
        queue.read(&file, 0, Buffer::with_bytes(BLOCK_SIZE), token);
    }
    assert_eq!(drain(queue.as_mut()).len(), 20);
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        writer.write_all(b"x").unwrap();
        writer
    });
    queue.wait(&mut completions, None).unwrap();
    let _writer = late.join().unwrap();
    assert_eq!(completions.len(), 1);
    assert_eq!(completions[0].token, 100);
    assert!(completions[0].result.is_ok());
    // The descriptor is still readable, but a poll reports once.
    completions.clear();
    queue.wait(&mut completions, Some(Duration::from_millis(5))).unwrap();
    assert!(completions.is_empty());
    drop(closed_soon);
    queue.wait(&mut completions, Some(Duration::from_secs(20))).unwrap();
    assert_eq!(completions.len(), 1);
    assert_eq!(completions[0].token, 101);
    // A queue accepts more polls at once than its depth.
    for token in 0..300 {
        queue.poll_readable(reader.as_raw_fd(), token);
    }
    completions.clear();
    while completions.len() < 300 {
        queue.wait(&mut completions, Some(Duration::from_secs(20))).unwrap();
        assert!(!completions.is_empty());
    }
    assert!(completions.iter().all(|completion| completion.result.is_ok()));
    directory.remove("polled").unwrap();
}

pub fn waits_end(directory: &dyn Directory) {
    let mut queue = directory.queue(4).unwrap();
    let mut completions = Vec::new();
    queue.wait(&mut completions, None).unwrap();
    queue.wait(&mut completions, Some(Duration::ZERO)).unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    queue.poll_readable(reader.as_raw_fd(), 1);
    let start = Instant::now();
    queue.wait(&mut completions, Some(Duration::from_millis(30))).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(29));
    let start = Instant::now();
    queue.wait(&mut completions, Some(Duration::ZERO)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(completions.is_empty());
}

pub fn dropping_waits(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("dropped", mode).unwrap();
    for _ in 0..8 {
        let mut queue = directory.queue(32).unwrap();
        for block in 0..32u64 {
            let mut data = Buffer::with_bytes(BLOCK_SIZE);
            data.fill(block as u8 + 1);
            let slice = SharedSlice::new(Arc::new(data), 0..BLOCK_SIZE);
            queue.write(&file, block * BLOCK_SIZE as u64, vec![slice], false, block);
            queue.read(&file, block * BLOCK_SIZE as u64, Buffer::with_bytes(BLOCK_SIZE), 1000 + block);
        }
        drop(queue);
        let mut back = Buffer::zeroed(32);
        file.read_at(&mut back, 0).unwrap();
        assert!(back.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / BLOCK_SIZE + 1));
        file.set_len(0).unwrap();
    }
    directory.remove("dropped").unwrap();
}

pub fn queue_moves_between_threads(directory: &dyn Directory, mode: IoMode) {
    let file = directory.create("moved", mode).unwrap();
    file.set_len(1 << 20).unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let data = Arc::new(Buffer::zeroed(128));
    for round in 0..4 {
        let mut queue = directory.queue(16).unwrap();
        let push = |queue: &mut dyn Queue| {
            for token in 0..8 {
                queue.read(&file, token * 4096, Buffer::with_bytes(BLOCK_SIZE), token);
                queue.write(
                    &file,
                    4096,
                    vec![SharedSlice::new(data.clone(), 0..data.len())],
                    token % 4 == 0,
                    8 + token,
                );
            }
            queue.poll_readable(reader.as_raw_fd(), 100);
            queue.submit().unwrap();
        };
        // The pushing thread either lives on, or ends with all operations in flight.
        let completions = if round % 2 == 0 {
            push(queue.as_mut());
            std::thread::scope(|scope| scope.spawn(|| drain(queue.as_mut())).join().unwrap())
        } else {
            std::thread::scope(|scope| scope.spawn(|| push(queue.as_mut())).join().unwrap());
            drain(queue.as_mut())
        };
        assert_eq!(completions.len(), 16, "round {round}");
        assert!(completions.iter().all(|completion| completion.result.is_ok()), "round {round}");
        writer.write_all(b"x").unwrap();
        let mut polled = Vec::new();
        queue.wait(&mut polled, Some(Duration::from_secs(20))).unwrap();
        assert!(polled.len() == 1 && polled[0].token == 100 && polled[0].result.is_ok(), "round {round}: {polled:?}");
        (&reader).read_exact(&mut [0]).unwrap();
    }
    directory.remove("moved").unwrap();
}
