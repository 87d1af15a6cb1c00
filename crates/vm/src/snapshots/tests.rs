//! Snapshots of machines that fail or are killed while they are taken.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::disks::{Facts, ImageFacts, SnapshotFacts};
use crate::host::Places;
use crate::import::Content;
use crate::import::run::How;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use work::Progress;

/// Disks that support only snapshots. Each snapshot also creates a folder at `obstacle`, which prevents a later rename.
pub(crate) struct Taken {
    all: Mutex<Vec<(String, String)>>,
    /// Snapshots that a user takes just before the next ones are taken.
    meanwhile: Mutex<Vec<(String, String)>>,
    obstacle: PathBuf,
    /// Whether a client has every snapshot open.
    in_use: AtomicBool,
    /// The time at which every snapshot was taken; 0 for the present.
    created: AtomicU64,
}

impl Taken {
    fn new(obstacle: &Path) -> Arc<Self> {
        let (in_use, created) = (AtomicBool::new(false), AtomicU64::new(0));
        let obstacle = obstacle.to_owned();
        Arc::new(Self { all: Mutex::default(), meanwhile: Mutex::default(), obstacle, in_use, created })
    }
}

impl Disks for Taken {
    fn server(&self) -> Result<PathBuf> {
        Ok("/nbd".into())
    }
    fn all(&self) -> Result<BTreeMap<String, Facts>> {
        Ok(BTreeMap::new())
    }
    fn create(&self, _: &str, _: u64) -> Result<()> {
        Ok(())
    }
    fn image(&self, _: &Path, _: Option<&str>, _: &[PathBuf]) -> Result<ImageFacts> {
        Ok(ImageFacts { capacity: 1 << 20, internal_snapshots: 0 })
    }
    fn member(&self, _: &Path, _: &str) -> Result<u64> {
        Ok(1 << 20)
    }
    fn descriptor(&self, _: &Path) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn import(&self, _: &str, _: &Content, _: &How, _: &dyn Progress) -> Result<()> {
        Ok(())
    }
    fn snapshot(&self, of: &[(String, String)]) -> Result<()> {
        let mut all = self.all.lock();
        all.append(&mut self.meanwhile.lock());
        if let Some((disk, name)) = of.iter().find(|one| all.contains(one)) {
            return Err(Error::new(ErrorKind::Exists, format!("disk '{disk}' has a snapshot '{name}' already")));
        }
        all.extend_from_slice(of);
        fs::create_dir_all(self.obstacle.join("something")).unwrap();
        Ok(())
    }
    fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotFacts>> {
        let of = self.all.lock().iter().filter(|(of, _)| of == disk).map(|(_, name)| name.clone()).collect::<Vec<_>>();
        let created = Some(self.created.load(Ordering::SeqCst)).filter(|created| *created > 0);
        let created = created.unwrap_or_else(clock::seconds);
        let facts = |name| SnapshotFacts { name, created, clones: Vec::new() };
        Ok(of.into_iter().map(facts).collect())
    }
    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()> {
        if self.in_use.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Busy, format!("'{disk}@{snapshot}' is in use")));
        }
        self.all.lock().retain(|(of, name)| of != disk || name != snapshot);
        Ok(())
    }
    fn revert(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
    fn clone_linked(&self, _: &str, _: &str, _: &[String]) -> Result<()> {
        Ok(())
    }
    fn clone_full(&self, _: &str, _: &str, _: &str, _: &dyn Progress) -> Result<()> {
        Ok(())
    }
    fn delete(&self, _: &str, _: bool) -> Result<()> {
        Ok(())
    }
    fn forget_restores(&self, _: &[(String, u64)]) -> Result<()> {
        Ok(())
    }
    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// The machines of a datastore with these disks.
fn host_of(folder: &Path, disks: &Arc<Taken>) -> Host {
    let places =
        Places { datastore: folder.to_owned(), memory: Some(folder.join("memory")), qemu: "qemu-system-x86_64".into() };
    Host::open(&places, Arc::clone(disks) as Arc<dyn Disks>).unwrap()
}

fn make(host: &Host, name: &str, disk: &str) {
    let mut definition = Definition::new(name, 1, 64 << 20).unwrap();
    definition.add_disk(disk).unwrap();
    let making = host.machines().make(&[definition], |_| Vec::new(), Vec::new()).unwrap();
    making.finish(name).unwrap();
    making.settle().unwrap();
}

/// A host with a stopped machine `web` that has the disk `web-disk`.
pub(crate) fn with_machine() -> (tempfile::TempDir, Arc<Taken>, Host) {
    let folder = tempfile::tempdir().unwrap();
    let disks = Taken::new(&folder.path().join("elsewhere"));
    let host = host_of(folder.path(), &disks);
    make(&host, "web", "web-disk");
    (folder, disks, host)
}

/// The last step fails, or the command is killed before that step: the next command finds what to delete.
#[test]
fn a_machine_snapshot_that_fails_at_its_rename_leaves_no_disk_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let obstacle = folder.path().join("machines/web/snapshots/s");
    let disks = Taken::new(&obstacle);
    let host = host_of(folder.path(), &disks);
    make(&host, "web", "web-disk");
    let change = host.change("web").unwrap();
    take(&host, &change, "s", Options::default()).unwrap_err();
    drop(change);
    assert_eq!(disks.all.lock().len(), 1);
    fs::remove_dir_all(&obstacle).unwrap();
    host.recover().unwrap();
    assert_eq!(*disks.all.lock(), []);
    assert_eq!(names(&host.machines().get("web").unwrap()).unwrap(), Vec::<String>::new());
}

#[test]
fn a_disk_snapshot_that_a_user_takes_at_the_same_time_is_kept() {
    let (_folder, disks, host) = with_machine();
    let of_user = ("web-disk".to_owned(), "s".to_owned());
    disks.meanwhile.lock().push(of_user.clone());
    let change = host.change("web").unwrap();
    let refused = take(&host, &change, "s", Options::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists);
    assert_eq!(*disks.all.lock(), [of_user]);
    assert_eq!(names(change.machine()).unwrap(), Vec::<String>::new());
}

#[test]
fn a_snapshot_that_a_client_has_open_is_not_deleted() {
    let (_folder, disks, host) = with_machine();
    let change = host.change("web").unwrap();
    take(&host, &change, "s", Options::default()).unwrap();
    disks.in_use.store(true, Ordering::SeqCst);
    assert_eq!(delete(&host, &change, "s").unwrap_err().kind(), ErrorKind::Busy);
    assert!(!is_unfinished(change.machine()), "every command would try to delete the rest");
    assert_eq!(list(change.machine()).unwrap().len(), 1);
    disks.in_use.store(false, Ordering::SeqCst);
    delete(&host, &change, "s").unwrap();
    assert!(disks.all.lock().is_empty() && list(change.machine()).unwrap().is_empty());
}

/// A command was killed while it deleted a snapshot, or a client had the snapshot of the second disk open.
#[test]
fn a_disk_snapshot_that_a_user_takes_after_a_deletion_began_is_kept() {
    let (_folder, disks, host) = with_machine();
    let now = clock::seconds();
    for (created, left) in [(now - 60, 0), (now + 60, 1)] {
        take(&host, &host.change("web").unwrap(), "s", Options::default()).unwrap();
        let snapshots = folder(&host.machines().get("web").unwrap());
        fs::rename(snapshots.join("s"), snapshots.join(".old-s")).unwrap();
        disks.created.store(created, Ordering::SeqCst);
        host.recover().unwrap();
        assert!(!is_unfinished(&host.machines().get("web").unwrap()));
        assert_eq!(disks.all.lock().len(), left, "{created}");
        disks.created.store(0, Ordering::SeqCst);
    }
}

#[test]
fn a_revert_that_cannot_be_completed_has_no_effect() {
    let (folder, disks, host) = with_machine();
    let change = host.change("web").unwrap();
    take(&host, &change, "s", Options::default()).unwrap();
    let refused = |kind: ErrorKind, what: &str| {
        let error = revert(&host, &change, "s", false).unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(what), "{error}");
        assert!(!is_unfinished(change.machine()), "the next command would end the machine's process");
    };
    // A user has deleted the snapshot of the disk.
    let taken = std::mem::take(&mut *disks.all.lock());
    refused(ErrorKind::NotFound, "disk 'web-disk' has no snapshot 's' any more");
    *disks.all.lock() = taken;
    // A user has moved the disk to another machine, whose data the revert would discard.
    make(&host, "db", "web-disk");
    change.define(&Definition::new("web", 1, 64 << 20).unwrap()).unwrap();
    refused(ErrorKind::Busy, "belongs to machine 'db' now");
    fs::remove_dir_all(folder.path().join("machines/db")).unwrap();
    let reverted = revert(&host, &change, "s", false).unwrap();
    assert_eq!((reverted.state, reverted.clock), (MachineState::Stopped, None));
    assert_eq!(change.machine().definition().unwrap().disks[0].name, "web-disk");
}

/// A step of a revert has failed, for example because the file system is full.
#[test]
fn a_machine_is_not_changed_until_its_revert_is_complete() {
    let (_folder, _disks, host) = with_machine();
    take(&host, &host.change("web").unwrap(), "s", Options::default()).unwrap();
    let reverting = host.machines().get("web").unwrap().folder().join(REVERTING);
    durable::write(&reverting, b"s").unwrap();
    let refused = host.change("web").err().unwrap();
    let says = refused.to_string().contains("'lamina vm revert web@s'");
    assert!(refused.kind() == ErrorKind::WrongState && says, "{refused}");
    host.recover().unwrap();
    drop(host.change("web").unwrap());
    // The user gives up a revert that cannot be completed.
    durable::write(&reverting, b"s").unwrap();
    delete(&host, &host.change_reverted("web").unwrap(), "s").unwrap();
    host.recover().unwrap();
    drop(host.change("web").unwrap());
}

/// The disks of a snapshot need not be the machine's present disks.
#[test]
fn a_disk_that_is_being_reverted_belongs_to_no_other_machine() {
    let (_folder, _disks, host) = with_machine();
    let change = host.change("web").unwrap();
    take(&host, &change, "s", Options::default()).unwrap();
    change.define(&Definition::new("web", 1, 64 << 20).unwrap()).unwrap();
    assert!(host.machines().users_of_disks().unwrap().is_empty());
    // A step of a revert has failed.
    let reverting = change.machine().folder().join(REVERTING);
    durable::write(&reverting, b"s").unwrap();
    assert_eq!(host.machines().users_of_disks().unwrap()["web-disk"], "web");
    fs::remove_file(reverting).unwrap();
    // Another command adds the disk to a machine when the revert begins.
    let error = std::thread::scope(|scope| {
        let claim = host.machines().claim_disks().unwrap();
        let reverted = scope.spawn(|| revert(&host, &change, "s", false));
        std::thread::sleep(Duration::from_millis(200));
        make(&host, "db", "web-disk");
        drop(claim);
        reverted.join().unwrap().unwrap_err()
    });
    assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("machine 'db' now"), "{error}");
    assert!(!is_unfinished(change.machine()));
}

#[test]
fn memory_is_not_continued_with_a_disk_snapshot_that_was_taken_later() {
    let (_folder, _disks, host) = with_machine();
    let change = host.change("web").unwrap();
    let taken = take(&host, &change, "s", Options::default()).unwrap().record;
    // The simulated disks state the present as the time of their snapshots.
    let earlier = Record { created: taken.created - 100, ..taken };
    let record = folder_of(change.machine(), "s").join(RECORD);
    durable::write_toml(&record, &Record { consistency: "memory".into(), ..earlier.clone() }).unwrap();
    let error = revert(&host, &change, "s", false).unwrap_err();
    assert!(error.kind() == ErrorKind::WrongState && error.to_string().contains("after the memory"), "{error}");
    assert!(!is_unfinished(change.machine()));
    durable::write_toml(&record, &earlier).unwrap();
    revert(&host, &change, "s", false).unwrap();
}
