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

/// A folder in which one file may refuse writes.
struct Refusing {
    inner: Arc<dyn Directory>,
    name: &'static str,
    refuses: Arc<AtomicBool>,
}

struct RefusingFile {
    inner: Arc<dyn File>,
    refuses: Arc<AtomicBool>,
}

impl Refusing {
    fn wrap(&self, name: &str, inner: Arc<dyn File>) -> Arc<dyn File> {
        match name == self.name {
            true => Arc::new(RefusingFile { inner, refuses: Arc::clone(&self.refuses) }),
            false => inner,
        }
    }
}

impl Directory for Refusing {
    backend::forward_directory!(inner: remove, rename, list, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.open(name, mode).map(|file| self.wrap(name, file))
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode).map(|file| self.wrap(name, file))
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
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.write_at(slices, offset, durable)
    }
}

#[test]
fn a_snapshot_whose_flush_lacks_space_is_complete() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let refuses = Arc::new(AtomicBool::new(false));
    let (inner, name) = (machine.directory(), "vm-000001-delta.vmdk");
    let folder = Folder::plain(Arc::new(Refusing { inner, name, refuses: Arc::clone(&refuses) }));
    let (kind, delta) = (ImageKind::Thin, Some(DeltaFormat::VmfsSparse));
    let new = NewDisk { name: "vm".into(), capacity: 1 << 20, kind, delta, adapter: Adapter::LsiLogic };
    let disk = Disk::create(folder.clone(), &new, &options(1), &NoProgress).unwrap();
    disk.snapshot(&NewSnapshot::named("one")).unwrap();
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 8192]).unwrap();
    refuses.store(true, Ordering::SeqCst);
    assert_eq!(disk.snapshot(&NewSnapshot::named("two")).unwrap_err().kind(), ErrorKind::NoSpace);
    refuses.store(false, Ordering::SeqCst);
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
        let folder = Refusing { inner: machine.directory(), name, refuses: Arc::clone(&refuses) };
        let new = NewDisk { name: "vm".into(), capacity: 1 << 20, kind, delta, adapter: Adapter::LsiLogic };
        let disk = Disk::create(Folder::plain(Arc::new(folder)), &new, &options(1), &NoProgress).unwrap();
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
