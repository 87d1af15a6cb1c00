//! All machines of a datastore: `DATASTORE/machines/NAME/`.
//!
//! 1. A machine is there when its folder has its name. It is made in a folder of another name (`.new-NAME`) whose
//!    definition, durable first, says which disks it was to have; renaming that folder is the one moment at which it
//!    comes into being.
//! 2. So what a crash left half made is a folder `.new-*`, and [`Machines::recover`] takes the disks it names and the
//!    folder away. A folder that is being worked on is locked and left alone.
//! 3. Deleting goes the other way: `.old-NAME` first, then its disks, then the folder.

use crate::definition::{Definition, check_name};
use crate::disks::Disks;
use crate::durable;
use crate::machine::{Change, DEFINITION, Machine, State};
use backend::{Error, ErrorKind, IoContext, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the folder of a machine that is being made begins with.
const NEW: &str = ".new-";
/// What the folder of a machine that is being deleted begins with.
const OLD: &str = ".old-";

/// The machines of a datastore.
pub struct Machines {
    folder: PathBuf,
    disks: Arc<dyn Disks>,
}

/// A machine that is being made: taken away again when dropped before [`Making::finish`].
pub struct Making {
    change: Option<Change>,
    name: String,
    folder: PathBuf,
    disks: Arc<dyn Disks>,
    /// The disks that go with it if it does not come into being.
    owned: Vec<String>,
}

impl Machines {
    /// The machines in `folder`, which is made if it is missing.
    pub fn open(folder: impl Into<PathBuf>, disks: Arc<dyn Disks>) -> Result<Self> {
        let folder = folder.into();
        fs::create_dir_all(&folder).during(|| format!("making '{}'", folder.display()))?;
        Ok(Self { folder, disks })
    }

    /// The datastore's side.
    pub fn disks(&self) -> &Arc<dyn Disks> {
        &self.disks
    }

    /// A machine by its name.
    pub fn get(&self, name: &str) -> Result<Machine> {
        check_name(name)?;
        let folder = self.folder.join(name);
        match fs::metadata(folder.join(DEFINITION)) {
            Ok(_) => Ok(Machine::at(folder)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let text = format!("there is no machine '{name}'; 'lamina vm list' shows what there is");
                Err(Error::new(ErrorKind::NotFound, text))
            }
            Err(e) => Err(Error::io(format!("looking for machine '{name}'"), e)),
        }
    }

    /// All machines, by name.
    pub fn list(&self) -> Result<Vec<Machine>> {
        let mut names: Vec<String> = self.folders()?.into_iter().filter(|name| check_name(name).is_ok()).collect();
        names.sort();
        Ok(names.into_iter().map(|name| Machine::at(self.folder.join(name))).collect())
    }

    fn folders(&self) -> Result<Vec<String>> {
        let listing = || format!("listing '{}'", self.folder.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).during(listing)? {
            names.extend(entry.during(listing)?.file_name().into_string());
        }
        Ok(names)
    }

    /// Begins to make a machine. `owned` are those of its disks that are made for it, and go if it does not come into
    /// being.
    pub fn make(&self, definition: &Definition, owned: Vec<String>) -> Result<Making> {
        definition.check()?;
        let name = &definition.name;
        let exists = || Error::new(ErrorKind::Exists, format!("there is a machine '{name}' already"));
        if self.folder.join(name).exists() {
            return Err(exists());
        }
        let folder = self.folder.join(format!("{NEW}{name}"));
        match fs::create_dir(&folder) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // Somebody makes one of that name right now, or did until he was killed.
                drop(Machine::at(&folder).change().map_err(|_| exists())?);
                self.take_away(&folder)?;
                fs::create_dir(&folder).during(|| format!("making '{}'", folder.display()))?;
            }
            Err(e) => return Err(Error::io(format!("making '{}'", folder.display()), e)),
        }
        let change = Machine::at(&folder).change()?;
        let disks = Arc::clone(&self.disks);
        let making = Making { change: Some(change), name: name.clone(), folder, disks, owned };
        write_owned(&making.folder, &making.owned)?;
        if let Some(change) = &making.change {
            change.define(definition)?;
        }
        durable::sync_folder_of(&making.folder).during(|| format!("making machine '{name}'"))?;
        Ok(making)
    }

    /// Deletes a machine that does not run, with those of its disks that `with_disks` says.
    pub fn delete(&self, name: &str, with_disks: bool) -> Result<()> {
        let machine = self.get(name)?;
        let change = machine.change()?;
        if machine.state()? != State::Stopped {
            let text = format!("machine '{name}' runs; stop it first");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        change.sweep()?;
        let owned = match with_disks {
            true => machine.definition()?.disks.into_iter().map(|disk| disk.name).collect(),
            false => Vec::new(),
        };
        write_owned(machine.folder(), &owned)?;
        let old = self.folder.join(format!("{OLD}{name}"));
        fs::rename(machine.folder(), &old)
            .and_then(|()| durable::sync_folder_of(&old))
            .during(|| format!("deleting machine '{name}'"))?;
        self.take_away(&old)
    }

    /// Takes away what was half made or half deleted when somebody was killed.
    pub fn recover(&self) -> Result<Vec<String>> {
        let mut taken = Vec::new();
        for name in self.folders()? {
            if !name.starts_with(NEW) && !name.starts_with(OLD) {
                continue;
            }
            let folder = self.folder.join(&name);
            // Locked: somebody is at work on it.
            let Ok(_change) = Machine::at(&folder).change() else { continue };
            tracing::warn!(folder = %folder.display(), "removing a machine whose making or deleting was interrupted");
            self.take_away(&folder)?;
            taken.push(name);
        }
        Ok(taken)
    }

    fn take_away(&self, folder: &Path) -> Result<()> {
        take_away(folder, &*self.disks)
    }
}

impl Making {
    /// The machine, still under its other name.
    pub fn change(&self) -> Result<&Change> {
        self.change.as_ref().ok_or_else(|| Error::new(ErrorKind::Stopped, "the machine is made already"))
    }

    /// It comes into being.
    pub fn finish(mut self) -> Result<Machine> {
        let folder = self.folder.with_file_name(&self.name);
        crate::machine::remove_if_there(&self.folder.join(OWNED))?;
        // Not over another one: renaming a folder replaces only an empty one, and a machine's never is.
        fs::rename(&self.folder, &folder)
            .and_then(|()| durable::sync_folder_of(&folder))
            .during(|| format!("making machine '{}'", self.name))?;
        self.change = None;
        Ok(Machine::at(folder))
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.change.is_some()
            && let Err(error) = take_away(&self.folder, &*self.disks)
        {
            tracing::error!(machine = self.name, "what was made of a machine stays until the next start: {error}");
        }
    }
}

/// The list of disks that go with a folder.
const OWNED: &str = "disks-that-go-with-it";

fn write_owned(folder: &Path, disks: &[String]) -> Result<()> {
    durable::write(&folder.join(OWNED), disks.join("\n").as_bytes())
}

/// Removes a folder, and the disks that go with it.
fn take_away(folder: &Path, disks: &dyn Disks) -> Result<()> {
    let owned = match fs::read_to_string(folder.join(OWNED)) {
        Ok(owned) => owned,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(Error::io(format!("reading what '{}' leaves", folder.display()), e)),
    };
    for disk in owned.lines().filter(|name| !name.is_empty()) {
        match disks.delete(disk) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display()))
}

#[cfg(test)]
mod tests;
