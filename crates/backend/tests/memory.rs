//! Memory of buffers goes back to the system. A process of its own: what is in use is counted for all of it.

#![allow(clippy::unwrap_used)]

use backend::Buffer;

/// Memory of this process that is in use, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn what_no_buffer_needs_any_more_goes_back_to_the_system() {
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
    // In use since the last call, then not.
    backend::release_idle();
    backend::release_idle();
    assert!(resident() < before + (24 << 20), "{} after {before}", resident());
    // It can be used again, whatever it holds.
    let again = many(1, 100);
    assert!(again.iter().all(|buffer| buffer.iter().all(|byte| *byte == 7)));
    assert!(Buffer::zeroed(4).iter().all(|byte| *byte == 0));
}
