//! Shared by the tests of the formats: random data, reading a layer as a chain does, QEMU's tools, files.

use crate::{Content, Layer, Result};
use backend::local::{LocalDirectory, LocalQueues};
use backend::{Directory, File, IoMode, LocalFile, LocalPart};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
pub(crate) use testkit::Random;
use testkit::environment::number;

/// Bytes determined by `seed`, different in every word.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut out: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    out.truncate(length);
    out
}

/// Bytes that compress to about a quarter.
pub(crate) fn compressible(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words = (0..length.div_ceil(8)).flat_map(|at| match at % 4 {
        0 => random.next().to_le_bytes(),
        _ => seed.to_le_bytes(),
    });
    let mut out: Vec<u8> = words.collect();
    out.truncate(length);
    out
}

/// Reads a range as a chain does: ranges that the layer does not store are read from `parent`, or are zeros.
pub(crate) fn read(layer: &dyn Layer, range: Range<u64>, parent: Option<&[u8]>) -> Result<Vec<u8>> {
    let mut out = vec![0; (range.end - range.start) as usize];
    let _epoch = layer.epoch();
    let mut extents = Vec::new();
    let mut at = range.start;
    while at < range.end {
        extents.clear();
        layer.map(at..range.end, 7, &mut extents)?;
        assert!(!extents.is_empty() && extents.len() <= 7, "at least one extent, and at most the requested number");
        for extent in &extents {
            assert!(extent.start == at && extent.length > 0 && at + extent.length <= range.end, "extents adjoin");
            let part = &mut out[(at - range.start) as usize..][..extent.length as usize];
            match extent.content {
                Content::Absent => {
                    if let Some(parent) = parent {
                        part.copy_from_slice(&parent[at as usize..][..part.len()]);
                    }
                }
                Content::Zero => {}
                Content::Data { file, offset } => layer.file(file)?.read_at(part, offset).unwrap(),
                Content::Encoded => layer.read_encoded(at, part)?,
            }
            at += extent.length;
        }
    }
    Ok(out)
}

/// Reads the whole layer.
pub(crate) fn read_all(layer: &dyn Layer, parent: Option<&[u8]>) -> Vec<u8> {
    read(layer, 0..layer.capacity(), parent).unwrap()
}

/// A temporary folder, removed with this value.
pub(crate) struct Folder {
    pub(crate) path: tempfile::TempDir,
    pub(crate) directory: LocalDirectory,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let path = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(path.path(), LocalQueues::Threads).unwrap();
        Self { path, directory }
    }

    pub(crate) fn file(&self, name: &str) -> Arc<dyn File> {
        self.directory.open(name, IoMode::Buffered).unwrap()
    }

    pub(crate) fn create(&self, name: &str) -> Arc<dyn File> {
        self.directory.create(name, IoMode::Buffered).unwrap()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path.path().join(name), bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path.path().join(name)).unwrap()
    }

    /// Runs one of QEMU's programs in the folder; it must succeed.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        let (success, output) = self.try_run(program, arguments);
        assert!(success, "{program} {arguments:?}: {output}");
        output
    }

    pub(crate) fn try_run(&self, program: &str, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(program).args(arguments).current_dir(self.path.path()).output();
        let output = output.unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"));
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }
}

/// The numbers of the damaged images that a test makes; each number determines one image. A failing test prints the
/// last one.
pub(crate) struct Damages(Range<u64>);

/// `LAMINA_DAMAGES` is how many damaged images are made (20,000 by default; 0: without end), `LAMINA_DAMAGES_FROM` the
/// first number, which is 0 by default.
pub(crate) fn damages() -> Damages {
    let (first, count) = (number("LAMINA_DAMAGES_FROM", 0), number("LAMINA_DAMAGES", 20_000));
    Damages(first..if count == 0 { u64::MAX } else { first.saturating_add(count) })
}

impl Iterator for Damages {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0.next()
    }
}

impl Drop for Damages {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("LAMINA_DAMAGES_FROM={}: the image with this number", self.0.start.saturating_sub(1));
        }
    }
}

/// A file in memory.
pub(crate) fn memory_file(bytes: &[u8]) -> Arc<dyn File> {
    let disk = backend::simulated::SimulatedDisk::new(1, Default::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    file.write_at(&[bytes], 0, true).unwrap();
    file
}

/// A request of a [`Gated`] file.
pub(crate) enum Request {
    Write,
    Sync,
    Reserve(Range<u64>),
}

/// A file that calls a function of a test before it forwards a request, so that the test can refuse the request.
pub(crate) struct Gated<F> {
    pub(crate) inner: Arc<dyn File>,
    pub(crate) gate: F,
}

impl<F: Fn(Request) -> io::Result<()> + Send + Sync> File for Gated<F> {
    backend::forward_file!(inner: len, set_len, read_at, punch);

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        (self.gate)(Request::Write)?;
        self.inner.write_at(slices, offset, durable)
    }
    fn sync(&self) -> io::Result<()> {
        (self.gate)(Request::Sync)?;
        self.inner.sync()
    }
    fn local(&self) -> Option<LocalPart<'_>> {
        Some(LocalPart { file: self, descriptor: None, mode: self.inner.mode() })
    }
}

impl<F: Fn(Request) -> io::Result<()> + Send + Sync> LocalFile for Gated<F> {
    fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        (self.gate)(Request::Reserve(offset..offset + length))?;
        self.inner.reserve(offset, length)
    }
    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.inner.next_allocated(offset)
    }
    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }
}

/// A file that is changed during a read: if `armed`, the next read from `start` on returns its first `before` bytes
/// from before the call of `change`, and the other bytes from after it.
pub(crate) struct ChangedInRead<F> {
    pub(crate) inner: Arc<dyn File>,
    pub(crate) armed: Arc<AtomicBool>,
    pub(crate) start: u64,
    pub(crate) before: usize,
    pub(crate) change: F,
}

impl<F: Fn() + Send + Sync> File for ChangedInRead<F> {
    backend::forward_file!(inner: len, set_len, write_at, sync, punch, local);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset != self.start || !self.armed.swap(false, Ordering::SeqCst) {
            return self.inner.read_at(buffer, offset);
        }
        let (first, rest) = buffer.split_at_mut(self.before);
        self.inner.read_at(first, offset)?;
        (self.change)();
        self.inner.read_at(rest, offset + self.before as u64)
    }
}

/// A file of a process that is killed at a flush: only the number of flushes that `left` has are made.
pub(crate) fn killed_at_a_flush(inner: Arc<dyn File>, left: Arc<AtomicU32>) -> Arc<dyn File> {
    let gate = move |request| match request {
        Request::Sync => {
            let taken = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            taken.map(drop).map_err(|_| io::Error::other("the process is killed"))
        }
        _ => Ok(()),
    };
    Arc::new(Gated { inner, gate })
}

/// A file that counts its flushes, of which the one with number `fails_at` fails; no flush has the number 0.
pub(crate) fn failing_at_a_flush(inner: Arc<dyn File>, count: Arc<AtomicU32>, fails_at: u32) -> Arc<dyn File> {
    let gate = move |request| match request {
        Request::Sync if count.fetch_add(1, Ordering::SeqCst) + 1 == fails_at => {
            Err(io::Error::other("the device fails"))
        }
        _ => Ok(()),
    };
    Arc::new(Gated { inner, gate })
}

/// Peak memory of this process so far, in bytes.
pub(crate) fn peak_memory() -> u64 {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// By how many bytes the peak has grown since [`peak_memory`] returned a value. The kernel adds up the counters of its
/// processors only now and then, so that a later value can be lower.
pub(crate) fn memory_since(before: u64) -> u64 {
    peak_memory().saturating_sub(before)
}

/// Changes some bytes of an image: single bits, words with critical values, runs, or its length.
pub(crate) fn mutate(random: &mut Random, bytes: &mut Vec<u8>, weak_spots: &[Range<usize>]) {
    for _ in 0..1 + random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let range = match weak_spots.is_empty() || random.percent(20) {
            true => 0..bytes.len(),
            false => weak_spots[random.below(weak_spots.len() as u64) as usize].clone(),
        };
        let range = range.start.min(bytes.len() - 1)..range.end.min(bytes.len()).max(1);
        let at = range.start + random.below((range.end.saturating_sub(range.start)) as u64) as usize;
        let at = at.min(bytes.len() - 1);
        match random.below(10) {
            0..3 => bytes[at] ^= 1 << random.below(8),
            3..5 => bytes[at] = random.next() as u8,
            5..8 => {
                let words =
                    [0, 1, u64::MAX, u64::MAX / 2, 1 << 31, 1 << 32, 1 << 63, 0xffff_ffff, random.below(1 << 20)];
                let word = words[random.below(words.len() as u64) as usize].to_le_bytes();
                let at = if random.percent(70) { at / 4 * 4 } else { at };
                let end = (at + if random.percent(50) { 4 } else { 8 }).min(bytes.len());
                bytes[at..end].copy_from_slice(&word[..end - at]);
            }
            8 => {
                let length = random.below(64).min((bytes.len() - at) as u64) as usize;
                bytes[at..at + length].fill(random.next() as u8);
            }
            _ if random.percent(20) => bytes.truncate(at),
            _ => {}
        }
    }
}

/// The bytes that a page in docs/format shows under `<!-- bytes: name -->`; bytes that the page does not show are zero.
pub(crate) fn shown(page: &str, name: &str, length: usize) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/format").join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let mark = format!("<!-- bytes: {name} -->\n```\n");
    let block = text.split(mark.as_str()).nth(1).unwrap_or_else(|| panic!("{page} shows no {name}"));
    let mut bytes = vec![0; length];
    for line in block.split("```").next().unwrap().lines() {
        let mut words = line.split_whitespace();
        let at = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        for (at, word) in (at..).zip(words) {
            bytes[at] = u8::from_str_radix(word, 16).unwrap();
        }
    }
    bytes
}
