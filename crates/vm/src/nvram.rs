//! The variables of a machine's UEFI firmware: boot entries, keys of Secure Boot. They are in the file `nvram` of the
//! machine's folder.
//!
//! 1. At the first start the file is copied from the firmware's template, unless the import of the machine has created
//!    the file.
//! 2. Snapshots and clones of the machine have copies of the file. A revert restores the snapshot's copy.

use crate::definition::{Definition, Firmware};
use crate::durable;
use crate::machine::remove_if_there;
use crate::qemu::firmware::{Uefi, find};
use backend::regular;
use error::{Error, ErrorKind, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file with the UEFI variables.
const FILE: &str = "nvram";
/// Longest accepted file, in bytes. The files of OVMF have up to 4 MiB.
pub const LENGTH_MAX: u64 = 64 << 20;

/// Path of the UEFI variables of the machine in `folder`.
pub fn file(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

/// The UEFI of a machine that is being started; `None` if the machine has BIOS.
pub(crate) fn prepare(folder: &Path, definition: &Definition) -> Result<Option<Uefi>> {
    let platform = &definition.platform;
    if platform.firmware != Firmware::Uefi {
        return Ok(None);
    }
    let variables = file(folder);
    let length = match fs::metadata(&variables) {
        Ok(metadata) => Some(metadata.len()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(Error::io(format!("looking at '{}'", variables.display()), e)),
    };
    let context = |error: Error| error.context(format_args!("machine '{}'", definition.name));
    let build = find(platform, length).map_err(context)?;
    if length.is_none() {
        keep(&build.variables, folder)?;
    }
    Ok(Some(Uefi { code: build.code, variables }))
}

/// Copies a file of UEFI variables into a folder, durably.
pub(crate) fn keep(from: &Path, folder: &Path) -> Result<()> {
    durable::write(&file(folder), &regular::read(from, LENGTH_MAX, "file of UEFI variables")?)
}

/// As [`keep`], for a file that a description of a machine names: its canonical path, in which links are refused.
pub(crate) fn keep_resolved(from: &Path, folder: &Path) -> Result<()> {
    durable::write(&file(folder), &regular::read_resolved(from, LENGTH_MAX, "file of UEFI variables")?)
}

/// Copies the UEFI variables of one folder, if it has any, to another folder.
pub(crate) fn carry(from: &Path, to: &Path) -> Result<()> {
    match file(from).exists() {
        true => keep(&file(from), to),
        false => Ok(()),
    }
}

/// The UEFI variables in a folder; `None` if it has none.
pub(crate) fn read(folder: &Path) -> Result<Option<Vec<u8>>> {
    match regular::read_own(&file(folder), LENGTH_MAX, "file of UEFI variables") {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        bytes => bytes.map(Some),
    }
}

/// Writes the UEFI variables of a folder, durably.
pub(crate) fn write(folder: &Path, variables: &[u8]) -> Result<()> {
    durable::write(&file(folder), variables)
}

/// Replaces the UEFI variables of a machine by the variables of a snapshot.
pub(crate) fn restore(snapshot: &Path, machine: &Path) -> Result<()> {
    match file(snapshot).exists() {
        true => keep(&file(snapshot), machine),
        // A snapshot that was taken before the machine's first start has no variables.
        false => remove_if_there(&file(machine)),
    }
}
