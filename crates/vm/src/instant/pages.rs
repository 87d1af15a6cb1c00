//! The pages that a process has changed in a file it maps copy-on-write.
//!
//! A child's memory is its image's file, and its own copies of the pages it wrote. `/proc/PID/pagemap` tells which: a
//! page that is there or in swap, and does not belong to a file, is a copy (Linux, Documentation/admin-guide/mm/pagemap).
//! Reading a copy goes through `/proc/PID/mem`, which brings it back from swap.

use backend::{Error, ErrorKind, IoContext, Result};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Entries of the page map read at a time: 2 MiB of them stand for 1 GiB of memory.
const ENTRIES: usize = 256 << 10;
/// Bytes of memory moved at a time.
const PIECE: usize = 1 << 20;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_A_FILE: u64 = 1 << 61;

/// Where a process has a file mapped.
struct Mapping {
    addresses: Range<u64>,
    /// Byte of the file at the beginning.
    offset: u64,
}

fn mappings(pid: i32, file: &Path) -> Result<Vec<Mapping>> {
    let path = format!("/proc/{pid}/maps");
    let text = std::fs::read_to_string(&path).during(|| format!("reading '{path}'"))?;
    let name = file.display().to_string();
    // "55d0c0000000-55d0d0000000 rw-p 00000000 00:1a 1234    /dev/shm/..."
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let offset = fields.nth(1)?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Mapping { addresses: number(from)?..number(to)?, offset: number(offset)? })
    };
    Ok(text.lines().filter(|line| line.ends_with(&name)).filter_map(parse).collect())
}

/// Copies the pages that process `pid`, standing still, has changed in its mapping of `file` to the same places of
/// `to`; how many bytes.
pub fn copy_changed(pid: i32, file: &Path, to: &File) -> Result<u64> {
    let mappings = mappings(pid, file)?;
    if mappings.is_empty() {
        let text = format!("process {pid} does not map '{}'", file.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let open = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        File::open(&path).during(|| format!("opening '{path}'"))
    };
    let (map, memory) = (open("pagemap")?, open("mem")?);
    let page = rustix::param::page_size() as u64;
    let mut entries = vec![0; ENTRIES * 8];
    let mut piece = vec![0; PIECE];
    let mut copied = 0;
    for Mapping { addresses, offset } in mappings {
        let mut at = addresses.start;
        while at < addresses.end {
            let pages = ((addresses.end - at) / page).min(ENTRIES as u64);
            let part = &mut entries[..pages as usize * 8];
            map.read_exact_at(part, at / page * 8).during(|| format!("asking for the pages of process {pid}"))?;
            let is_copy = |entry: &[u8]| {
                let entry = entry.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
                entry & (PRESENT | SWAPPED) != 0 && entry & OF_A_FILE == 0
            };
            let mut index = 0;
            while index < pages {
                let copies = part[index as usize * 8..].chunks_exact(8);
                let run = copies.take_while(|entry| is_copy(entry)).count() as u64;
                let mut from = at + index * page;
                let end = from + run * page;
                while from < end {
                    let piece = &mut piece[..(end - from).min(PIECE as u64) as usize];
                    memory.read_exact_at(piece, from).during(|| format!("reading the memory of process {pid}"))?;
                    to.write_all_at(piece, offset + (from - addresses.start)).during(|| "keeping memory".into())?;
                    from += piece.len() as u64;
                }
                copied += run * page;
                index += run.max(1);
            }
            at += pages * page;
        }
    }
    Ok(copied)
}

/// Makes a copy of a memory file, its holes left out.
pub fn copy_file(from: &Path, to: &Path) -> Result<File> {
    use rustix::fs::{SeekFrom, seek};
    let what = || format!("copying '{}' to '{}'", from.display(), to.display());
    let source = File::open(from).during(what)?;
    let target = File::create_new(to).during(what)?;
    let length = source.metadata().during(what)?.len();
    target.set_len(length).during(what)?;
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < length {
        let data = match seek(&source, SeekFrom::Data(at)) {
            Ok(data) => data,
            // Nothing but a hole up to the end.
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

    /// A process that maps a file copy-on-write, changes two of its pages, and waits.
    const WRITER: &str = "import mmap,sys\n\
        f=open(sys.argv[1],'rb')\n\
        m=mmap.mmap(f.fileno(),0,flags=mmap.MAP_PRIVATE,prot=mmap.PROT_READ|mmap.PROT_WRITE)\n\
        x=m[8192]\n\
        m[4096:4100]=b'abcd'\n\
        m[40960]=7\n\
        print('ready',flush=True)\n\
        sys.stdin.read()\n";

    #[test]
    fn what_a_process_changed_and_nothing_else() {
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
    fn holes_stay_holes() {
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
