//! Machines are created completely or not at all, wherever a command is interrupted.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::definition::Definition;
use crate::disks::{Facts, ImageFacts, SnapshotFacts};
use crate::host::{Host, Places};
use crate::import::Content;
use crate::import::run::How;
use crate::instant::image::Images;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use work::Progress;

mod left;
mod restored;

/// Simulated disks: their names, with the snapshots on which they are based, whether clients have snapshots open, what
/// happens before all disks are listed the next time, whether requests of killed commands are still running, and the
/// disks whose interrupted restores were deleted.
#[derive(Default)]
struct Names(Mutex<BTreeMap<String, Facts>>, AtomicBool, Mutex<Option<Event>>, AtomicBool, Mutex<Vec<(String, u64)>>);

type Event = Box<dyn FnOnce() + Send>;

impl Names {
    fn add(&self, name: &str, origin: Option<(&str, &str)>) {
        let origin = origin.map(|(disk, snapshot)| (disk.to_owned(), snapshot.to_owned()));
        let facts = Facts { capacity: 1 << 20, origin, clients: 0, created: backend::clock::seconds() };
        self.0.lock().insert(name.to_owned(), facts);
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().keys().cloned().collect()
    }
}

impl Disks for Names {
    fn server(&self) -> Result<PathBuf> {
        Ok("/nbd".into())
    }
    fn all(&self) -> Result<BTreeMap<String, Facts>> {
        let event = self.2.lock().take();
        event.into_iter().for_each(|event| event());
        Ok(self.0.lock().clone())
    }
    fn create(&self, disk: &str, _: u64) -> Result<()> {
        self.add(disk, None);
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
    fn import(&self, disk: &str, _: &Content, _: &How, _: &dyn Progress) -> Result<()> {
        self.add(disk, None);
        Ok(())
    }
    fn forget_restores(&self, disks: &[(String, u64)]) -> Result<()> {
        self.4.lock().extend_from_slice(disks);
        Ok(())
    }
    fn snapshot(&self, _: &[(String, String)]) -> Result<()> {
        Ok(())
    }
    fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotFacts>> {
        let all = self.0.lock();
        let of = |facts: &Facts| facts.origin.as_ref().is_some_and(|(origin, _)| origin == disk);
        let clones: Vec<String> = all.iter().filter(|(_, facts)| of(facts)).map(|(name, _)| name.clone()).collect();
        Ok(vec![SnapshotFacts { name: "s".into(), created: 0, clones }])
    }
    fn delete_snapshot(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
    fn revert(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()> {
        names.iter().for_each(|name| self.add(name, Some((disk, snapshot))));
        Ok(())
    }
    fn clone_full(&self, _: &str, _: &str, name: &str, _: &dyn Progress) -> Result<()> {
        self.add(name, None);
        Ok(())
    }
    fn delete(&self, disk: &str, promote: bool) -> Result<()> {
        if !promote && self.snapshots(disk)?.iter().any(|snapshot| !snapshot.clones.is_empty()) {
            return Err(Error::new(ErrorKind::Busy, format!("clones are based on '{disk}@s'")));
        }
        if self.1.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Busy, format!("snapshot '{disk}@s' is in use")));
        }
        match self.0.lock().remove(disk) {
            Some(_) => Ok(()),
            None => Err(Error::new(ErrorKind::NotFound, "no such disk")),
        }
    }
    fn settle(&self) -> Result<()> {
        match self.3.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Busy, "requests are still running")),
            false => Ok(()),
        }
    }
}

fn open(folder: &Path) -> (Machines, Arc<Names>) {
    let disks = Arc::new(Names::default());
    let shared: Arc<dyn Disks> = Arc::<Names>::clone(&disks);
    (Machines::open(folder.join("machines"), shared).unwrap(), disks)
}

/// Begins to create machines, and creates their disks.
fn make(machines: &Machines, names: &[&str]) -> Result<Making> {
    let mut definitions = Vec::new();
    for name in names {
        let mut definition = Definition::new(name, 1, 64 << 20).unwrap();
        definition.add_disk(&format!("{name}-disk")).unwrap();
        definitions.push(definition);
    }
    let base = Snapshot { disk: "base".into(), name: "s".into() };
    let own =
        |definition: &Definition| vec![OwnDisk { name: definition.disks[0].name.clone(), origin: Some(base.clone()) }];
    let making = machines.make(&definitions, own, vec![base.clone()])?;
    let disks: Vec<String> = definitions.iter().flat_map(Definition::disk_names).collect();
    machines.disks().clone_linked("base", "s", &disks)?;
    making.made(disks);
    Ok(making)
}

fn delete(machines: &Machines, name: &str, disks: &[String], promote: bool) -> Result<()> {
    machines.delete(&machines.get(name)?.change()?, disks, Vec::new(), promote)
}

/// Leaves the state after a kill: nothing is removed, but the locks are released.
fn killed(making: Making) {
    let folder = folder_of(&making);
    making.leave();
    released(&folder);
}

/// The folder in which machines are created.
fn folder_of(making: &Making) -> PathBuf {
    making.machine("any").folder().parent().unwrap().to_owned()
}

/// Waits until the locks in `folder` are released. Another test may be starting a program: between fork and exec, the
/// child process has copies of this process's descriptors, which keep the locks.
fn released(folder: &Path) {
    while File::open(folder).unwrap().try_lock().is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn machines_are_created_listed_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let making = make(&machines, &["web", "db"]).unwrap();
    assert!(machines.list().unwrap().is_empty());
    making.finish("web").unwrap();
    making.finish("db").unwrap();
    making.settle().unwrap();
    let names: Vec<String> = machines.list().unwrap().iter().map(Machine::name).collect();
    assert_eq!(names, ["db", "web"]);
    assert_eq!(machines.get("web").unwrap().definition().unwrap().disks[0].name, "web-disk");
    assert_eq!(make(&machines, &["new", "web"]).err().unwrap().kind(), ErrorKind::Exists);
    assert_eq!(make(&machines, &["new", "new"]).err().unwrap().kind(), ErrorKind::Exists);
    assert_eq!(machines.get("none").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(machines.get("../web").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(machines.recover().unwrap(), 0);
    delete(&machines, "web", &[], false).unwrap();
    delete(&machines, "db", &["db-disk".into()], false).unwrap();
    assert!(machines.list().unwrap().is_empty());
    assert_eq!(disks.names(), ["web-disk"]);
    let left: Vec<String> = machines.folders().unwrap().into_iter().filter(|name| name != LOCK).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn recovery_removes_unfinished_machines_and_keeps_finished_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    drop(make(&machines, &["web"]).unwrap());
    assert!(disks.names().is_empty());
    let making = make(&machines, &["a", "b", "c"]).unwrap();
    making.finish("b").unwrap();
    assert_eq!(machines.recover().unwrap(), 0, "another process uses the folder");
    killed(making);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!(disks.names(), ["b-disk"]);
    assert_eq!(machines.list().unwrap().len(), 1);
    let making = make(&machines, &["a", "c"]).unwrap();
    making.finish("c").unwrap();
    making.settle().unwrap();
    assert_eq!(disks.names(), ["b-disk", "c-disk"]);
}

#[test]
fn a_disk_created_by_another_command_is_not_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let making = make(&machines, &["web"]).unwrap();
    // A command was killed before it created its disk; then another command created a disk with the same name.
    disks.delete("web-disk", false).unwrap();
    disks.add("web-disk", None);
    killed(making);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!(disks.names(), ["web-disk"]);
    // Also if no command was killed, a disk that this process did not create is not deleted.
    let making = machines.make(&[Definition::new("db", 1, 64 << 20).unwrap()], |_| Vec::new(), Vec::new()).unwrap();
    drop(making);
    assert_eq!(disks.names(), ["web-disk"]);
}

#[test]
fn a_disk_that_may_have_been_created_is_deleted_by_the_next_command() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    for (kind, left) in [(ErrorKind::Io, 1), (ErrorKind::NoSpace, 0)] {
        let own = |_: &Definition| vec![OwnDisk { name: "web".into(), origin: None }];
        let making = machines.make(&[Definition::new("web", 1, 64 << 20).unwrap()], own, Vec::new()).unwrap();
        if left > 0 {
            disks.add("web", None);
        }
        let within = folder_of(&making);
        assert_eq!(making.failed(Error::new(kind, "no reply")).kind(), kind);
        assert_eq!(within.exists(), left > 0);
        if left > 0 {
            released(&within);
        }
        assert_eq!(machines.recover().unwrap(), left);
        assert!(disks.names().is_empty());
    }
}

#[test]
fn a_parent_of_clones_is_not_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let mut definition = Definition::new("base", 1, 64 << 20).unwrap();
    definition.add_disk("base").unwrap();
    disks.add("base", None);
    let making = machines.make(&[definition], |_| Vec::new(), Vec::new()).unwrap();
    making.finish("base").unwrap();
    making.settle().unwrap();
    let making = make(&machines, &["web"]).unwrap();
    making.finish("web").unwrap();
    making.settle().unwrap();
    let error = delete(&machines, "base", &["base".into()], false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("web-disk"), "{error}");
    assert_eq!(machines.list().unwrap().len(), 2);
    // A process that another test starts at this moment may have the locked folder open until it executes its program.
    released(machines.get("base").unwrap().folder());
    delete(&machines, "base", &["base".into()], true).unwrap();
    assert_eq!(disks.names(), ["web-disk"]);
}

#[test]
fn an_interrupted_deletion_is_completed() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let making = make(&machines, &["web", "db"]).unwrap();
    making.finish("web").unwrap();
    making.finish("db").unwrap();
    making.settle().unwrap();
    // The command was killed before it moved the machine's folder, so the machine still exists.
    let own = vec![OwnDisk { name: "web-disk".into(), origin: None }];
    let intent = Intent::new(vec![Intended { name: "web".into(), disks: own }], Vec::new());
    let (within, lock) = machines.begin(OLD, &intent).unwrap();
    drop(lock);
    released(&within);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!((machines.list().unwrap().len(), disks.names().len()), (2, 2));
    // The command was killed after it moved the machine's folder.
    let (within, lock) = machines.begin(OLD, &intent).unwrap();
    fs::rename(folder.path().join("machines/web"), within.join("web")).unwrap();
    drop(lock);
    released(&within);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!((machines.list().unwrap().len(), disks.names()), (1, vec!["db-disk".to_string()]));
}

#[test]
fn machines_that_start_at_the_same_time_query_qemu_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let places = Places { datastore: path.clone(), memory: Some(path), qemu: "qemu-system-x86_64".into() };
    let host = Host::open(&places, Arc::new(Names::default())).unwrap();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|_| scope.spawn(|| host.features().cloned())).collect();
        let all: Vec<_> = all.into_iter().map(|one| one.join().unwrap().unwrap()).collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    });
}

#[test]
fn root_changes_no_machine_of_another_user() {
    use std::os::unix::fs::{chown, lchown, symlink};
    const USER: u32 = 1234;
    let top = tempfile::tempdir().unwrap();
    let (machines, elsewhere) = (top.path().join("machines"), top.path().join("elsewhere"));
    let folder = machines.join("web");
    fs::create_dir_all(folder.join("run.1")).unwrap();
    let machine = Machine::at(folder.clone());
    let refused = |owned: &Path| {
        let told = machine.change().err().unwrap().to_string();
        assert!(told.contains("belongs to user 1234: run the command as this user"), "{}: {told}", owned.display());
        assert!(machine.end_processes().is_err(), "{}", owned.display());
    };
    drop(machine.change().unwrap());
    for owned in [top.path(), machines.as_path(), folder.as_path()] {
        chown(owned, Some(USER), None).unwrap();
        refused(owned);
        chown(owned, Some(0), None).unwrap();
    }
    // A link of another user to a machine of root.
    fs::rename(&folder, &elsewhere).unwrap();
    symlink(&elsewhere, &folder).unwrap();
    drop(machine.change().unwrap());
    lchown(&folder, Some(USER), None).unwrap();
    refused(&folder);
}

#[test]
fn root_changes_no_machine_that_another_user_can_replace_by_the_datastore() {
    use std::os::unix::fs::chown;
    let top = tempfile::tempdir().unwrap();
    for name in ["machines", ".new-1/web", ".old-1/machines"] {
        let folder = top.path().join(FOLDER).join(name);
        fs::create_dir_all(&folder).unwrap();
        let machine = Machine::at(folder);
        drop(machine.change().unwrap());
        chown(top.path(), Some(1234), None).unwrap();
        assert!(machine.change().is_err(), "{name}");
        chown(top.path(), Some(0), None).unwrap();
    }
}

#[test]
fn an_interrupted_deletion_with_an_invalid_name_removes_nothing() {
    let top = tempfile::tempdir().unwrap();
    let (machines, disks) = open(top.path());
    let elsewhere = top.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    disks.add("data", None);
    let disk = |name: &str| OwnDisk { name: name.into(), origin: None };
    let outside = Intended { name: elsewhere.to_str().unwrap().into(), disks: vec![disk("data")] };
    let above = Intended { name: "../../elsewhere".into(), disks: Vec::new() };
    let of_folder = Intended { name: "web".into(), disks: vec![disk("a/b")] };
    for intended in [outside, above, of_folder] {
        let (within, lock) = machines.begin(OLD, &Intent::new(vec![intended], Vec::new())).unwrap();
        drop(lock);
        released(&within);
        let error = Intent::read(&within).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(within.join("intent.toml").to_str().unwrap()), "{error}");
        machines.recover().unwrap();
        assert!(elsewhere.is_dir() && within.is_dir());
        assert_eq!(disks.names(), ["data"]);
    }
}

#[test]
fn root_removes_nothing_that_commands_left_in_a_datastore_of_another_user() {
    use std::os::unix::fs::chown;
    let top = tempfile::tempdir().unwrap();
    let (machines, disks) = open(top.path());
    let own = |folder: &Path, user| chown(folder, Some(user), None).unwrap();
    // A command of root that fails.
    let making = make(&machines, &["db"]).unwrap();
    let failed = making.machine("db").folder().to_owned();
    own(top.path(), 1234);
    drop(making);
    released(failed.parent().unwrap());
    assert!(failed.is_dir());
    own(top.path(), 0);
    let making = make(&machines, &["web"]).unwrap();
    let left = making.machine("web").folder().to_owned();
    killed(making);
    for owned in [top.path(), machines.folder()] {
        own(owned, 1234);
        assert_eq!(machines.recover().unwrap(), 0, "{}", owned.display());
        assert!(left.is_dir() && failed.is_dir());
        assert_eq!(disks.names(), ["db-disk", "web-disk"]);
        own(owned, 0);
    }
    assert_eq!(machines.recover().unwrap(), 2);
    assert!(!left.exists() && !failed.exists() && disks.names().is_empty());
}

#[test]
fn root_leaves_no_empty_folder_of_a_creation_in_a_datastore_of_another_user() {
    use std::os::unix::fs::{chown, symlink};
    let top = tempfile::tempdir().unwrap();
    let (machines, disks) = open(top.path());
    let begin = |name: &str| {
        let own = |_: &Definition| vec![OwnDisk { name: format!("{name}-disk"), origin: None }];
        machines.make(&[Definition::new(name, 1, 64 << 20).unwrap()], own, Vec::new()).unwrap()
    };
    for folder in [top.path(), machines.folder()] {
        chown(folder, Some(1234), None).unwrap();
    }
    let making = begin("web");
    making.finish("web").unwrap();
    making.settle().unwrap();
    let there = || {
        let mut names = durable::names(machines.folder()).unwrap();
        names.sort();
        names
    };
    assert_eq!(there(), [LOCK, "web"]);
    // The unfinished machine stays with its intent, so that the next command of the user removes the disk.
    disks.add("db-disk", None);
    let making = begin("db");
    let failed = folder_of(&making);
    drop(making);
    assert!(Intent::read(&failed).unwrap().is_some() && failed.join("db").is_dir());
    fs::remove_dir_all(&failed).unwrap();
    // The user has put a link to another folder in place of the command's folder.
    let elsewhere = top.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("intent.toml"), "").unwrap();
    let making = begin("app");
    making.finish("app").unwrap();
    let folder = folder_of(&making);
    fs::rename(&folder, top.path().join("moved")).unwrap();
    symlink(&elsewhere, &folder).unwrap();
    making.settle().unwrap();
    assert!(elsewhere.join("intent.toml").exists() && folder.is_symlink());
}

#[test]
fn the_removal_of_an_image_removes_no_file_elsewhere() {
    let top = tempfile::tempdir().unwrap();
    let images = Images::open(top.path().join("images"), top.path().join("memory")).unwrap();
    let definition = Definition::new("web", 1, 64 << 20).unwrap();
    let elsewhere = top.path().join("elsewhere");
    let own = images.begin(definition.clone(), None, false).unwrap();
    let mut other = images.begin(definition, None, false).unwrap();
    let file = std::mem::replace(&mut other.record.memory, elsewhere.clone());
    for path in [&own.record.memory, &elsewhere, &file] {
        fs::write(path, "memory").unwrap();
    }
    images.abandon(&other, &Names::default());
    assert!(elsewhere.exists() && file.exists() && own.record.memory.exists());
    images.abandon(&own, &Names::default());
    assert!(!own.record.memory.exists());
    assert!(durable::names(&top.path().join("images")).unwrap().is_empty());
}

/// The file that names the image was renamed, and the flush of its folder failed.
#[test]
fn a_machine_that_was_not_frozen_durably_continues_in_its_process() {
    use crate::machine::Hold;
    use crate::qmp::Client;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    let top = tempfile::tempdir().unwrap();
    let images = Images::open(top.path().join("images"), top.path().join("memory")).unwrap();
    let image = images.begin(Definition::new("web", 1, 64 << 20).unwrap(), None, false).unwrap();
    let folder = top.path().join("web");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("frozen"), &image.id).unwrap();
    let change = Machine::at(&folder).change().unwrap();
    let holding = change.hold(Hold { resume: true, thaw: false }).unwrap();
    let (own, peer) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let command = BufReader::new(peer.try_clone().unwrap()).lines().next().unwrap().unwrap();
        (&peer).write_all(b"{\"return\": {}}\n").unwrap();
        command
    });
    let mut monitor = Client::over(own, &folder, Duration::from_secs(5)).unwrap();
    freeze::undo(change.machine(), &images, &Names::default(), &image, true, &holding, &mut monitor).unwrap();
    assert!(qemu.join().unwrap().contains("\"cont\""));
    assert_eq!(freeze::frozen(change.machine()).unwrap(), None, "the next command would end the process");
    assert!(durable::names(&top.path().join("images")).unwrap().is_empty());
}

fn host_in(top: &tempfile::TempDir) -> (PathBuf, Host) {
    let path = top.path().to_path_buf();
    let places = Places { datastore: path.clone(), memory: Some(path.clone()), qemu: "qemu-system-x86_64".into() };
    let host = Host::open(&places, Arc::new(Names::default())).unwrap();
    (path, host)
}

#[test]
fn one_disk_is_not_added_to_two_machines_at_the_same_time() {
    use crate::edit::{Edit, edit};
    let top = tempfile::tempdir().unwrap();
    let path = top.path().to_path_buf();
    let disks = Names::default();
    disks.add("data", None);
    let places = Places { datastore: path.clone(), memory: Some(path), qemu: "qemu-system-x86_64".into() };
    let host = Host::open(&places, Arc::new(disks)).unwrap();
    let begin = |name: &str, disks: &[&str]| {
        let mut definition = Definition::new(name, 1, 64 << 20).unwrap();
        disks.iter().for_each(|disk| definition.add_disk(disk).unwrap());
        host.machines().make(&[definition], |_| Vec::new(), Vec::new()).unwrap()
    };
    let making = begin("web", &[]);
    making.finish("web").unwrap();
    making.settle().unwrap();
    let more = Edit { add_disks: vec!["data".into()], ..Edit::default() };
    let add = || edit(&host.change("web").unwrap(), &host, &more);
    // A machine with the disk is being created.
    let other = begin("db", &["data"]);
    assert_eq!(add().unwrap_err().kind(), ErrorKind::Busy);
    drop(other);
    // The command that creates the machine looks at the same time whether the disk is free.
    let (added, other) = std::thread::scope(|scope| {
        let claim = host.machines().claim_disks().unwrap();
        let adding = scope.spawn(add);
        std::thread::sleep(Duration::from_millis(200));
        let other = begin("db", &["data"]);
        drop(claim);
        (adding.join().unwrap(), other)
    });
    assert_eq!(added.unwrap_err().kind(), ErrorKind::Busy);
    drop(other);
    assert_eq!(add().unwrap().disk_names(), ["data"]);
}

#[test]
fn root_removes_no_image_in_a_datastore_of_another_user() {
    use std::os::unix::fs::chown;
    let top = tempfile::tempdir().unwrap();
    let (path, host) = host_in(&top);
    let image = host.images().begin(Definition::new("web", 1, 64 << 20).unwrap(), None, false).unwrap();
    fs::write(&image.record.memory, "memory").unwrap();
    for owned in [path.clone(), path.join(FOLDER)] {
        chown(&owned, Some(1234), None).unwrap();
        host.recover().unwrap();
        assert!(image.record.memory.exists(), "{}", owned.display());
        chown(&owned, Some(0), None).unwrap();
    }
    host.recover().unwrap();
    assert!(!image.record.memory.exists());
}

#[test]
fn root_begins_no_clone_of_a_machine_of_another_user() {
    let top = tempfile::tempdir().unwrap();
    let (path, host) = host_in(&top);
    let making = make(host.machines(), &["web"]).unwrap();
    making.finish("web").unwrap();
    making.settle().unwrap();
    let source = clone::Source { machine: "web".into(), snapshot: None };
    assert!(source.point(&host).is_ok());
    std::os::unix::fs::chown(&path, Some(1234), None).unwrap();
    assert!(source.point(&host).is_err());
}

#[test]
fn the_disks_of_an_interrupted_command_are_known_until_they_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    assert!(disks_left(&folder.path().join("machines")).unwrap().is_empty());
    let (machines, disks) = open(folder.path());
    let making = make(&machines, &["web"]).unwrap();
    assert!(disks_left(machines.folder()).unwrap().is_empty(), "the command is running");
    killed(making);
    let left: Vec<String> = disks_left(machines.folder()).unwrap().into_iter().collect();
    assert_eq!(left, disks.names());
    assert_eq!(machines.recover().unwrap(), 1);
    assert!(disks_left(machines.folder()).unwrap().is_empty() && disks.names().is_empty());
}

#[test]
fn the_owner_of_a_datastore_does_not_stop_a_server_that_looks_for_left_disks() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let folder = tempfile::tempdir().unwrap();
    let (machines, _disks) = open(folder.path());
    let making = make(&machines, &["web"]).unwrap();
    let left = folder_of(&making);
    killed(making);
    let locked = machines.lock().unwrap();
    let refused = disks_left_within(machines.folder(), Duration::from_millis(20)).unwrap_err();
    assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains(".lock' is locked"), "{refused}");
    drop(locked);
    fs::remove_file(left.join("intent.toml")).unwrap();
    mknodat(CWD, left.join("intent.toml"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(disks_left(machines.folder()).unwrap().is_empty());
    assert_eq!(Intent::read(&left).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_machine_whose_disk_is_in_use_is_not_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let making = make(&machines, &["web"]).unwrap();
    making.finish("web").unwrap();
    making.settle().unwrap();
    let clients = |count| disks.0.lock().get_mut("web-disk").unwrap().clients = count;
    let delete = || {
        let change = machines.get("web")?.change()?;
        machines.delete_within(&change, &["web-disk".into()], Vec::new(), false, Duration::ZERO)
    };
    clients(1);
    assert_eq!(delete().unwrap_err().kind(), ErrorKind::Busy);
    assert!(machines.has("web") && disks.names() == ["web-disk"]);
    assert_eq!(machines.recover().unwrap(), 0);
    clients(0);
    // The disk itself has no client.
    disks.1.store(true, Ordering::SeqCst);
    assert_eq!(delete().unwrap_err().kind(), ErrorKind::Busy);
    disks.1.store(false, Ordering::SeqCst);
    assert_eq!(machines.recover().unwrap(), 0);
    assert!(machines.has("web") && disks.names() == ["web-disk"]);
    while_busy(DISK_OF_ENDED_PROCESS, delete).unwrap();
    assert!(!machines.has("web") && disks.names().is_empty());
}
