//! Disks of other commands, and disks that get their names meanwhile, are not deleted.

use super::*;

/// Begins to create a machine with the disk `data`, which is created for it.
fn begin(machines: &Machines, name: &str) -> Making {
    let mut definition = Definition::new(name, 1, 64 << 20).unwrap();
    definition.add_disk("data").unwrap();
    let own = |_: &Definition| vec![OwnDisk { name: "data".into(), origin: None }];
    machines.make(&[definition], own, Vec::new()).unwrap()
}

fn host(folder: &Path) -> (Host, Arc<Names>) {
    let path = folder.to_owned();
    let places = Places { datastore: path.clone(), memory: Some(path), qemu: "qemu-system-x86_64".into() };
    let disks = Arc::new(Names::default());
    let shared: Arc<dyn Disks> = Arc::<Names>::clone(&disks);
    (Host::open(&places, shared).unwrap(), disks)
}

/// The guest of a command that was killed executes again, although the server has not ended the command's
/// requests.
#[test]
fn a_paused_guest_does_not_wait_for_the_removal_of_machines() {
    use crate::machine::Hold;
    let top = tempfile::tempdir().unwrap();
    let (host, disks) = host(top.path());
    let making = begin(host.machines(), "web");
    making.finish("web").unwrap();
    making.settle().unwrap();
    let machine = host.machines().get("web").unwrap();
    machine.change().unwrap().hold(Hold { resume: true, thaw: false }).unwrap().keep();
    let making = begin(host.machines(), "db");
    let within = folder_of(&making);
    killed(making);
    disks.3.store(true, Ordering::SeqCst);
    released(machine.folder());
    assert_eq!(host.recover().unwrap_err().kind(), ErrorKind::Busy);
    assert!(!machine.is_held());
    disks.3.store(false, Ordering::SeqCst);
    released(&within);
    host.recover().unwrap();
    assert!(disks_left(host.machines().folder()).unwrap().is_empty());
}

/// Otherwise the server would take the snapshots of the image after its record was removed, and nothing would delete
/// them.
#[test]
fn an_unfinished_image_stays_until_the_requests_of_its_command_have_ended() {
    let top = tempfile::tempdir().unwrap();
    let (host, disks) = host(top.path());
    let image = host.images().begin(Definition::new("web", 1, 64 << 20).unwrap(), None, false).unwrap();
    let is_there = || top.path().join("memory-images").join(&image.id).exists();
    disks.3.store(true, Ordering::SeqCst);
    host.recover().unwrap();
    assert!(is_there());
    disks.3.store(false, Ordering::SeqCst);
    host.recover().unwrap();
    assert!(!is_there());
}

#[test]
fn recovery_keeps_the_disk_of_a_machine_that_another_command_creates() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let (first, second) = (begin(&machines, "web"), begin(&machines, "db"));
    disks.add("data", None);
    second.made(["data".to_owned()]);
    let within = folder_of(&first);
    killed(first);
    machines.recover().unwrap();
    assert_eq!(disks.names(), ["data"], "the second command still runs");
    assert!(disks_left(machines.folder()).unwrap().contains("data"), "the next command tries again");
    drop(second);
    released(&within);
    machines.recover().unwrap();
    assert!(disks.names().is_empty() && disks_left(machines.folder()).unwrap().is_empty());
}

#[test]
fn recovery_keeps_the_disk_of_a_complete_machine() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let (first, second) = (begin(&machines, "web"), begin(&machines, "db"));
    disks.add("data", None);
    second.made(["data".to_owned()]);
    second.finish("db").unwrap();
    second.settle().unwrap();
    killed(first);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!((disks.names(), machines.recover().unwrap()), (vec!["data".to_owned()], 0));
    // The disk of a deletion that could not be completed was added to a machine.
    let own = vec![OwnDisk { name: "data".into(), origin: None }];
    let intent = Intent::new(vec![Intended { name: "app".into(), disks: own }], Vec::new());
    let (within, lock) = machines.begin(OLD, &intent).unwrap();
    fs::create_dir(within.join("app")).unwrap();
    drop(lock);
    released(&within);
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!((disks.names(), machines.recover().unwrap()), (vec!["data".to_owned()], 0));
}

/// An import takes long, so a user may have created a disk with the name of one that the import had not begun.
#[test]
fn recovery_deletes_only_disks_that_the_command_has_begun() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    for begun in [false, true] {
        let making = begin(&machines, "web");
        making.begin_disks(&["other"]).unwrap();
        if begun {
            making.begin_disks(&["data"]).unwrap();
        }
        disks.add("data", None);
        killed(making);
        assert_eq!(machines.recover().unwrap(), 1);
        assert_eq!(disks.names().is_empty(), begun);
    }
}

/// Otherwise no command could remove what the killed command left, and the names of its disks would stay refused.
#[test]
fn recovery_hands_the_snapshots_of_a_left_disk_over_to_a_clone() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    let making = begin(&machines, "web");
    disks.add("data", None);
    killed(making);
    disks.add("copy", Some(("data", "s")));
    assert_eq!(machines.recover().unwrap(), 1);
    assert_eq!(disks.names(), ["copy"]);
    assert!(disks_left(machines.folder()).unwrap().is_empty());
}

#[test]
fn no_disk_gets_a_name_while_a_disk_with_that_name_is_being_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    // A deletion that runs. If it fails after it has deleted a disk, the next command deletes that disk again.
    let own = vec![OwnDisk { name: "data".into(), origin: None }];
    let intent = Intent::new(vec![Intended { name: "app".into(), disks: own }], Vec::new());
    let (within, lock) = machines.begin(OLD, &intent).unwrap();
    assert!(disks_left(machines.folder()).unwrap().contains("data"));
    fs::remove_dir_all(within).unwrap();
    drop(lock);
    // Recovery of a creation.
    let making = make(&machines, &["web"]).unwrap();
    assert!(disks_left(machines.folder()).unwrap().is_empty(), "the command itself creates the disk");
    let within = folder_of(&making);
    killed(making);
    released(&within.join(INTENT));
    let (seen, all) = (Arc::new(Mutex::new(None)), machines.folder().to_owned());
    let look = Arc::clone(&seen);
    *disks.2.lock() = Some(Box::new(move || *look.lock() = Some(disks_left(&all).unwrap())));
    assert_eq!(machines.recover().unwrap(), 1);
    assert!(seen.lock().take().unwrap().contains("web-disk"));
    assert!(disks_left(machines.folder()).unwrap().is_empty() && disks.names().is_empty());
}

#[test]
fn the_lock_of_a_renamed_machine_does_not_lock_the_machine_that_has_its_name_now() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, _disks) = open(folder.path());
    let create = || {
        let making = begin(&machines, "web");
        making.finish("web").unwrap();
        making.settle().unwrap();
    };
    create();
    let machine = machines.get("web").unwrap();
    // A command opens the folder, and then other commands rename the machine and create one with its name.
    let opened = File::open(machine.folder()).unwrap();
    fs::rename(machine.folder(), machines.folder().join("db")).unwrap();
    create();
    assert_eq!(machine.locked(opened).err().unwrap().kind(), ErrorKind::Busy);
    drop(machine.change().unwrap());
}

#[test]
fn a_disk_that_is_removed_from_a_machine_during_its_deletion_stays() {
    let top = tempfile::tempdir().unwrap();
    let (host, disks) = host(top.path());
    let making = begin(host.machines(), "web");
    disks.add("data", None);
    making.made(["data".to_owned()]);
    making.finish("web").unwrap();
    making.settle().unwrap();
    let (machine, removed) = (host.machines().get("web").unwrap(), Arc::new(AtomicBool::new(false)));
    let done = Arc::clone(&removed);
    *disks.2.lock() = Some(Box::new(move || {
        if let Ok(change) = machine.change() {
            let disks = Vec::new();
            change.define(&Definition { disks, ..machine.definition().unwrap() }).unwrap();
            done.store(true, Ordering::SeqCst);
        }
    }));
    host.delete("web", false, false, false).unwrap();
    let left = disks.names();
    assert_eq!(left.is_empty(), !removed.load(Ordering::SeqCst), "{left:?}");
}
