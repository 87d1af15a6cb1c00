//! Flushes for which a full file system refuses writes. A VMFSsparse image keeps the data in memory, and the snapshot
//! before the flush is complete. Other images stop, and their disk is opened again.

use crate::world::{options, read};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Access, Directory, File, IoMode, LocalFolder, Lock};
use error::ErrorKind;
use layer::descriptor::Adapter;
use layer::image::{Folder, Image, ImageKind, OpenOptions, Place};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vmdk::{DeltaFormat, Disk, NewDisk, NewSnapshot};
use work::NoProgress;

/// A folder in which one file may refuse writes. With `renames`, the folder refuses to rename files from the first such
/// write on; with `syncs`, its flushes fail while writes are refused.
struct Refusing {
    inner: Arc<dyn Directory>,
    name: &'static str,
    refuses: Arc<AtomicBool>,
    refused: Arc<AtomicBool>,
    renames: bool,
    syncs: bool,
}

struct RefusingFile {
    inner: Arc<dyn File>,
    refuses: Arc<AtomicBool>,
    refused: Arc<AtomicBool>,
}

impl Refusing {
    fn new(machine: &SimulatedDisk, name: &'static str, refuses: &Arc<AtomicBool>) -> Self {
        let (inner, refuses) = (machine.directory(), Arc::clone(refuses));
        Self { inner, name, refuses, refused: Arc::default(), renames: false, syncs: false }
    }

    fn wrap(&self, name: &str, inner: Arc<dyn File>) -> Arc<dyn File> {
        match name == self.name {
            true => {
                let (refuses, refused) = (Arc::clone(&self.refuses), Arc::clone(&self.refused));
                Arc::new(RefusingFile { inner, refuses, refused })
            }
            false => inner,
        }
    }
}

impl Directory for Refusing {
    backend::forward_directory!(inner: remove, list, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.open(name, mode).map(|file| self.wrap(name, file))
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode).map(|file| self.wrap(name, file))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        if self.renames && self.refused.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.rename(from, to)
    }
    fn sync(&self) -> io::Result<()> {
        if self.syncs && self.refuses.load(Ordering::SeqCst) {
            return Err(io::Error::other("the folder cannot be flushed"));
        }
        self.inner.sync()
    }
    fn local(&self) -> Option<&dyn LocalFolder> {
        Some(self)
    }
}

impl LocalFolder for Refusing {
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        self.inner.open_foreign(name, mode, access).map(|file| self.wrap(name, file))
    }
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.copy_permissions(from, to)
    }
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        Ok(None)
    }
    fn is_at(&self, path: &std::path::Path) -> io::Result<bool> {
        self.inner.is_at(path)
    }
}

impl File for RefusingFile {
    backend::forward_file!(inner: len, set_len, read_at, sync, punch, local);

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            self.refused.store(true, Ordering::SeqCst);
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.write_at(slices, offset, durable)
    }
}

fn created(folder: Folder, kind: ImageKind, delta: Option<DeltaFormat>) -> Arc<Disk> {
    let new = NewDisk { name: "vm".into(), capacity: 1 << 20, kind, delta, adapter: Adapter::LsiLogic };
    Disk::create(folder, &new, &options(1), &NoProgress).unwrap()
}

/// A disk with a VMFSsparse delta.
fn with_snapshot(folder: Folder) -> Arc<Disk> {
    let disk = created(folder, ImageKind::Thin, Some(DeltaFormat::VmfsSparse));
    disk.snapshot(&NewSnapshot::named("one")).unwrap();
    disk
}

#[test]
fn a_snapshot_whose_flush_lacks_space_is_complete() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let refuses = Arc::new(AtomicBool::new(false));
    let folder = Folder::plain(Arc::new(Refusing::new(&machine, "vm-000001-delta.vmdk", &refuses)));
    let disk = with_snapshot(folder.clone());
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 8192]).unwrap();
    refuses.store(true, Ordering::SeqCst);
    assert_eq!(disk.snapshot(&NewSnapshot::named("two")).unwrap_err().kind(), ErrorKind::NoSpace);
    // The tables in the file are older than the snapshot.
    assert_eq!(disk.snapshot_chain("two").err().unwrap().kind(), ErrorKind::NoSpace);
    let clone = Folder::plain(SimulatedDisk::new(2, SimulatedOptions::default()).directory());
    assert_eq!(disk.linked_clone("two", clone, "clone", &options(2)).err().unwrap().kind(), ErrorKind::NoSpace);
    refuses.store(false, Ordering::SeqCst);
    assert!(read(&disk.snapshot_chain("two").unwrap())[..8192] == [1; 8192]);
    assert_eq!((disk.snapshots().len(), disk.stopped()), (2, None));
    // The new head is still locked.
    let head = Place { folder: folder.clone(), name: "vm-000002.vmdk".to_owned() };
    let again = Image::open(head, &OpenOptions { writable: true, ..OpenOptions::default() });
    assert_eq!(again.err().unwrap().kind(), ErrorKind::Busy);
    chain.write(4096, &[2; 8192]).unwrap();
    chain.flush().unwrap();
    disk.snapshot(&NewSnapshot::named("three")).unwrap();
    let before = read(&disk.snapshot_chain("two").unwrap());
    assert!(before[..8192] == [1; 8192] && before[8192..16384] == [0; 8192]);
    disk.delete_snapshot("two", None, &NoProgress).unwrap();
    let content = read(&chain);
    assert!(content[..4096] == [1; 4096] && content[4096..12288] == [2; 8192]);
    disk.close().unwrap();
    drop((chain, disk));
    let disk = Disk::open(Folder::plain(machine.crash().directory()), &options(2)).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
}

/// The file system refuses writes to reserved space, as btrfs does for files that it copies on write.
#[test]
fn a_disk_whose_tables_are_refused_stops_and_is_opened_again() {
    let cases = [
        (ImageKind::MonolithicSparse, None, "vm.vmdk"),
        (ImageKind::Thin, Some(DeltaFormat::SeSparse), "vm-000001-sesparse.vmdk"),
        (ImageKind::Thin, Some(DeltaFormat::VsanSparse), "vm-000001-vsan.vmdk"),
    ];
    for (kind, delta, name) in cases {
        let machine = SimulatedDisk::new(1, SimulatedOptions::default());
        let refuses = Arc::new(AtomicBool::new(false));
        let folder = Refusing::new(&machine, name, &refuses);
        let disk = created(Folder::plain(Arc::new(folder)), kind, delta);
        if delta.is_some() {
            disk.snapshot(&NewSnapshot::named("one")).unwrap();
        }
        let chain = disk.chain().unwrap();
        chain.write(0, &[1; 8192]).unwrap();
        chain.flush().unwrap();
        chain.write(128 << 10, &[2; 8192]).unwrap();
        refuses.store(true, Ordering::SeqCst);
        assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Stopped, "{name}");
        let why = disk.stopped().unwrap();
        assert!(why.contains("free space"), "{name}: {why}");
        refuses.store(false, Ordering::SeqCst);
        drop(chain);
        assert!(disk.reopen().unwrap(), "{name}: the write before the flush may be lost");
        let chain = disk.chain().unwrap();
        chain.write(128 << 10, &[3; 8192]).unwrap();
        chain.flush().unwrap();
        let content = read(&chain);
        assert!(content[..8192] == [1; 8192] && content[128 << 10..][..8192] == [3; 8192], "{name}");
        disk.close().unwrap();
    }
}

/// A revert drops the head's chain, whose last flush lacks space, and then fails itself. So the head stays, and its
/// writes are lost.
#[test]
fn a_revert_that_fails_after_it_has_dropped_unflushed_writes_reports_the_loss() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let refuses = Arc::new(AtomicBool::new(false));
    let folder = Refusing { renames: true, ..Refusing::new(&machine, "vm-000001-delta.vmdk", &refuses) };
    let refused = Arc::clone(&folder.refused);
    let disk = with_snapshot(Folder::plain(Arc::new(folder)));
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 8192]).unwrap();
    chain.flush().unwrap();
    chain.write(128 << 10, &[2; 8192]).unwrap();
    refuses.store(true, Ordering::SeqCst);
    assert_eq!(disk.revert("one").unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(chain.write(0, &[3; 8192]).is_err() && disk.stopped().is_some());
    [refuses, refused].into_iter().for_each(|flag| flag.store(false, Ordering::SeqCst));
    drop(chain);
    assert!(disk.reopen().unwrap(), "the second write may be lost");
    assert!(read(&disk.chain().unwrap())[..8192] == [1; 8192]);
    disk.close().unwrap();
}

/// It is unknown which record is durable, and the flush that ends the chain lacks space.
#[test]
fn after_an_uncertain_record_a_chain_that_lacks_space_takes_no_writes() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let refuses = Arc::new(AtomicBool::new(false));
    let folder = Refusing { syncs: true, ..Refusing::new(&machine, "vm-000001-delta.vmdk", &refuses) };
    let disk = with_snapshot(Folder::plain(Arc::new(folder)));
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 8192]).unwrap();
    refuses.store(true, Ordering::SeqCst);
    assert_eq!(disk.set_overlay(None).unwrap_err().kind(), ErrorKind::Io);
    assert!(disk.stopped().is_some());
    refuses.store(false, Ordering::SeqCst);
    assert_eq!(chain.write(8192, &[2; 8192]).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Stopped);
}
