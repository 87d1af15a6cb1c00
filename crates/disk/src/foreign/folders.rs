//! The folders of disks: `DATASTORE/images/FOLDER`, and the folders that records of disks name.
//!
//! 1. Root that has opened the datastore of another user opens only folders of this user, and folders that are in
//!    `images` without a link. Otherwise the user could name any folder in a record, or put a link to it in place of a
//!    folder, and root would read, create and remove files there. A folder is checked after it was opened, by its
//!    handle, so that no other folder can take its place.
//! 2. Folders and marks are created and removed through handles.
//! 3. A new disk gets no folder that the record of a migration names. The record stays if the last steps of the
//!    migration have failed, and the next opening of the datastore would take the new disk for the old copy, and remove
//!    it.

use super::{IMAGES, INCOMPLETE};
use crate::location::Location;
use crate::migrate;
use backend::{Access, Directory, IoMode};
use error::{Error, ErrorKind, IoContext, Result};
use layer::image::Folder;
use std::fs;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folders of a datastore's disks.
#[derive(Clone)]
pub(crate) struct ImageFolders {
    /// The datastore's location; `None` if it was opened by its directory.
    location: Option<Location>,
    /// The path of `DATASTORE/images`; `None` if the datastore has no local folder, and so no disks in VMware's
    /// formats.
    path: Option<PathBuf>,
    datastore: Arc<dyn Directory>,
}

impl ImageFolders {
    pub fn new(location: Option<&Location>, datastore: &Arc<dyn Directory>) -> Self {
        let path = location.and_then(Location::local_path).map(|path| path.join(IMAGES));
        Self { location: location.cloned(), path, datastore: Arc::clone(datastore) }
    }

    /// The path of the folder `images`, even if the folder of the datastore was moved; `None` if the datastore cannot
    /// have disks in VMware's formats.
    pub fn local_path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// As [`Self::local_path`]. Fails if the folder of the datastore was moved: images are found by path, while
    /// the other files are opened through the handle of the datastore's folder.
    pub fn path(&self) -> Result<&Path> {
        match (&self.path, &self.location) {
            (Some(path), location) => {
                location.iter().try_for_each(|location| location.check_not_moved(&*self.datastore))?;
                Ok(path)
            }
            (None, Some(location)) => location.need_folder("disks in VMware's formats"),
            (None, None) => {
                let text = "disks in VMware's formats need a datastore in a local folder";
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Names of the folders in `images`, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        self.path.as_deref().map_or_else(|| Ok(Vec::new()), names_in)
    }

    /// Opens the folder of a disk in `images`.
    pub fn home(&self, name: &str) -> Result<Folder> {
        self.open(&self.path()?.join(name), &Path::new(IMAGES).join(name))
    }

    /// Opens the folder to which a record refers. If the path does not exist because the datastore was moved, opens the
    /// folder with the same name in this datastore.
    pub fn find(&self, reference: &str) -> Result<Folder> {
        let path = self.path_of(reference)?;
        let within = path.file_name().map_or_else(PathBuf::new, |name| Path::new(IMAGES).join(name));
        self.open(&path, &within)
    }

    /// As [`Self::find`], for a folder that the user of this process has named. So it may belong to any user.
    pub fn find_named(&self, reference: &str) -> Result<Folder> {
        Folder::of_disk(&self.path_of(reference)?)
    }

    fn path_of(&self, reference: &str) -> Result<PathBuf> {
        let (images, path) = (self.path()?, Path::new(reference));
        if !path.is_dir()
            && let Some(name) = path.file_name()
            && path.parent().is_some_and(|parent| parent.ends_with(IMAGES))
            && images.join(name).is_dir()
        {
            return Ok(images.join(name));
        }
        Ok(path.to_owned())
    }

    /// Opens a folder. If root has opened the datastore of another user, the folder must belong to this user, or
    /// `within` must lead to the folder from the folder of the datastore.
    fn open(&self, path: &Path, within: &Path) -> Result<Folder> {
        let folder = Folder::of_disk(path)?;
        let looking = || format!("looking for the owner of '{}'", path.display());
        let Some(datastore) = self.datastore.searched().during(looking)? else { return Ok(folder) };
        let Some(user) = datastore.other_owner() else { return Ok(folder) };
        let Some(found) = folder.directory().searched().during(looking)? else { return Ok(folder) };
        if found.other_owner() == Some(user) || datastore.contains(within, &found) {
            return Ok(folder);
        }
        let text = format!(
            "'{}' cannot be used by root for the datastore of user {user}, to whom it does not belong: run the command \
             as this user, for example with `sudo -u '#{user}'`",
            path.display()
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// Fails if root has opened the datastore of another user: this user could name any file of root in a record.
    /// `what` is what the record names.
    pub fn refuse_foreign_record(&self, what: &str) -> Result<()> {
        let looking = || "looking for the owner of the datastore".to_owned();
        let Some(datastore) = self.datastore.searched().during(looking)? else { return Ok(()) };
        let Some(user) = datastore.other_owner() else { return Ok(()) };
        let text = format!(
            "{what} is not opened by root for the datastore of user {user}: run the command as this user, for example \
             with `sudo -u '#{user}'`"
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn images(&self) -> Result<Folder> {
        self.open(self.path()?, Path::new(IMAGES))
    }

    /// Creates a folder named like the disk, or with a number in addition if there is such a folder, or if a record of
    /// a migration names it. Returns the folder's name.
    pub fn create(&self, disk: &str) -> Result<String> {
        let making = |folder: &str| format!("making the folder '{IMAGES}{folder}' of the datastore");
        self.path()?;
        match self.datastore.create_folder(IMAGES) {
            Ok(()) => self.datastore.sync().during(|| making(""))?,
            Err(error) if error.kind() == IoKind::AlreadyExists => {}
            Err(error) => return Err(Error::io(making(""), error)),
        }
        let images = self.images()?;
        let (mut name, mut number) = (disk.to_owned(), 2);
        loop {
            match images.directory().create_folder(&name) {
                // The records are read once the folder exists: a record that is written later cannot name it, because
                // a migration records only folders that it has found or made itself.
                Ok(()) => match migrate::is_folder_recorded(&self.datastore, &name) {
                    Ok(false) => return Ok(name),
                    recorded => {
                        images.directory().remove_folder(&name).during(|| making(&format!("/{name}")))?;
                        recorded?;
                    }
                },
                // The folder belongs to a disk that was renamed after its creation.
                Err(error) if error.kind() == IoKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(making(&format!("/{name}")), error)),
            }
            name = format!("{disk}-{number}");
            number += 1;
        }
    }

    /// Makes the names of the folders durable.
    pub fn sync(&self) -> Result<()> {
        sync(&self.images()?)
    }

    /// Removes the folder of a deleted disk, with these files if they exist. Other files stay, and in this case the
    /// folder stays too.
    pub fn remove(&self, name: &str, files: &[&str]) -> Result<()> {
        let home = match self.home(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            home => home?,
        };
        let removing = || format!("removing the folder '{IMAGES}/{name}' of the datastore");
        for file in files {
            match home.directory().remove(file) {
                Err(error) if error.kind() != IoKind::NotFound => return Err(Error::io(removing(), error)),
                _ => {}
            }
        }
        let images = self.images()?;
        match images.directory().remove_folder(name) {
            Ok(()) => sync(&images),
            Err(error) if error.kind() == IoKind::NotFound => Ok(()),
            Err(error) if error.kind() == IoKind::DirectoryNotEmpty => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} has files that belong to no disk; look at them, and remove the folder",
                    self.path()?.join(name).display()
                ),
            )),
            Err(error) => Err(Error::io(removing(), error)),
        }
    }

    /// The folders with an [`INCOMPLETE`] mark.
    pub fn incomplete(&self) -> Result<Vec<String>> {
        let mut names = self.names()?;
        names.retain(|name| self.home(name).is_ok_and(|home| is_incomplete(&home)));
        Ok(names)
    }

    /// Sets or removes the [`INCOMPLETE`] mark of a folder. Has no effect if the folder does not exist.
    pub fn set_incomplete(&self, name: &str, incomplete: bool) -> Result<()> {
        match self.home(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            home => mark(&home?, incomplete),
        }
    }
}

/// Whether a folder has an [`INCOMPLETE`] mark.
pub(super) fn is_incomplete(home: &Folder) -> bool {
    let opened = home.directory().open_foreign(INCOMPLETE, IoMode::Buffered, Access::Read);
    !opened.is_err_and(|error| error.kind() == IoKind::NotFound)
}

/// Sets or removes the [`INCOMPLETE`] mark, durably. Setting a mark that is set, and removing a missing one, succeed.
pub(super) fn mark(home: &Folder, incomplete: bool) -> Result<()> {
    let (done, done_before) = match incomplete {
        true => (home.directory().create(INCOMPLETE, IoMode::Buffered).map(drop), IoKind::AlreadyExists),
        false => (home.directory().remove(INCOMPLETE), IoKind::NotFound),
    };
    if !done.as_ref().is_err_and(|error| error.kind() == done_before) {
        done.during(|| format!("marking {}", shown(home)))?;
    }
    sync(home)
}

fn sync(folder: &Folder) -> Result<()> {
    folder.directory().sync().during(|| format!("syncing {}", shown(folder)))
}

fn shown(folder: &Folder) -> String {
    folder.path().map_or_else(String::new, |path| path.display().to_string())
}

/// Names of the folders in a folder, sorted.
fn names_in(path: &Path) -> Result<Vec<String>> {
    let listing = || format!("listing {}", path.display());
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == IoKind::NotFound => return Ok(Vec::new()),
        other => other.during(listing)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.during(listing)?;
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(name) = entry.file_name().to_str().filter(|_| is_folder) {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::datastore::{Datastore, InitOptions, QueueChoice};
    use crate::testbed::options;
    use layer::image::{ImageKind, Place};
    use std::fs;
    use std::os::unix::fs::{chown, lchown, symlink};
    use std::path::Path;
    use std::sync::Arc;
    use work::NoProgress;

    const USER: u32 = 1234;

    fn open(path: &Path) -> Arc<Datastore> {
        Datastore::open(path, options(QueueChoice::Threads)).unwrap()
    }

    /// A closed datastore of root with the disk `own`, and `adopted`, which has an adopted image and the delta of its
    /// head in the folder `outside`.
    fn made() -> (tempfile::TempDir, std::path::PathBuf, std::path::PathBuf) {
        let top = tempfile::tempdir().unwrap();
        let (path, outside) = (top.path().join("ds"), top.path().join("outside"));
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let datastore = open(&path);
        let foreign = &datastore.foreign;
        foreign.create_disk(&vmdk::NewDisk::new("own", 8 << 20, ImageKind::Thin, None), &NoProgress).unwrap();
        fs::create_dir(&outside).unwrap();
        for name in ["own.vmdk", "own-flat.vmdk"] {
            fs::copy(path.join("images/own").join(name), outside.join(name)).unwrap();
        }
        let place = Place::local(&outside.join("own.vmdk"), &[]).unwrap();
        let how = vmdk::Adopt::Head { writable: true };
        let adopted = foreign.adopt("adopted", &place, how, &foreign.options().clone()).unwrap();
        foreign.complete(&adopted.entry.folder).unwrap();
        let first = vmdk::NewSnapshot { folder: Some(outside.clone()), ..vmdk::NewSnapshot::named("first") };
        adopted.entry.disk.snapshot(&first).unwrap();
        adopted.entry.disk.close().unwrap();
        drop(adopted);
        datastore.close().unwrap();
        (top, path, outside)
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Gives a folder and all that is in it to a user.
    fn give(path: &Path, user: u32) {
        lchown(path, Some(user), Some(user)).unwrap();
        if path.is_dir() && !path.is_symlink() {
            names(path).iter().for_each(|name| give(&path.join(name), user));
        }
    }

    #[test]
    fn root_follows_no_record_of_another_user_into_a_folder_of_root() {
        let (_top, path, outside) = made();
        give(&path, USER);
        let before = names(&outside);
        let take = |name: &str, disk: &str| {
            let datastore = open(&path);
            let entry = datastore.foreign.find(disk).unwrap();
            let taken = entry.disk.snapshot(&vmdk::NewSnapshot::named(name)).map(|_| ());
            drop(entry);
            datastore.close().unwrap();
            taken.map_err(|error| error.to_string())
        };
        let told = take("second", "adopted").unwrap_err();
        assert!(told.contains("cannot be used by root for the datastore of user 1234"), "{told}");
        assert_eq!(names(&outside), before);
        take("second", "own").unwrap();
        // A folder of the same user.
        give(&outside, USER);
        take("second", "adopted").unwrap();
        // The deletion is recorded, and the removal of files is left to the user.
        give(&outside, 0);
        let datastore = open(&path);
        let entry = datastore.foreign.find("adopted").unwrap();
        assert!(Arc::clone(&entry.disk).delete().is_err());
        assert_eq!(names(&outside), before);
        drop((entry, datastore));
        give(&outside, USER);
        let datastore = open(&path);
        assert!(datastore.foreign.find("adopted").is_none());
        datastore.close().unwrap();
        drop(datastore);
        assert_eq!(names(&outside), ["own-flat.vmdk", "own.vmdk"]);
        // A folder that root has created in the datastore with an earlier version.
        chown(path.join("images/own"), Some(0), None).unwrap();
        take("third", "own").unwrap();
    }

    #[test]
    fn root_follows_no_link_in_place_of_the_folder_of_images() {
        let (top, path, _) = made();
        let elsewhere = top.path().join("elsewhere");
        give(&path, USER);
        fs::rename(path.join("images"), &elsewhere).unwrap();
        give(&elsewhere, 0);
        symlink(&elsewhere, path.join("images")).unwrap();
        let (before, within) = (names(&elsewhere), names(&elsewhere.join("own")));
        let datastore = open(&path);
        assert!(datastore.foreign.find("own").is_none());
        let new = vmdk::NewDisk::new("new", 8 << 20, ImageKind::Thin, None);
        assert!(datastore.foreign.create_disk(&new, &NoProgress).is_err());
        assert!(datastore.foreign.remove_folder("own").is_err());
        datastore.close().unwrap();
        drop(datastore);
        assert_eq!((names(&elsewhere), names(&elsewhere.join("own"))), (before, within));
        give(&elsewhere, USER);
        let datastore = open(&path);
        assert!(datastore.foreign.find("own").is_some());
        datastore.close().unwrap();
    }
}
