//! The thread that takes snapshots, clones, deletes, reverts and checks.

use crate::client::{Client, Habit, Share};
use crate::model::{Fate, Image, Object, SECTORS};
use crate::store::{Checked, DISKS, End, Store, count, new_disk};
use error::Result;
use scheduled_store::Engine;
use scheduled_store::engine::NewSnapshot;
use std::sync::Arc;
use testkit::Random;

/// A thread that changes the catalog.
pub struct Control {
    /// The store that the thread uses.
    pub store: Arc<Store>,
    /// Chooses the operations of this thread.
    pub random: Random,
    /// Number of operations.
    pub operations: u64,
    /// Number of names given so far.
    pub names: u64,
}

impl Control {
    /// Carries out all operations.
    pub fn run(mut self) -> Checked {
        for _ in 0..self.operations {
            match self.random.below(14) {
                0..=3 => self.snapshot().map(drop)?,
                4..=6 => self.clone_and_part()?,
                7 => self.delete_snapshot()?,
                8 => self.delete_disk()?,
                9 => self.revert()?,
                10 => self.store.check()?,
                11 => self.plain(Engine::checkpoint, "checkpoint")?,
                12 => self.plain(|engine| engine.reclaim().map(drop), "giving space back")?,
                _ => self.read_snapshot()?,
            }
        }
        Ok(())
    }

    fn plain(&self, operation: impl FnOnce(&Engine) -> Result<()>, what: &str) -> Checked {
        self.store.note(|| what.into());
        operation(&self.store.engine).map_err(|error| self.store.judge(error, what))
    }

    fn name(&mut self, letter: char) -> String {
        self.names += 1;
        format!("{letter}{}", self.names)
    }

    fn pick(&mut self, snapshots: bool) -> Option<String> {
        let model = self.store.model();
        let fitting = model.objects.iter().filter(|(_, object)| object.of.is_some() == snapshots);
        let names: Vec<String> = fitting.map(|(name, _)| name.clone()).collect();
        drop(model);
        if names.is_empty() { None } else { Some(self.random.pick(&names).clone()) }
    }

    fn snapshot(&mut self) -> Checked<Option<String>> {
        let Some(disk) = self.pick(false) else { return Ok(None) };
        let name = self.name('s');
        let id = {
            let mut model = self.store.model();
            let Some(object) = model.objects.get(&disk).cloned() else { return Ok(None) };
            let image = model.copy(&object.image);
            let coming = Object { id: 0, of: Some(disk.clone()), image, fate: Fate::Coming };
            model.objects.insert(name.clone(), coming);
            object.id
        };
        let new = NewSnapshot { disk: id, name: name.clone(), uuid: [2; 16], incomplete: false };
        self.store.note(|| format!("snapshot {name} of {disk}"));
        let taken = self.store.engine.snapshot(&[new]).map_err(|error| self.store.judge(error, "snapshot"))?;
        let mut model = self.store.model();
        // The snapshot may contain any write that began before it was taken.
        let last = model.objects.get(&disk).map(|object| object.image.clone());
        if let (Some(snapshot), Some(last)) = (model.objects.get_mut(&name), last) {
            snapshot.id = taken[0];
            snapshot.fate = Fate::Stays;
            snapshot.image.catch_up(&last);
        }
        drop(model);
        count(&self.store.statistics.changes);
        Ok(Some(name))
    }

    /// Makes a clone of a snapshot, detaches it, and deletes the snapshot, so that only reference counts show that the
    /// disks share blocks.
    fn clone_and_part(&mut self) -> Checked {
        let Some(snapshot) = self.snapshot()? else { return Ok(()) };
        let name = self.name('c');
        let (source, blocks) = {
            let mut model = self.store.model();
            let Some(object) = model.objects.get(&snapshot).cloned() else { return Ok(()) };
            let image = model.copy(&object.image);
            let blocks = (image.sectors.len() / SECTORS) as u64;
            model.objects.insert(name.clone(), Object { id: 0, of: None, image, fate: Fate::Coming });
            (object.id, blocks)
        };
        let engine = Arc::clone(&self.store.engine);
        self.store.note(|| format!("clone {name} of {snapshot}"));
        let made = engine.clone_snapshot(source, &[new_disk(&name, blocks)]);
        let id = made.map_err(|error| self.store.judge(error, "clone"))?[0];
        if let Some(clone) = self.store.model().objects.get_mut(&name) {
            (clone.id, clone.fate) = (id, Fate::Stays);
        }
        count(&self.store.statistics.changes);
        self.store.note(|| format!("detach {name}"));
        engine.detach(id).map_err(|error| self.store.judge(error, "detach"))?;
        if self.random.percent(70) {
            self.delete(&snapshot)?;
        }
        let shares = vec![Share { disk: name, runs: std::iter::once(0..blocks as usize * SECTORS).collect() }];
        let random = self.random.fork();
        let operations = self.random.below(4);
        let habit = Habit::Mixed;
        Client { store: Arc::clone(&self.store), shares, random, operations, habit }.run()
    }

    fn delete_snapshot(&mut self) -> Checked {
        let Some(snapshot) = self.pick(true) else { return Ok(()) };
        self.delete(&snapshot)
    }

    fn delete(&self, snapshot: &str) -> Checked {
        let id = {
            let mut model = self.store.model();
            let Some(object) = model.objects.get_mut(snapshot) else { return Ok(()) };
            object.fate = Fate::Going;
            object.id
        };
        self.store.note(|| format!("delete {snapshot}"));
        self.store.engine.delete_snapshot(id).map_err(|error| self.store.judge(error, "deleting a snapshot"))?;
        self.store.model().objects.remove(snapshot);
        count(&self.store.statistics.changes);
        Ok(())
    }

    /// Deletes a disk with its snapshots. The initial disks are seldom deleted, because the clients use them.
    fn delete_disk(&mut self) -> Checked {
        let Some(disk) = self.pick(false) else { return Ok(()) };
        if DISKS.iter().any(|(name, _)| *name == disk) && !self.random.percent(20) {
            return Ok(());
        }
        let _door = self.store.doors.lock().expect("no thread panics while it holds this lock");
        let id = {
            let mut model = self.store.model();
            let goes = |(name, object): &(&String, &mut Object)| **name == disk || object.of.as_ref() == Some(&disk);
            model.objects.iter_mut().filter(goes).for_each(|(_, object)| object.fate = Fate::Going);
            match model.objects.get(&disk) {
                Some(object) => object.id,
                None => return Ok(()),
            }
        };
        self.store.note(|| format!("delete {disk}"));
        self.store.engine.delete_disk(id, &[]).map_err(|error| self.store.judge(error, "deleting a disk"))?;
        self.store.model().objects.retain(|name, object| *name != disk && object.of.as_ref() != Some(&disk));
        count(&self.store.statistics.changes);
        Ok(())
    }

    fn revert(&mut self) -> Checked {
        let Some(snapshot) = self.pick(true) else { return Ok(()) };
        let _door = self.store.doors.lock().expect("no thread panics while it holds this lock");
        let (disk, disk_id, snapshot_id) = {
            let mut model = self.store.model();
            let Some(from) = model.objects.get(&snapshot).cloned() else { return Ok(()) };
            let Some(disk) = from.of else { return Ok(()) };
            let image = model.copy(&from.image);
            let Some(object) = model.objects.get_mut(&disk) else { return Ok(()) };
            object.fate = Fate::Becoming(image);
            let disk_id = object.id;
            (disk, disk_id, from.id)
        };
        self.store.note(|| format!("revert {disk} to {snapshot}"));
        self.store.engine.revert(disk_id, snapshot_id).map_err(|error| self.store.judge(error, "revert"))?;
        let mut model = self.store.model();
        if let Some(object) = model.objects.get_mut(&disk)
            && let Fate::Becoming(image) = std::mem::replace(&mut object.fate, Fate::Stays)
        {
            object.image = image;
        }
        drop(model);
        count(&self.store.statistics.changes);
        Ok(())
    }

    fn read_snapshot(&mut self) -> Checked {
        let Some(snapshot) = self.pick(true) else { return Ok(()) };
        let (id, image) = {
            let model = self.store.model();
            let Some(object) = model.objects.get(&snapshot) else { return Ok(()) };
            (object.id, object.image.clone())
        };
        let found = read_snapshot(&self.store.engine, &snapshot, id, &image);
        let found = found.map_err(|error| self.store.judge(error, "reading a snapshot"))?;
        let mut model = self.store.model();
        let Some(object) = model.objects.get_mut(&snapshot) else { return Ok(()) };
        let least = object.image.acknowledged(0..object.image.sectors.len());
        let judged = object.image.judge(0, &found, &least, true);
        judged.map_err(|violation| End::Violation(format!("snapshot {snapshot} of {:?}: {violation}", object.of)))
    }
}

/// Reads a whole snapshot.
pub fn read_snapshot(engine: &Engine, name: &str, id: u64, image: &Image) -> Result<backend::Buffer> {
    let blocks = (image.sectors.len() / SECTORS) as u64;
    engine.read_blocks(name, 0..blocks, &|range| engine.plan_snapshot(id, range))
}
