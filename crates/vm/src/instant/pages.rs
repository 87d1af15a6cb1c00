//! Pages that a process has changed in a copy-on-write mapping of a file.
//!
//! A child's memory consists of its image's file and private copies of the pages that the child has written. The kernel
//! reports which pages are private ([`PageMap`]). The private pages are read through `/proc/PID/mem`, which also reads
//! swapped pages.

use backend::pagemap::PageMap;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// Bytes of memory that a thread scans at a time.
const STRIPE: u64 = 16 << 20;
/// Bytes of memory that are copied at a time: half the size of the processor's L2 cache.
const PIECE: usize = 256 << 10;
/// Most threads that copy memory.
const WORKERS_MAX: usize = 4;

/// A mapping of a file in the address space of a process.
struct Mapping {
    addresses: Range<u64>,
    /// Offset in the file at which the mapping starts.
    offset: u64,
}

impl Mapping {
    /// Splits the mapping into parts for several threads.
    fn stripes(&self) -> impl Iterator<Item = Self> + use<'_> {
        let Range { start, end } = self.addresses;
        (start..end)
            .step_by(STRIPE as usize)
            .map(move |at| Self { addresses: at..end.min(at + STRIPE), offset: self.offset + (at - start) })
    }
}

fn mappings(pid: i32, file: &Path) -> Result<Vec<Mapping>> {
    let path = format!("/proc/{pid}/maps");
    let text = std::fs::read_to_string(&path).during(|| format!("reading '{path}'"))?;
    let name = file.display().to_string();
    // A line of `/proc/PID/maps`: "55d0c0000000-55d0d0000000 rw-p 00000000 00:1a 1234    /dev/shm/..."
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let offset = fields.nth(1)?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Mapping { addresses: number(from)?..number(to)?, offset: number(offset)? })
    };
    Ok(text.lines().filter(|line| line.ends_with(&format!(" {name}"))).filter_map(parse).collect())
}

/// Copies the pages that process `pid` has changed in its mapping of `file` to the same offsets of `to`; returns the
/// number of bytes. Pages that the process changes meanwhile may be missing or torn, so a copy is complete only if the
/// process is paused.
pub fn copy_changed(pid: i32, file: &Path, to: &File) -> Result<u64> {
    let mappings = mappings(pid, file)?;
    if mappings.is_empty() {
        let text = format!("process {pid} does not map '{}'", file.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let opening =
        || format!("opening the memory of process {pid} (its user or kernel.yama.ptrace_scope may forbid that)");
    let map = PageMap::open(pid).during(opening)?;
    let work = Work { pid, map, memory: File::open(format!("/proc/{pid}/mem")).during(opening)?, to };
    let stripes: Vec<Mapping> = mappings.iter().flat_map(Mapping::stripes).collect();
    let (next, copied) = (AtomicUsize::new(0), AtomicU64::new(0));
    let workers = thread::available_parallelism().map_or(1, |count| count.get().clamp(1, WORKERS_MAX));
    let run = || -> Result<()> {
        let mut piece = vec![0; PIECE];
        while let Some(stripe) = stripes.get(next.fetch_add(1, Ordering::Relaxed)) {
            copied.fetch_add(work.copy(stripe, &mut piece)?, Ordering::Relaxed);
        }
        Ok(())
    };
    let died = || Error::new(ErrorKind::Io, "a thread that copies memory has panicked");
    thread::scope(|scope| {
        let others: Vec<_> = (1..workers).map(|_| scope.spawn(run)).collect();
        let mine = run();
        others.into_iter().try_for_each(|other| other.join().unwrap_or_else(|_| Err(died())))?;
        mine
    })?;
    Ok(copied.into_inner())
}

struct Work<'a> {
    pid: i32,
    map: PageMap,
    memory: File,
    to: &'a File,
}

impl Work<'_> {
    /// Copies the changed pages of a part of a mapping; returns the number of bytes.
    fn copy(&self, stripe: &Mapping, piece: &mut [u8]) -> Result<u64> {
        let listing = || format!("listing the private pages of process {}", self.pid);
        let mut copied = 0;
        for run in self.map.copies(stripe.addresses.clone()).during(listing)? {
            copied += run.end - run.start;
            self.copy_run(run.clone(), stripe.offset + (run.start - stripe.addresses.start), piece)?;
        }
        Ok(copied)
    }

    fn copy_run(&self, addresses: Range<u64>, offset: u64, piece: &mut [u8]) -> Result<()> {
        let mut at = addresses.start;
        while at < addresses.end {
            let piece = &mut piece[..(addresses.end - at).min(PIECE as u64) as usize];
            self.memory.read_exact_at(piece, at).during(|| format!("reading the memory of process {}", self.pid))?;
            self.to.write_all_at(piece, offset + (at - addresses.start)).during(|| "keeping memory".into())?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Makes a sparse copy of a memory file.
pub fn copy_file(from: &Path, to: &Path) -> Result<File> {
    use rustix::fs::{SeekFrom, seek};
    let what = || format!("copying '{}' to '{}'", from.display(), to.display());
    let source = File::open(from).during(what)?;
    let target = private::create_new(to).during(what)?;
    let length = source.metadata().during(what)?.len();
    target.set_len(length).during(what)?;
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < length {
        let data = match seek(&source, SeekFrom::Data(at)) {
            Ok(data) => data,
            // The rest of the file is a hole.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(Error::io(what(), e.into())),
        };
        let end = seek(&source, SeekFrom::Hole(data)).map_err(|e| Error::io(what(), e.into()))?;
        at = data;
        while at < end {
            let piece = &mut piece[..(end - at).min(PIECE as u64) as usize];
            source.read_exact_at(piece, at).during(what)?;
            target.write_all_at(piece, at).during(what)?;
            at += piece.len() as u64;
        }
    }
    Ok(target)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    /// A program that maps a file copy-on-write, changes two of its pages, and waits.
    const WRITER: &str = "import mmap,sys\n\
        f=open(sys.argv[1],'rb')\n\
        m=mmap.mmap(f.fileno(),0,flags=mmap.MAP_PRIVATE,prot=mmap.PROT_READ|mmap.PROT_WRITE)\n\
        x=m[8192]\n\
        m[4096:4100]=b'abcd'\n\
        m[40960]=7\n\
        print('ready',flush=True)\n\
        sys.stdin.read()\n";

    #[test]
    fn only_pages_that_the_process_changed_are_copied() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (file, copy) = (folder.path().join("memory"), folder.path().join("copy"));
        let original: Vec<u8> = (0..16 * 4096u32).map(|at| (at / 4096) as u8).collect();
        std::fs::write(&file, &original).unwrap();
        let mut child = Command::new("python3")
            .args(["-c", WRITER, file.to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let target = copy_file(&file, &copy).unwrap();
        assert_eq!(copy_changed(child.id() as i32, &file, &target).unwrap(), 8192);
        let mut expected = original.clone();
        expected[4096..4100].copy_from_slice(b"abcd");
        expected[40960] = 7;
        assert!(std::fs::read(&copy).unwrap() == expected);
        assert!(std::fs::read(&file).unwrap() == original);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn copied_pages_keep_holes() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (file, copy) = (folder.path().join("memory"), folder.path().join("copy"));
        let source = File::create(&file).unwrap();
        source.set_len(64 << 20).unwrap();
        source.write_all_at(&[9; 4096], 32 << 20).unwrap();
        copy_file(&file, &copy).unwrap();
        let made = std::fs::metadata(&copy).unwrap();
        assert_eq!(made.len(), 64 << 20);
        assert!(made.blocks() * 512 < 1 << 20);
    }
}
