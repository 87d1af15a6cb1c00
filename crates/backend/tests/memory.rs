//! Buffers allocate memory when it is used, and return it to the system. The tests have their own process, because
//! memory is counted per process.

#![allow(clippy::unwrap_used)]

use backend::{BLOCK_SIZE, Buffer};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by each test, so that a test counts only its own memory.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn memory_of_freed_buffers_returns_to_the_system() {
    let _alone = alone();
    let many = |blocks: usize, count: usize| {
        (0..count)
            .map(|_| {
                let mut buffer = Buffer::recycled(blocks);
                buffer.fill(7);
                buffer
            })
            .collect::<Vec<_>>()
    };
    let before = resident();
    let (small, large) = (many(1, 16 << 10), many(256, 64));
    assert!(resident() > before + (120 << 20));
    drop((small, large));
    // The first call counts the buffers as used since the last call, the second as idle.
    backend::release_idle();
    backend::release_idle();
    assert!(resident() < before + (24 << 20), "{} after {before}", resident());
    // Released memory can be used again, with any content.
    let again = many(1, 100);
    assert!(again.iter().all(|buffer| buffer.iter().all(|byte| *byte == 7)));
    assert!(Buffer::zeroed(4).iter().all(|byte| *byte == 0));
}

#[test]
fn memory_of_a_large_request_is_allocated_while_its_bytes_arrive() {
    let _alone = alone();
    let before = resident();
    // Payloads of large requests: 8193 blocks are the largest payload, which begins within a block. One block of each
    // payload has arrived.
    let mut announced: Vec<Buffer> = [8193, 8192, 4000, 256].repeat(4).into_iter().map(Buffer::recycled).collect();
    announced.iter_mut().for_each(|buffer| buffer[..BLOCK_SIZE].fill(7));
    assert!(resident() < before + (16 << 20), "{} after {before}", resident());
    assert!(announced.iter().all(|buffer| buffer[BLOCK_SIZE - 1] == 7));
}
