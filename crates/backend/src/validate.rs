//! Arguments that every implementation refuses before any I/O: names that are paths, offsets beyond the kernel's range,
//! and direct I/O that is not aligned.

use crate::{BLOCK_SIZE, IoMode};
use std::io;

/// A name is one component of a path.
pub(crate) fn check_name(name: &str) -> io::Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name for a file")));
    }
    Ok(())
}

/// Checks that a range ends at most at 2^63 - 1, because the kernel's file offsets are signed.
pub(crate) fn check_range(offset: u64, length: u64) -> io::Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{length} bytes at {offset} reach past the greatest possible offset"),
        )),
    }
}

/// As [`check_range`], for the slices of one write; returns their total length.
pub(crate) fn check_slices(mode: IoMode, slices: &[&[u8]], offset: u64) -> io::Result<u64> {
    let mut total = 0u64;
    for slice in slices {
        check_alignment(mode, offset.wrapping_add(total), slice)?;
        total = total.saturating_add(slice.len() as u64);
    }
    check_range(offset, total)?;
    Ok(total)
}

/// Refuses direct I/O that is not in whole blocks, at a block's offset, in aligned memory. The check is stricter than
/// most devices, so that code tested on one device works on every other.
pub(crate) fn check_alignment(mode: IoMode, offset: u64, memory: &[u8]) -> io::Result<()> {
    let aligned = |number: u64| number.is_multiple_of(BLOCK_SIZE as u64);
    let fits = aligned(offset) && aligned(memory.len() as u64) && aligned(memory.as_ptr().addr() as u64);
    if mode == IoMode::Direct && !memory.is_empty() && !fits {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("direct I/O of {} bytes at {offset} is not in whole, aligned 4 KiB blocks", memory.len()),
        ));
    }
    Ok(())
}
