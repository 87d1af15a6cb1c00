//! The private pages of a process: its copies of pages that it maps copy-on-write (Linux,
//! Documentation/admin-guide/mm/pagemap).
//!
//! `PAGEMAP_SCAN` visits mapped pages only, so its time depends on their number. On kernels before 6.7 the entry of
//! every page in the range is read. A page that is present or in swap, and does not belong to a file, is a copy.

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Runs requested per call.
const RUNS_AT_ONCE: usize = 256;
/// Pagemap entries read per call on kernels without `PAGEMAP_SCAN`.
const ENTRIES_AT_ONCE: u64 = 4096;

const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_OF_A_FILE: u64 = 1 << 61;

const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

/// The open page map of a process.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens the page map of process `pid`.
    ///
    /// # Errors
    /// Those of opening `/proc/PID/pagemap`: another user's process, or one that is gone.
    pub fn open(pid: i32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/pagemap")).map(Self)
    }

    /// The runs of private pages in `addresses`, which begins and ends at page boundaries; in order.
    pub fn copies(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        match self.scan(addresses.clone()) {
            // The errors of a kernel without this call.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => self.entries(addresses),
            other => other,
        }
    }

    fn scan(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut regions = [Region::default(); RUNS_AT_ONCE];
        let mut at = addresses.start;
        while at < addresses.end {
            let mut scan = Scan::new(at..addresses.end, &mut regions);
            // SAFETY: `Scan` is the argument of `PAGEMAP_SCAN` as `linux/fs.h` has it; the kernel writes to it and to
            // the regions that it names, which outlive the call and are as many as it says.
            let count = unsafe { ioctl(&self.0, ScanCall(&mut scan))? };
            let reached = scan.walk_end;
            for region in regions.iter().take(count) {
                push(&mut found, region.start..region.end);
            }
            if reached <= at {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's scan of pages does not advance"));
            }
            at = reached;
        }
        Ok(found)
    }

    fn entries(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let page = rustix::param::page_size() as u64;
        let mut found = Vec::new();
        let mut entries = vec![0; (ENTRIES_AT_ONCE * 8) as usize];
        let mut at = addresses.start;
        while at < addresses.end {
            let count = ((addresses.end - at) / page).clamp(1, ENTRIES_AT_ONCE);
            let entries = &mut entries[..(count * 8) as usize];
            self.0.read_exact_at(entries, at / page * 8)?;
            for (index, entry) in (0u64..).zip(entries.chunks_exact(8)) {
                let entry = entry.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
                if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_OF_A_FILE == 0 {
                    let from = at + index * page;
                    push(&mut found, from..from + page);
                }
            }
            at += count * page;
        }
        Ok(found)
    }
}

fn push(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    region_count: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

const _: () = assert!(size_of::<Scan>() == 96 && size_of::<Region>() == 24);

impl Scan {
    fn new(addresses: Range<u64>, regions: &mut [Region]) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            flags: 0,
            start: addresses.start,
            end: addresses.end,
            walk_end: 0,
            regions: regions.as_mut_ptr() as u64,
            region_count: regions.len() as u64,
            pages_max: 0,
            // Selects pages that are present or in swap and do not belong to a file: the flag of a file is inverted.
            inverted: IS_FILE,
            all_of: IS_FILE,
            any_of: IS_PRESENT | IS_SWAPPED,
            returned: IS_PRESENT | IS_SWAPPED,
        }
    }
}

/// The ioctl. It returns how many regions it found.
struct ScanCall<'a>(&'a mut Scan);

// SAFETY: the opcode is that of the structure behind the pointer, which the kernel reads and writes.
unsafe impl Ioctl for ScanCall<'_> {
    type Output = usize;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<Scan>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<usize> {
        Ok(usize::try_from(out).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn pagemap_scan_and_pagemap_entries_find_the_same_pages() {
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(600 * page as u64).unwrap();
        // SAFETY: a new private mapping of a file of this length.
        let memory = unsafe {
            let (read_write, private) =
                (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::PRIVATE);
            let start = rustix::mm::mmap(std::ptr::null_mut(), 600 * page, read_write, private, &file, 0).unwrap();
            std::slice::from_raw_parts_mut(start.cast::<u8>(), 600 * page)
        };
        let start = memory.as_ptr() as u64;
        let page_of = |index: u64| start + index * page as u64;
        let seen: u64 = memory.iter().step_by(page).map(|byte| u64::from(*byte)).sum();
        assert_eq!(seen, 0);
        for index in [3, 4, 5, 300, 599] {
            memory[index * page + 7] = 1;
        }
        let map = PageMap::open(std::process::id() as i32).unwrap();
        let all = page_of(0)..page_of(600);
        let expected = [page_of(3)..page_of(6), page_of(300)..page_of(301), page_of(599)..page_of(600)];
        assert_eq!(map.entries(all.clone()).unwrap(), expected);
        assert_eq!(map.copies(all).unwrap(), expected);
        assert_eq!(map.copies(page_of(4)..page_of(5)).unwrap().first(), Some(&(page_of(4)..page_of(5))));
        // There are more runs than one call returns.
        for index in (0..600).step_by(2) {
            memory[index * page] = 1;
        }
        let all = page_of(0)..page_of(600);
        let many = map.copies(all.clone()).unwrap();
        assert!(many.len() > RUNS_AT_ONCE, "{}", many.len());
        assert_eq!(many, map.entries(all).unwrap());
    }
}
