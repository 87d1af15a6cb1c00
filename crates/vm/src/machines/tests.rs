//! Machines as folders: made whole or not at all, whoever is interrupted when.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::identity::Uuid;
use parking_lot::Mutex;
use std::collections::BTreeSet;

/// Disks that are names.
#[derive(Default)]
struct Names(Mutex<BTreeSet<String>>);

impl Disks for Names {
    fn server(&self) -> Result<PathBuf> {
        Ok("/nbd".into())
    }
    fn capacity(&self, _: &str) -> Result<u64> {
        Ok(1 << 20)
    }
    fn snapshot(&self, _: &[(String, String)]) -> Result<()> {
        Ok(())
    }
    fn delete_snapshot(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
    fn revert(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
    fn clone_linked(&self, _: &str, _: &str, names: &[String]) -> Result<()> {
        self.0.lock().extend(names.iter().cloned());
        Ok(())
    }
    fn clone_full(&self, _: &str, _: Option<&str>, name: &str, _: &(dyn Fn(u64, u64) -> bool + Sync)) -> Result<()> {
        self.0.lock().insert(name.into());
        Ok(())
    }
    fn delete(&self, disk: &str) -> Result<()> {
        match self.0.lock().remove(disk) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::NotFound, "no such disk")),
        }
    }
}

fn definition(name: &str) -> Definition {
    let mut definition = Definition {
        name: name.into(),
        uuid: Uuid::new().unwrap(),
        cpus: 1,
        memory: 64 << 20,
        boot: None,
        disks: Vec::new(),
        networks: Vec::new(),
    };
    definition.add_disk(&format!("{name}-disk")).unwrap();
    definition
}

fn open(folder: &Path) -> (Machines, Arc<Names>) {
    let disks = Arc::new(Names::default());
    let shared: Arc<dyn Disks> = Arc::<Names>::clone(&disks);
    (Machines::open(folder.join("machines"), shared).unwrap(), disks)
}

fn make(machines: &Machines, name: &str) -> Result<Making> {
    let making = machines.make(&definition(name), vec![format!("{name}-disk")])?;
    machines.disks().clone_linked("base", "s", &[format!("{name}-disk")])?;
    Ok(making)
}

#[test]
fn made_listed_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    make(&machines, "web").unwrap().finish().unwrap();
    make(&machines, "db").unwrap().finish().unwrap();
    let names: Vec<String> = machines.list().unwrap().iter().map(Machine::name).collect();
    assert_eq!(names, ["db", "web"]);
    assert_eq!(machines.get("web").unwrap().definition().unwrap().disks[0].name, "web-disk");
    assert_eq!(make(&machines, "web").err().unwrap().kind(), ErrorKind::Exists);
    assert_eq!(machines.get("none").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(machines.get("../web").unwrap_err().kind(), ErrorKind::Invalid);
    assert!(machines.recover().unwrap().is_empty());
    machines.delete("web", false).unwrap();
    machines.delete("db", true).unwrap();
    assert!(machines.list().unwrap().is_empty());
    assert_eq!(*disks.0.lock(), BTreeSet::from(["web-disk".to_string()]));
}

#[test]
fn what_is_not_finished_goes() {
    let folder = tempfile::tempdir().unwrap();
    let (machines, disks) = open(folder.path());
    drop(make(&machines, "web").unwrap());
    assert!(disks.0.lock().is_empty() && machines.folders().unwrap().is_empty());
    // Killed: nothing is dropped, but the lock is gone.
    let mut making = make(&machines, "web").unwrap();
    assert!(machines.recover().unwrap().is_empty());
    let change = making.change.take();
    std::mem::forget(making);
    drop(change);
    assert!(machines.list().unwrap().is_empty());
    assert_eq!(machines.recover().unwrap(), [".new-web"]);
    assert!(disks.0.lock().is_empty());
    // The same found by the next one of that name.
    let mut making = make(&machines, "web").unwrap();
    drop(making.change.take());
    std::mem::forget(making);
    make(&machines, "web").unwrap().finish().unwrap();
    assert_eq!(disks.0.lock().len(), 1);
}
