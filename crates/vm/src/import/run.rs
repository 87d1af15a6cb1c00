//! Creating the machine of a plan.
//!
//! 1. Every image is opened and every name is checked before anything is created.
//! 2. The machine exists once all of its disks exist. If the command fails or is killed before that, nothing of the
//!    machine remains: the next command about machines removes the imported disks ([`crate::machines`]).
//! 3. In a live import the disks exist at once, and the server copies their blocks afterwards.

use super::plan::{Plan, PlannedDisk, PlannedSnapshot};
use super::{Content, Effect, Note};
use crate::clone::Sum;
use crate::definition::{Boot, Definition};
use crate::disks::SnapshotFacts;
use crate::host::Host;
use crate::machine::{Machine, of_another_user};
use crate::machines::{OwnDisk, Snapshot};
use crate::nvram;
use crate::snapshots::{self, Record};
use error::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use work::Progress;

/// How disks are imported.
#[derive(Clone, Debug)]
pub struct How {
    /// Whether to import live: the disks are read from the images until the server has copied the images.
    pub live: bool,
    /// Folders, besides an image's own folder, that contain files to which the image may refer.
    pub permitted: Vec<PathBuf>,
    /// Limit of copied bytes per second; 0 for none.
    pub rate: u64,
}

/// Adds the source of the machine and the disk to an error. If the error already names the source, because the machine
/// is imported from a single image, adds only the disk.
fn of_disk(error: Error, source: &Path, label: &str) -> Error {
    let source = format!("'{}'", source.display());
    match error.to_string().contains(&source) {
        true => error.context(label),
        false => error.context(format_args!("{source}, {label}")),
    }
}

/// Fails if this process is root and another user can replace the kernel or the initial RAM disk. QEMU reads these
/// files at each start, and follows a link to any file of the host, which the guest would read then.
fn check_boot(boot: &Boot) -> Result<()> {
    for file in std::iter::once(&boot.kernel).chain(&boot.initrd) {
        if let Some((found, user)) = of_another_user(file.ancestors())? {
            let text = format!(
                "QEMU of root would read '{}' at each start, and user {user}, to whom '{}' belongs, could put a link to \
                 any file there: copy it into a folder of root, and name that in the description",
                file.display(),
                found.display()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    }
    Ok(())
}

/// Checks that a plan can be carried out, and determines the capacities of its disks. Notes snapshots inside
/// images, which the description does not name. The digests of an archive are not
/// verified, because that takes as long as reading the whole archive: the import itself verifies them.
pub fn check(host: &Host, plan: &mut Plan, how: &How) -> Result<()> {
    let context = |error: Error, label: &str| of_disk(error, &plan.source, label);
    let exists = |what: &str| {
        let text = format!("there is a {what} already: choose another name with --name");
        Error::new(ErrorKind::Exists, format!("'{}': {text}", plan.source.display()))
    };
    if host.machines().has(&plan.definition.name) {
        return Err(exists(&format!("machine '{}'", plan.definition.name)));
    }
    let boot = plan.definition.boot.as_ref().map_or(Ok(()), check_boot);
    boot.map_err(|error| error.context(format_args!("'{}'", plan.source.display())))?;
    let there = host.disks().all()?;
    for disk in &plan.disks {
        if there.contains_key(&disk.name) {
            return Err(exists(&format!("disk '{}'", disk.name)));
        }
    }
    let mut notes = Vec::new();
    for disk in &mut plan.disks {
        disk.capacity = match &disk.content {
            Content::Image { path, format } => {
                let found = host.disks().image(path, format.as_deref(), &how.permitted).and_then(|image| {
                    // The import reads the image, so a wrong description would go unnoticed.
                    disk.stated.map_or(Ok(()), |stated| stated.check(image.capacity)).map(|()| image)
                });
                let image = found.map_err(|error| context(error, &disk.label))?;
                if image.internal_snapshots > 0 {
                    let reason = format!(
                        "its image has internal snapshots ({}): 'qemu-img convert -l NAME' writes one into a file of \
                         its own",
                        image.internal_snapshots
                    );
                    notes.push(Note { item: disk.label.clone(), effect: Effect::LeftOut, reason });
                }
                Some(image.capacity)
            }
            Content::Empty { capacity } => Some(*capacity),
            Content::Member { .. } if how.live => {
                let text =
                    "a disk in an archive cannot be used in place: import it without --live, or unpack the archive";
                return Err(context(Error::new(ErrorKind::Unsupported, text), &disk.label));
            }
            Content::Member { archive, member } => {
                let found = host.disks().member(archive, member);
                Some(found.map_err(|error| context(error, &disk.label))?)
            }
        };
    }
    plan.notes.extend(notes);
    Ok(())
}

/// Creates the machine. Returns the names of the snapshots that were created.
pub fn run(host: &Host, plan: &Plan, how: &How, progress: &dyn Progress) -> Result<Vec<String>> {
    let _working = host.work()?;
    let definition = &plan.definition;
    let own = |_: &Definition| -> Vec<OwnDisk> {
        plan.disks.iter().map(|disk| OwnDisk { name: disk.name.clone(), origin: None }).collect()
    };
    let making = host.machines().make(std::slice::from_ref(definition), own, Vec::new())?;
    making.begin_disks(&[])?;
    let sum = Sum::new(plan.disks.len().max(1), progress);
    for PlannedDisk { name, content, label, .. } in &plan.disks {
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "stopped on request; the machine was not made"));
        }
        making.begin_disks(&[name.as_str()])?;
        let imported = match content {
            Content::Empty { capacity } => host.disks().create(name, *capacity),
            content => host.disks().import(name, content, how, &sum.part()),
        };
        if let Err(error) = imported {
            return Err(of_disk(making.failed(error), &plan.source, label));
        }
        making.made([name.clone()]);
    }
    let machine = making.machine(&definition.name);
    if let Some(file) = &plan.nvram {
        nvram::keep_resolved(file, machine.folder())?;
    }
    let snapshots = take_over_snapshots(host, plan, &machine)?;
    making.finish(&definition.name)?;
    making.settle()?;
    Ok(snapshots)
}

/// Records the imported snapshots of the disks as snapshots of the machine.
fn take_over_snapshots(host: &Host, plan: &Plan, machine: &Machine) -> Result<Vec<String>> {
    let mut there: Vec<Vec<SnapshotFacts>> = Vec::with_capacity(plan.disks.len());
    if plan.snapshots.is_empty() {
        return Ok(Vec::new());
    }
    for disk in &plan.disks {
        there.push(host.disks().snapshots(&disk.name)?);
    }
    let mut made = Vec::new();
    for snapshot in &plan.snapshots {
        let found = snapshot.disks.iter().map(|index| Some((*index, take_one(&mut there[*index], snapshot)?)));
        let Some(found) = found.collect::<Option<Vec<(usize, String)>>>() else {
            tracing::warn!(
                "snapshot '{}' is left out: a disk of machine '{}' does not have it",
                snapshot.label,
                machine.name()
            );
            continue;
        };
        // When the snapshot was taken, the machine had these disks only.
        let disks = snapshot.disks.iter().map(|index| plan.definition.disks[*index].clone()).collect();
        let record = Record {
            version: snapshots::VERSION,
            name: snapshot.name.clone(),
            created: snapshot.created,
            consistency: "crash-consistent".to_owned(),
            passt: false,
            disks: found
                .into_iter()
                .map(|(index, name)| Snapshot { disk: plan.disks[index].name.clone(), name })
                .collect(),
            machine: Definition { disks, ..plan.definition.clone() },
        };
        snapshots::take_over(machine, &record)?;
        made.push(snapshot.name.clone());
    }
    Ok(made)
}

/// Removes from `there` the disk snapshot that belongs to a snapshot of the machine. The import of the disk may have
/// changed the snapshot's name.
fn take_one(there: &mut Vec<SnapshotFacts>, snapshot: &PlannedSnapshot) -> Option<String> {
    let letters = |name: &str| name.chars().filter(|c| c.is_alphanumeric()).collect::<String>().to_lowercase();
    let wanted = letters(&snapshot.label);
    let like = |one: &SnapshotFacts| letters(&one.name).starts_with(&wanted);
    let index = there
        .iter()
        .position(|one| one.created == snapshot.created && like(one))
        .or_else(|| there.iter().position(|one| one.name == snapshot.label))
        .or_else(|| there.iter().position(|one| one.created == snapshot.created))?;
    Some(there.remove(index).name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::chown;

    #[test]
    fn root_imports_no_kernel_that_another_user_can_replace() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "x").unwrap();
            path
        };
        let boot = Boot { kernel: file("kernel"), initrd: Some(file("initrd")), append: String::new() };
        check_boot(&boot).unwrap();
        for path in [boot.kernel.as_path(), &file("initrd"), folder.path()] {
            chown(path, Some(1234), None).unwrap();
            let error = check_boot(&boot).unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("user 1234"), "{error}");
            chown(path, Some(0), None).unwrap();
        }
    }
}
