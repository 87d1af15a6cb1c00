//! Which ranges of a file are allocated in the file system.
//!
//! `FIEMAP` is preferred: it lists all extents, including reserved (unwritten) and delayed ones, while `SEEK_DATA` on
//! ext4 and XFS reports an unwritten extent as a hole. File systems without `FIEMAP` (tmpfs, NFS) are queried by
//! `SEEK_DATA`, which finds every written byte on these file systems.
//!
//! With its SYNC flag, `FIEMAP` writes dirty pages out, so that delayed extents are allocated. Meanwhile it locks the
//! file, and every write to the file waits: a third of a second while a guest writes at random. So on file systems
//! where the result is the same, dirty pages are written out before the call, without that lock.

use crate::Placement;
use std::fs::File;
use std::io;
use std::ops::Range;

/// Extents at and after `offset`, as many as one call returns. The first may begin before `offset`; the last may end
/// past the end of the file. With `place`, the kernel first allocates delayed extents. Without `FIEMAP`, only the
/// allocated ranges are known.
pub(super) fn placements(file: &File, offset: u64, place: bool) -> io::Result<Vec<Placement>> {
    #[cfg(target_os = "linux")]
    match fiemap::placements(file, offset, place) {
        Err(error) if is_missing(&error) => {}
        answer => return answer,
    }
    #[cfg(not(target_os = "linux"))]
    let _ = place;
    let run = by_seeking(file, offset)?;
    Ok(run.map(|range| Placement { range, physical: None, written: true }).into_iter().collect())
}

/// The first run of extents that ends after `offset`; it may begin before, and may reach past the end of the file.
pub(super) fn next_allocated(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    #[cfg(target_os = "linux")]
    match fiemap::first_run(file, offset) {
        Err(error) if is_missing(&error) => {}
        answer => return answer,
    }
    by_seeking(file, offset)
}

/// Whether the extent map of the file system is up to date once a page has been written out. On other file systems
/// delayed extents are certain to be allocated only by `FIEMAP` with its SYNC flag.
#[cfg(target_os = "linux")]
pub(super) fn places_by_writing_out(file: &File) -> bool {
    /// `EXT4_SUPER_MAGIC` and `XFS_SUPER_MAGIC` of `linux/magic.h`.
    const KNOWN: [u64; 2] = [0xef53, 0x5846_5342];
    rustix::fs::fstatfs(file).is_ok_and(|found| KNOWN.contains(&(found.f_type as u64)))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn places_by_writing_out(_file: &File) -> bool {
    false
}

/// Whether the file system has no `FIEMAP`.
#[cfg(target_os = "linux")]
fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
        || error.raw_os_error() == Some(rustix::io::Errno::NOTTY.raw_os_error())
}

/// Changes the file position, which no other code uses: all I/O is positional.
fn by_seeking(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    #[cfg(any(target_os = "linux", target_os = "freebsd", target_vendor = "apple"))]
    {
        use rustix::fs::{SeekFrom, seek};
        let start = match seek(file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match seek(file, SeekFrom::Hole(start)) {
            Ok(end) => Ok(Some(start..end)),
            // The file was truncated between the two calls.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "freebsd", target_vendor = "apple")))]
    {
        let end = file.metadata()?.len();
        Ok((offset < end).then_some(offset..end))
    }
}

#[cfg(target_os = "linux")]
mod fiemap {
    //! The extent map of Linux file systems (`FS_IOC_FIEMAP`, layout as in `linux/fiemap.h`).

    use crate::Placement;
    use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
    use std::fs::File;
    use std::io;
    use std::ops::Range;

    /// Extents requested per call when looking for the next run: few calls for a fragmented file, and little stack.
    const EXTENTS_NEXT: usize = 32;
    /// Extents requested per call when listing them all: 28 KiB.
    const EXTENTS_LISTED: usize = 512;

    /// `FIEMAP_FLAG_SYNC`: allocate delayed extents before the answer.
    const FLAG_SYNC: u32 = 0x1;
    /// Extents without an address of their own on the device: unknown, delayed, encoded, inline, tail.
    const EXTENT_NOWHERE: u32 = 0x2 | 0x4 | 0x8 | 0x200 | 0x400;
    /// Reserved and never written.
    const EXTENT_UNWRITTEN: u32 = 0x800;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Header {
        start: u64,
        length: u64,
        flags: u32,
        mapped_extents: u32,
        extent_count: u32,
        reserved: u32,
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Extent {
        logical: u64,
        physical: u64,
        length: u64,
        reserved_wide: [u64; 2],
        flags: u32,
        reserved: [u32; 3],
    }

    #[repr(C)]
    struct Request<const EXTENTS: usize> {
        header: Header,
        extents: [Extent; EXTENTS],
    }

    const _: () = assert!(size_of::<Header>() == 32 && size_of::<Extent>() == 56);
    const _: () = assert!(size_of::<Request<2>>() == 32 + 2 * 56);

    /// The number encodes the size of the header alone, as in the C macro.
    const FS_IOC_FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);

    impl<const EXTENTS: usize> Request<EXTENTS> {
        /// Queries the extents that end after `offset`.
        fn new(offset: u64, flags: u32) -> Self {
            let empty =
                Extent { logical: 0, physical: 0, length: 0, reserved_wide: [0; 2], flags: 0, reserved: [0; 3] };
            let header = Header {
                start: offset,
                length: u64::MAX - offset,
                flags,
                mapped_extents: 0,
                extent_count: EXTENTS as u32,
                reserved: 0,
            };
            Self { header, extents: [empty; EXTENTS] }
        }

        fn answer(&mut self, file: &File) -> io::Result<&[Extent]> {
            // SAFETY: `Request` is the header of `FS_IOC_FIEMAP` followed by room for as many extents as the header
            // says; the kernel writes no more than these.
            unsafe { ioctl(file, Updater::<FS_IOC_FIEMAP, Self>::new(self))? };
            Ok(&self.extents[..(self.header.mapped_extents as usize).min(EXTENTS)])
        }
    }

    /// The first extent that ends after `offset`, with those that follow it without a gap.
    pub(super) fn first_run(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
        let mut request = Request::<EXTENTS_NEXT>::new(offset, 0);
        let mut run: Option<Range<u64>> = None;
        for extent in request.answer(file)? {
            let end = extent.logical.saturating_add(extent.length);
            match &mut run {
                None if end <= offset => {}
                None => run = Some(extent.logical..end),
                Some(run) if run.end == extent.logical => run.end = end,
                Some(_) => break,
            }
        }
        Ok(run)
    }

    /// The extents that end after `offset`; with `place`, the kernel first allocates delayed extents.
    pub(super) fn placements(file: &File, offset: u64, place: bool) -> io::Result<Vec<Placement>> {
        let flags = if place { FLAG_SYNC } else { 0 };
        let mut request = Box::new(Request::<EXTENTS_LISTED>::new(offset, flags));
        let extents = request.answer(file)?.iter().map(|extent| Placement {
            range: extent.logical..extent.logical.saturating_add(extent.length),
            physical: (extent.flags & EXTENT_NOWHERE == 0).then_some(extent.physical),
            written: extent.flags & EXTENT_UNWRITTEN == 0,
        });
        Ok(extents.filter(|placement| placement.range.end > offset).collect())
    }
}
