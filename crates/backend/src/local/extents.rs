//! Which ranges of a file take space in the file system.
//!
//! `SEEK_DATA` is not the answer where there is a better one: space that was reserved and never written is a hole to it
//! on ext4 and XFS. `FIEMAP` lists extents as the file system has them, reserved ones and those still waiting for their
//! place included. File systems without it (tmpfs, NFS) are asked by `SEEK_DATA`, which on them sees every byte that
//! was ever written.

use std::fs::File;
use std::io;
use std::ops::Range;

/// The first run of extents that ends after `offset`; it may begin before, and may reach past the end of the file.
pub(super) fn next_allocated(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    #[cfg(target_os = "linux")]
    match fiemap::first_run(file, offset) {
        Err(error) if matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOTTY.raw_os_error()) => {}
        answer => return answer,
    }
    by_seeking(file, offset)
}

/// Moves the file position, which nothing here relies on: all I/O is positional.
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
            // The file was cut in between.
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

    use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
    use std::fs::File;
    use std::io;
    use std::ops::Range;

    /// Extents asked for at a time: enough that a fragmented file costs few calls, small enough for the stack.
    const EXTENTS_MAX: usize = 32;

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
    struct Request {
        header: Header,
        extents: [Extent; EXTENTS_MAX],
    }

    const _: () = assert!(size_of::<Header>() == 32 && size_of::<Extent>() == 56);

    /// The number encodes the size of the header alone, as in the C macro.
    const FS_IOC_FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);

    /// The first extent that ends after `offset`, with those that follow it without a gap.
    pub(super) fn first_run(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
        let empty = Extent { logical: 0, physical: 0, length: 0, reserved_wide: [0; 2], flags: 0, reserved: [0; 3] };
        let mut request = Request {
            header: Header {
                start: offset,
                length: u64::MAX - offset,
                flags: 0,
                mapped_extents: 0,
                extent_count: EXTENTS_MAX as u32,
                reserved: 0,
            },
            extents: [empty; EXTENTS_MAX],
        };
        // SAFETY: `Request` is the header of `FS_IOC_FIEMAP` followed by room for as many extents as the header says;
        // the kernel writes no more than these.
        unsafe { ioctl(file, Updater::<FS_IOC_FIEMAP, Request>::new(&mut request))? };

        let mapped = (request.header.mapped_extents as usize).min(EXTENTS_MAX);
        let mut run: Option<Range<u64>> = None;
        for extent in &request.extents[..mapped] {
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
}
