//! Machines that are restored from backups: their names, identities and files, and what an interruption leaves.

use super::*;
use crate::backup::{Planned, Restore, SavedFile, plan, restore, saved};
use crate::definition::Link;
use crate::identity::Mac;
use work::NoProgress;

/// A host without machines, beside its disks.
fn host(folder: &Path) -> (Host, Arc<Names>) {
    let path = folder.to_owned();
    let places = Places { datastore: path.clone(), memory: Some(path), qemu: "qemu-system-x86_64".into() };
    let disks = Arc::new(Names::default());
    let shared: Arc<dyn Disks> = Arc::<Names>::clone(&disks);
    (Host::open(&places, shared).unwrap(), disks)
}

fn definition() -> Definition {
    let mut definition = Definition::new("web", 2, 64 << 20).unwrap();
    definition.add_disk("web").unwrap();
    definition.add_disk("store").unwrap();
    definition.add_network(Mac::new().unwrap(), Link::User).unwrap();
    definition.add_cdrom(Some("/nonexistent/install.iso".into())).unwrap();
    definition.autostart = true;
    definition
}

fn files(definition: &Definition) -> Vec<SavedFile> {
    let text = definition.to_text().unwrap().into_bytes();
    vec![("machine.toml".into(), text), ("nvram".into(), vec![7; 100])]
}

/// The snapshot of a disk, which was imported with another name than the machine's.
fn of_disk(disk: String) -> Snapshot {
    Snapshot { name: format!("monday-{disk}"), disk }
}

fn planned(host: &Host, definition: &Definition, name: &str) -> Result<Planned> {
    let files = files(definition);
    let disks: Vec<Snapshot> = definition.disk_names().into_iter().map(of_disk).collect();
    let restore = Restore {
        name,
        snapshot: "monday",
        created: 1_794_900_000,
        consistency: "quiesced",
        files: &files,
        disks: &disks,
        has_snapshot: true,
    };
    plan(host, &restore)
}

/// Restores the machine; its disks are added to `disks`.
fn restored(host: &Host, disks: &Names, definition: &Definition, name: &str) -> Planned {
    let planned = planned(host, definition, name).unwrap();
    let make = |_: usize, name: &str, _: &dyn Progress| {
        disks.add(name, None);
        Ok(())
    };
    restore(host, &planned, &make, &NoProgress).unwrap();
    planned
}

#[test]
fn a_restored_machine_has_its_identity_unless_another_machine_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let (host, disks) = host(folder.path());
    let former = definition();
    let first = restored(&host, &disks, &former, "web");
    assert!(!first.new_identity);
    assert_eq!(first.ejected, [Path::new("/nonexistent/install.iso")]);
    let machine = host.machines().get("web").unwrap();
    let mut expected = former.clone();
    expected.eject_all();
    assert_eq!(machine.definition().unwrap(), expected);
    assert_eq!(fs::read(machine.folder().join("nvram")).unwrap(), [7; 100]);
    // The restored machine has the snapshot, which can be backed up again.
    let again = saved(&machine, "monday").unwrap();
    assert_eq!((again.definition, again.created, again.consistency.as_str()), (expected, 1_794_900_000, "quiesced"));
    assert_eq!(again.files.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["machine.toml", "nvram"]);
    assert_eq!(again.disks, ["web", "store"].map(|disk| of_disk(disk.into())));
    // The machine exists, so a second one gets an identity and disks of its own.
    let second = restored(&host, &disks, &former, "copy");
    let copy = host.machines().get("copy").unwrap().definition().unwrap();
    assert!(second.new_identity && copy.uuid != former.uuid && copy.networks[0].mac != former.networks[0].mac);
    assert_eq!((copy.disk_names(), copy.autostart), (vec!["copy".to_owned(), "copy-2".to_owned()], false));
    assert_eq!(disks.names(), ["copy", "copy-2", "store", "web"]);
    // The same holds for a machine that has only the address of a card.
    let mut other = definition();
    other.networks = copy.networks;
    assert!(planned(&host, &other, "third").unwrap().new_identity);
    let unique = planned(&host, &definition(), "fourth").unwrap();
    assert!(!unique.new_identity && unique.definition.disk_names() == ["fourth", "fourth-2"]);
    assert!(unique.definition.autostart);
    // With a new identity too, disks keep their names if the machine does.
    let (folder, mut former) = (tempfile::tempdir().unwrap(), former);
    let (host, disks) = self::host(folder.path());
    restored(&host, &disks, &former, "other");
    let web = planned(&host, &former, "web").unwrap();
    assert!(web.new_identity && web.definition.disk_names() == ["web", "store"]);
    // A machine that is being created counts.
    former = definition();
    let (first, second) = (planned(&host, &former, "first").unwrap(), planned(&host, &former, "second").unwrap());
    assert!(!first.new_identity && !second.new_identity);
    let make = |_: usize, name: &str, _: &dyn Progress| {
        if name == "first" {
            assert!(planned(&host, &former, "third").unwrap().new_identity);
            let never = |_: usize, _: &str, _: &dyn Progress| panic!("a disk of the second machine");
            let refused = restore(&host, &second, &never, &NoProgress).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy);
        }
        disks.add(name, None);
        Ok(())
    };
    restore(&host, &first, &make, &NoProgress).unwrap();
    assert_eq!(host.machines().list().unwrap().len(), 2);
}

#[test]
fn names_that_exist_and_files_of_no_machine_are_refused_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let (host, disks) = host(folder.path());
    disks.add("store", None);
    disks.add("db-2", None);
    let making = make(host.machines(), &["old"]).unwrap();
    making.finish("old").unwrap();
    making.settle().unwrap();
    let former = definition();
    for (name, why) in [("web", "disk 'store'"), ("old", "machine 'old'"), ("db", "disk 'db-2'")] {
        let error = planned(&host, &former, name).unwrap_err();
        assert!(error.kind() == ErrorKind::Exists && error.to_string().contains(why), "{name}: {error}");
    }
    let error = planned(&host, &former, "old-disk").unwrap_err();
    assert!(error.kind() == ErrorKind::Exists && error.to_string().contains("of machine 'old'"), "{error}");
    let wrong = |files: &[SavedFile], disks: &[Snapshot]| {
        let (snapshot, consistency) = ("s", "stopped");
        let restore = Restore { name: "new", snapshot, created: 0, consistency, files, disks, has_snapshot: true };
        plan(&host, &restore).unwrap_err().kind()
    };
    let names: Vec<Snapshot> = former.disk_names().into_iter().map(of_disk).collect();
    assert_eq!(wrong(&files(&former), &names[..1]), ErrorKind::Corrupt);
    assert_eq!(wrong(&files(&former)[1..], &names), ErrorKind::Corrupt);
    assert_eq!(wrong(&[("machine.toml".into(), vec![0xff])], &names), ErrorKind::Corrupt);
    assert_eq!(wrong(&[("machine.toml".into(), b"cpus = 1".to_vec())], &names), ErrorKind::Invalid);
    assert_eq!(host.machines().list().unwrap().len(), 1);
}

#[test]
fn a_restore_that_fails_or_is_killed_leaves_no_machine_and_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (host, disks) = host(folder.path());
    let planned = planned(&host, &definition(), "web").unwrap();
    // The second disk fails. `Io` is the error of a server that was killed: the next command cleans up then.
    for kind in [ErrorKind::Corrupt, ErrorKind::Interrupted, ErrorKind::Io] {
        let make = |index: usize, name: &str, _: &dyn Progress| match index {
            0 => {
                disks.add(name, None);
                Ok(())
            }
            _ => Err(Error::new(kind, "the backup is damaged")),
        };
        let error = restore(&host, &planned, &make, &NoProgress).unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains("'web' was not restored: disk 'store'"), "{error}");
        assert_eq!(disks.names().len(), usize::from(kind == ErrorKind::Io));
        // Another test that starts a program may have the folder locked for a moment.
        for _ in 0..1000 {
            host.recover().unwrap();
            if disks.names().is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(disks.names().is_empty() && host.machines().list().unwrap().is_empty());
        // What the failed restore of the second disk has left is deleted too.
        let forgotten: BTreeSet<String> = disks.4.lock().drain(..).map(|(disk, _)| disk).collect();
        assert_eq!(forgotten, BTreeSet::from(["store".to_owned(), "web".to_owned()]), "{kind:?}");
    }
}
