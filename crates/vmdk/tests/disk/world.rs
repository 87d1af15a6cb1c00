//! Shared by the tests: options with seeded identities, a disk's content as a plain array, guests that write during
//! merges, folders on a simulated disk, QEMU.

use backend::{Access, Directory, File, IoMode, LocalFolder, Lock};
use chain::Chain;
use layer::image::{Folder, ImageKind};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use vmdk::{DeltaFormat, Disk, Options};

pub use testkit::Random;
use work::Progress;

pub const DELTAS: [DeltaFormat; 3] = [DeltaFormat::VmfsSparse, DeltaFormat::SeSparse, DeltaFormat::VsanSparse];

/// Kinds of flat and hosted bases besides those on VMFS. The split ones have several extents.
pub const OTHER_BASES: [ImageKind; 4] =
    [ImageKind::SplitSparse, ImageKind::SplitFlat, ImageKind::MonolithicFlat, ImageKind::Raw];

/// Sectors of an extent of a split disk (64 KiB), so that also small disks have several.
const PIECE_SECTORS: u64 = 128;

/// Options with random identities that follow from a seed, for split disks with small extents.
pub fn options(seed: u64) -> Options {
    let random = Mutex::new(Random::new(seed ^ 0x6964));
    Options { random: Arc::new(move || random.lock().next()), piece: Some(PIECE_SECTORS), ..Options::default() }
}

/// The whole content of a chain.
pub fn read(chain: &Chain) -> Vec<u8> {
    let mut out = vec![0xee; chain.capacity() as usize];
    chain.read(0, &mut out).unwrap();
    out
}

/// A guest that writes and discards at random, in the chain and in a plain array.
pub struct Guest {
    pub random: Random,
    pub content: Vec<u8>,
}

impl Guest {
    /// A random range, often of whole grains.
    pub fn range(&mut self) -> std::ops::Range<usize> {
        let capacity = self.content.len() as u64;
        let unit = *self.random.pick(&[1, 512, 4096]);
        let start = self.random.below(capacity) / unit * unit;
        let longest = *self.random.pick(&[600u64, 9000, 70_000]);
        let end = (start + unit + self.random.below(longest) / unit * unit).min(capacity);
        start as usize..end as usize
    }

    pub fn act(&mut self, chain: &Chain) {
        let range = self.range();
        if self.random.percent(70) {
            self.random.fill(&mut self.content[range.clone()]);
            chain.write(range.start as u64, &self.content[range]).unwrap();
        } else {
            self.content[range.clone()].fill(0);
            chain.zero(range.start as u64, range.len() as u64, self.random.percent(30)).unwrap();
        }
    }
}

/// Lets a guest write during a merge.
pub struct Busy<'a> {
    pub guest: &'a Mutex<Guest>,
    pub chain: Arc<Chain>,
    /// After this many reports, the merge is cancelled; 0 for never.
    pub patience: Mutex<u32>,
}

impl Progress for Busy<'_> {
    fn update(&self, _done: u64, _total: u64) {
        let mut guest = self.guest.lock();
        if guest.random.percent(60) {
            guest.act(&self.chain);
        }
    }

    fn cancelled(&self) -> bool {
        let mut patience = self.patience.lock();
        match *patience {
            0 => false,
            1 => true,
            _ => {
                *patience -= 1;
                false
            }
        }
    }
}

/// The content of an image as QEMU reads it.
pub fn qemu_read(folder: &Path, name: &str, capacity: usize) -> Vec<u8> {
    let out = folder.join("qemu.raw");
    let ran = Command::new("qemu-img")
        .args(["convert", "-f", "vmdk", "-O", "raw"])
        .arg(folder.join(name))
        .arg(&out)
        .output()
        .expect("qemu-img has to be installed");
    assert!(ran.status.success(), "{name}: {}", String::from_utf8_lossy(&ran.stderr));
    let mut bytes = std::fs::read(&out).unwrap();
    std::fs::remove_file(out).unwrap();
    bytes.resize(capacity, 0);
    bytes
}

/// A temporary folder, in memory if possible: the tests do not depend on the file system.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

pub fn local(path: &Path) -> Folder {
    Folder::local(path, &[]).unwrap()
}

/// Files in the disk's folder that its record does not name.
pub fn leaked(disk: &Disk) -> Vec<String> {
    let record = disk.record();
    let mut known = vec!["lamina.disk".to_owned(), "lamina.lock".to_owned(), format!("{}.vmsd", record.stem)];
    known.extend(disk.info().unwrap().files.into_iter().map(|file| {
        let name = file.path.rsplit('/').next().unwrap();
        name.to_owned()
    }));
    let names = disk.home().directory().list().unwrap();
    names.into_iter().filter(|name| !known.contains(name)).collect()
}

/// A subfolder within the only folder of a simulated disk: its files have a common name prefix.
pub struct Sub {
    inner: Arc<dyn Directory>,
    prefix: String,
    /// Files that cannot be opened for writing.
    read_only: Vec<String>,
}

impl Sub {
    pub fn folder(inner: &Arc<dyn Directory>, name: &str) -> Folder {
        Self::folder_with(inner, name, &[])
    }

    pub fn folder_with(inner: &Arc<dyn Directory>, name: &str, read_only: &[&str]) -> Folder {
        let read_only = read_only.iter().map(|name| (*name).to_owned()).collect();
        Folder::plain(Arc::new(Self { inner: Arc::clone(inner), prefix: format!("{name}:"), read_only }))
    }

    fn inside(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Directory for Sub {
    backend::forward_directory!(inner: sync, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.open(&self.inside(name), mode)
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(&self.inside(name), mode)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(&self.inside(name))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(&self.inside(from), &self.inside(to))
    }
    fn list(&self) -> io::Result<Vec<String>> {
        let names = self.inner.list()?;
        Ok(names.into_iter().filter_map(|name| name.strip_prefix(&self.prefix).map(str::to_owned)).collect())
    }
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        self.inner.lock(&self.inside(name))
    }
    fn local(&self) -> Option<&dyn LocalFolder> {
        Some(self)
    }
}

impl LocalFolder for Sub {
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        if access == Access::ReadWrite && self.read_only.iter().any(|read_only| read_only == name) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.inner.open_foreign(&self.inside(name), mode, access)
    }
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.copy_permissions(&self.inside(from), &self.inside(to))
    }
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        Ok(None)
    }
    fn is_at(&self, path: &std::path::Path) -> io::Result<bool> {
        self.inner.is_at(path)
    }
}
