//! Small files that are replaced as a whole: the new content is written and flushed under a temporary name, then the
//! temporary file is renamed, then the folder is flushed. So a crash leaves the old content or the new one, each
//! complete, and at most a temporary file beside it.

use crate::{Directory, File, IoMode};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The folder of a file or folder that a path names.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the names in the folder of `path` durable.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    std::fs::File::open(folder_of(path))?.sync_all()
}

/// Replaces the content of file `name`, or creates it, by way of the file `temporary`. Permissions of the replaced file
/// are kept. Durable on return.
pub fn durably(directory: &dyn Directory, name: &str, temporary: &str, bytes: &[u8]) -> io::Result<()> {
    prepare(directory, temporary, bytes)?;
    keep_permissions(directory, name, temporary)?;
    directory.rename(temporary, name)?;
    directory.sync()
}

/// As [`durably`], without a flush: the file survives the end of this process, and a power cut once the operating
/// system has written it. A flush would first write the data of all disks in the file system.
pub fn unflushed(directory: &dyn Directory, name: &str, temporary: &str, bytes: &[u8]) -> io::Result<()> {
    write(directory, temporary, bytes, |_| Ok(()))?;
    directory.rename(temporary, name)
}

/// Creates file `temporary` with this content and flushes it, but not its name. Replaces the file of an earlier
/// attempt.
pub fn prepare(directory: &dyn Directory, temporary: &str, bytes: &[u8]) -> io::Result<()> {
    write(directory, temporary, bytes, |file| file.sync())
}

/// Removes a file that may be gone already.
pub fn remove_if_there(directory: &dyn Directory, name: &str) -> io::Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn write(
    directory: &dyn Directory,
    name: &str,
    bytes: &[u8],
    finish: impl FnOnce(&Arc<dyn File>) -> io::Result<()>,
) -> io::Result<()> {
    remove_if_there(directory, name)?;
    let file = directory.create(name, IoMode::Buffered)?;
    // An incomplete file is removed, because on a full file system it may hold the last free space.
    file.write_at(&[bytes], 0, false).and_then(|()| finish(&file)).inspect_err(|_| drop(directory.remove(name)))
}

fn keep_permissions(directory: &dyn Directory, name: &str, temporary: &str) -> io::Result<()> {
    match directory.copy_permissions(name, temporary) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::simulated::{SimulatedDisk, SimulatedOptions};

    fn content(directory: &dyn Directory) -> Vec<u8> {
        let file = directory.open("record", IoMode::Buffered).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_power_cut_leaves_the_old_or_the_new_content() {
        let (old, new) = (vec![1; 700], vec![2; 5000]);
        let mut found = [0, 0];
        for seed in 0..40 {
            for cut in 0.. {
                let disk = SimulatedDisk::new(seed * 1000 + cut, SimulatedOptions::default());
                durably(&*disk.directory(), "record", "record.new", &old).unwrap();
                disk.cut_after(disk.operations() + cut);
                let finished = durably(&*disk.directory(), "record", "record.new", &new).is_ok();
                let after = disk.crash();
                let left = content(&*after.directory());
                assert!(left == old || left == new, "seed {seed} cut {cut}: neither the old nor the new content");
                assert!(
                    !finished || left == new,
                    "seed {seed} cut {cut}: the old content after a completed replacement"
                );
                found[usize::from(left == new)] += 1;
                // Whatever files the crash left, the next replacement succeeds and leaves only its own file.
                durably(&*after.directory(), "record", "record.new", &old).unwrap();
                assert_eq!(after.directory().list().unwrap(), ["record"]);
                if finished {
                    break;
                }
            }
        }
        assert!(found[0] > 50 && found[1] > 50, "{found:?}: too few cuts left the old or the new content");
    }

    #[test]
    fn a_replacement_without_space_leaves_no_temporary_file() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        durably(&*disk.directory(), "record", "record.new", &[1; 4096]).unwrap();
        disk.set_capacity(8192);
        unflushed(&*disk.directory(), "record", "record.new", &[2; 1 << 20]).unwrap_err();
        prepare(&*disk.directory(), "record.new", &[2; 1 << 20]).unwrap_err();
        assert_eq!(disk.directory().list().unwrap(), ["record"]);
        assert_eq!(content(&*disk.directory()), [1; 4096]);
    }
}
