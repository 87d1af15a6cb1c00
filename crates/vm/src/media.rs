//! Images in the CD-ROM drives of machines: checking them, and inserting and ejecting them while a machine runs.
//!
//! 1. An image is only read, so several machines may use the image at the same time.
//! 2. The definition names every image in the process's drives: the definition is changed before an image is inserted,
//!    and after an image is ejected. If the command is killed in between, or QEMU does not answer, repeating the
//!    command completes the change.

use crate::busy;
use crate::definition::{Cdrom, Definition};
use crate::plug::has_node;
use crate::qemu::boot::{cdrom_device, cdrom_node, image};
use crate::qmp::Client;
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The absolute path of an image that can be read.
pub fn readable(path: &Path) -> Result<PathBuf> {
    let looking = || format!("opening the image '{}' for a CD-ROM drive", path.display());
    let whole = path.canonicalize().during(looking)?;
    let kind = whole.metadata().during(looking)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let text =
            format!("'{}' is neither a file nor a block device, and cannot be in a CD-ROM drive", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // Opened only now, because opening a pipe would wait for a writer.
    File::open(&whole).during(looking)?;
    Ok(whole)
}

/// Checks that every image of a machine that starts can be read.
pub(crate) fn check(definition: &Definition) -> Result<()> {
    let name = &definition.name;
    for file in definition.cdroms.iter().filter_map(|cdrom| cdrom.file.as_ref()) {
        readable(file).map_err(|error| {
            let text = format!(
                "machine '{name}' does not start: {error}; restore the file, or empty the drive with 'lamina vm edit {name} \
                 --eject {}'",
                file.display()
            );
            Error::new(error.kind(), text)
        })?;
    }
    Ok(())
}

/// Inserts the image of a drive that is empty in the process. Without effect if the image is there already.
pub(crate) fn insert(monitor: &mut Client, cdrom: &Cdrom) -> Result<()> {
    let (node, id) = (cdrom_node(cdrom), cdrom_device(cdrom));
    let Some(file) = &cdrom.file else { return Ok(()) };
    if holds(monitor, &node)? {
        // An earlier command may have been killed before it closed the drive.
        return monitor.execute("blockdev-close-tray", json!({ "id": id })).map(drop);
    }
    // The same before it inserted the image.
    if has_node(monitor, &node)? {
        monitor.execute("blockdev-del", json!({ "node-name": node }))?;
    }
    monitor.execute("blockdev-add", image(&node, file))?;
    let inserted = monitor
        .execute("blockdev-open-tray", json!({ "id": id, "force": true }))
        .and_then(|_| monitor.execute("blockdev-insert-medium", json!({ "id": id, "node-name": node })))
        .and_then(|_| monitor.execute("blockdev-close-tray", json!({ "id": id })));
    inserted.map(drop).inspect_err(|_| {
        let _ = monitor.execute("blockdev-del", json!({ "node-name": node }));
    })
}

/// Whether a drive has the image of a block node.
fn holds(monitor: &mut Client, node: &str) -> Result<bool> {
    let all = monitor.execute("query-block", json!({}))?;
    Ok(all.as_array().is_some_and(|all| all.iter().any(|one| one["inserted"]["node-name"] == node)))
}

/// Ejects the image of a drive. If the guest has locked the drive, the guest is requested to release it; with `force`,
/// the image is ejected without this request. Without effect if the drive is empty.
pub(crate) fn eject(monitor: &mut Client, cdrom: &Cdrom, force: bool) -> Result<()> {
    let (node, id) = (cdrom_node(cdrom), cdrom_device(cdrom));
    if !has_node(monitor, &node)? {
        return Ok(());
    }
    monitor.execute("blockdev-open-tray", json!({ "id": id, "force": force }))?;
    let deadline = Instant::now() + busy::LOCKED_DRIVE;
    loop {
        match monitor.execute("blockdev-remove-medium", json!({ "id": id })) {
            Ok(_) => break,
            Err(error) if error.kind() != ErrorKind::Invalid => return Err(error),
            Err(_) => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || monitor.wait_event(&["DEVICE_TRAY_MOVED"], left)?.is_none() {
            let text = format!(
                "the guest has locked the drive and has not released it within {:?}: unmount the image in the guest, \
                 or eject it with --force",
                busy::LOCKED_DRIVE
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
    }
    monitor.execute("blockdev-close-tray", json!({ "id": id }))?;
    monitor.execute("blockdev-del", json!({ "node-name": node })).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::VncTls;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn an_image_is_a_file_that_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let iso = folder.path().join("x.iso");
        assert_eq!(readable(&iso).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::write(&iso, "x").unwrap();
        let link = folder.path().join("link.iso");
        std::os::unix::fs::symlink("x.iso", &link).unwrap();
        assert_eq!(readable(&link).unwrap(), iso.canonicalize().unwrap());
        assert_eq!(readable(folder.path()).unwrap_err().kind(), ErrorKind::Invalid);
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        machine.add_cdrom(Some(folder.path().join("gone.iso"))).unwrap();
        let error = check(&machine).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("'lamina vm edit web --eject "), "{error}");
    }

    #[test]
    fn commands_do_not_wait_for_a_pipe_in_place_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = |name: &str| {
            let path = folder.path().join(name);
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            path
        };
        let definition = fifo(crate::machine::DEFINITION);
        let machine = crate::machine::Machine::at(folder.path());
        assert!(machine.definition().unwrap_err().to_string().contains("that is no definition"));
        assert!(machine.named_disks().is_empty());
        assert!(crate::nvram::keep(&definition, folder.path()).is_err());
        assert!(readable(&fifo("install.iso")).is_err());
        let mut vnc = Definition::new("web", 1, 64 << 20).unwrap();
        fifo(VncTls::FILES[0]);
        vnc.vnc_tls = Some(VncTls { folder: folder.path().into(), clients: false });
        assert_eq!(crate::screen::check(&vnc).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
