//! A snapshot whose flush fails on a full file system, so that data stays in memory: the snapshot is complete
//! nevertheless.

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
