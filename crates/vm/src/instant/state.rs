//! Saving the device state of a QEMU process and loading it into another one.
//!
//! ```text
//! magic, version | section of memory | sections of devices | end | description
//! ```
//!
//! 1. A state contains no guest memory except small blocks such as firmware and tables. For a process whose memory is a
//!    shared file, QEMU's migration with `x-ignore-shared` leaves that file out. A process that maps an image
//!    copy-on-write has no shared memory: its devices are saved with `xen-save-devices-state` (which works for every
//!    guest, despite its name), and the small blocks are taken from the state with which the process was started. The
//!    blocks are still the same, because a running guest does not change its firmware.
//! 2. The devices in the older state begin at the header of the first device. The state is searched for this header,
//!    which must occur exactly once. Otherwise the operation fails without effect.
//! 3. States are written to open files that are passed to QEMU. The alternative, a pipe to another process, would make
//!    QEMU fork, which copies its page tables.

use crate::qemu::features::Features;
use crate::qmp::Client;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long saving or loading a device state may take. Memory is not part of the device state.
const PATIENCE: Duration = Duration::from_secs(60);
/// The name under which a file is passed to QEMU.
const NAME: &str = "state";
/// Length of the magic number and the version at the start of a state.
const HEADER: usize = 8;
/// Markers of a device section, of the end of all sections, and of the description.
const SECTION_FULL: u8 = 4;
const END: u8 = 0;
const DESCRIPTION: u8 = 6;
/// An empty description, because QEMU warns if the description is missing.
const NO_DESCRIPTION: [u8; 5] = [DESCRIPTION, 0, 0, 0, 0];

/// Sets the migration capabilities that saving and loading need. The caller calls this before the guest is paused.
pub fn prepare(monitor: &mut Client, features: &Features) -> Result<()> {
    if !features.ignore_shared {
        let text = format!(
            "QEMU {} cannot save device state without shared memory, which instant clones need",
            features.version
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let capabilities: Vec<Value> =
        ["x-ignore-shared", "events"].iter().map(|name| json!({ "capability": name, "state": true })).collect();
    monitor.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).map(drop)
}

/// Saves the device state of a paused guest whose memory is a shared file.
pub fn save(monitor: &mut Client, features: &Features, file: &Path) -> Result<()> {
    let saving = || format!("saving device state to '{}'", file.display());
    let target = private::create(file).during(saving)?;
    let status = with_uri(monitor, features, &target, |monitor, uri| {
        monitor.execute("migrate", json!({ "uri": uri }))?;
        ended(monitor)
    })?;
    match status.as_str() {
        "completed" => Ok(()),
        status => {
            let why = monitor.execute("query-migrate", json!({}))?;
            let why = why["error-desc"].as_str().unwrap_or("QEMU gives no reason");
            let text = format!("QEMU could not save its state to '{}' ({status}): {why}", file.display());
            Err(Error::new(ErrorKind::Io, text))
        }
    }
}

/// Saves the device state of a paused guest whose memory is a changed copy-on-write mapping of an image. `began` is the
/// state with which the process was started.
pub fn save_above(monitor: &mut Client, features: &Features, began: &Path, file: &Path) -> Result<()> {
    if !features.save_devices {
        let text = format!(
            "QEMU {} cannot save its devices without its memory: stop the machine and start it before another clone",
            features.version
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let devices = with_ending(file, ".devices");
    let opened = private::create(&devices).during(|| format!("saving device state to '{}'", devices.display()))?;
    let outcome = monitor
        .lend(&opened, |monitor, name| {
            monitor.execute("xen-save-devices-state", json!({ "filename": name, "live": false }))
        })
        .and_then(|_| join(began, &devices, file));
    let _ = fs::remove_file(&devices);
    outcome
}

/// Loads a device state. The guest is paused afterwards.
pub fn load(monitor: &mut Client, features: &Features, file: &Path) -> Result<()> {
    let source = File::open(file).during(|| format!("opening '{}'", file.display()))?;
    // QEMU exits if it cannot load a state.
    let failed = |error: Error| error.context(format_args!("QEMU could not load '{}'", file.display()));
    let status = with_uri(monitor, features, &source, |monitor, uri| {
        monitor.execute("migrate-incoming", json!({ "uri": uri }))?;
        ended(monitor)
    });
    match status.map_err(failed)?.as_str() {
        "completed" => {}
        status => {
            let text = format!("QEMU could not load '{}': the migration ended as '{status}'", file.display());
            return Err(Error::new(ErrorKind::Io, text));
        }
    }
    let status = monitor.execute("query-status", json!({}))?;
    match status["status"].as_str() {
        Some("paused" | "postmigrate" | "prelaunch" | "inmigrate") => Ok(()),
        other => {
            let text = format!(
                "QEMU is {}, and not paused, after it has loaded '{}'",
                other.unwrap_or("no longer running"),
                file.display()
            );
            Err(Error::new(ErrorKind::Io, text))
        }
    }
}

/// The final status of a migration.
fn ended(monitor: &mut Client) -> Result<String> {
    loop {
        let Some(event) = monitor.wait_event(&["MIGRATION"], PATIENCE)? else {
            return Err(Error::new(ErrorKind::Io, format!("QEMU did not complete the migration within {PATIENCE:?}")));
        };
        let status = event.data["status"].as_str().unwrap_or_default();
        if matches!(status, "completed" | "failed" | "cancelled") {
            return Ok(status.to_owned());
        }
    }
}

/// Calls `work` with the migration URI of an open file, which is passed to QEMU: QEMU may run as a user that cannot
/// open it. Newer QEMUs migrate to files by name only, so they get the name of a set of open files.
fn with_uri<T>(
    monitor: &mut Client,
    features: &Features,
    file: &File,
    work: impl FnOnce(&mut Client, &str) -> Result<T>,
) -> Result<T> {
    if features.migrate_to_file {
        return monitor.lend(file, |monitor, name| work(monitor, &format!("file:{name}")));
    }
    monitor.pass(NAME, file)?;
    work(monitor, &format!("fd:{NAME}"))
}

fn with_ending(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Writes a state that consists of the memory blocks of `began` and the devices of `devices`.
fn join(began: &Path, devices: &Path, file: &Path) -> Result<()> {
    let read = |path: &Path| fs::read(path).during(|| format!("reading '{}'", path.display()));
    let joined = joined(&read(began)?, &read(devices)?).ok_or_else(|| {
        let text = format!(
            "the saved states of memory '{}' and of the devices do not match: stop the machine and start it before \
             another clone",
            began.display()
        );
        Error::new(ErrorKind::Unsupported, text)
    })?;
    private::write(file, &joined).during(|| format!("writing '{}'", file.display()))
}

/// Joins the part of `began` before its devices and the devices of `devices`; `None` if the two do not fit.
pub fn joined(began: &[u8], devices: &[u8]) -> Option<Vec<u8>> {
    let first = first_device(devices)?;
    if began.get(..HEADER)? != devices.get(..HEADER)? || devices.last() != Some(&END) {
        return None;
    }
    let mut places = began.windows(first.len()).enumerate().filter(|(_, window)| *window == first);
    let (at, _) = places.next()?;
    if places.next().is_some() {
        return None;
    }
    let devices = devices.get(HEADER..)?;
    Some([&began[..at], devices, &NO_DESCRIPTION].concat())
}

/// The header of the first device: kind, number, name preceded by its length, instance, version.
fn first_device(devices: &[u8]) -> Option<&[u8]> {
    let section = devices.get(HEADER..)?;
    if *section.first()? != SECTION_FULL {
        return None;
    }
    let name = usize::from(*section.get(5)?);
    section.get(..1 + 4 + 1 + name + 4 + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &[u8] = b"\x04\0\0\0\0\x05timer\0\0\0\0\0\0\0\x02";

    #[test]
    fn device_states_replace_the_devices_of_a_saved_state() {
        let began = [b"QEVM\0\0\0\x03", &b"\x01 memory "[..], DEVICE, b"old", b"\0\x06\0\0\0\x02{}"].concat();
        let devices = [b"QEVM\0\0\0\x03", DEVICE, b"new", b"\0"].concat();
        let expected = [b"QEVM\0\0\0\x03", &b"\x01 memory "[..], DEVICE, b"new", b"\0\x06\0\0\0\0"].concat();
        assert_eq!(joined(&began, &devices), Some(expected.clone()));
        // Joining a joined state gives the same result.
        assert_eq!(joined(&expected, &devices), Some(expected));
    }

    #[test]
    fn incompatible_device_states_are_refused() {
        let began = [b"QEVM\0\0\0\x03", DEVICE, b"\0"].concat();
        let devices = [b"QEVM\0\0\0\x03", DEVICE, b"\0"].concat();
        assert!(joined(&began, &devices).is_some());
        for length in 0..devices.len() {
            assert_eq!(joined(&began, &devices[..length]), None, "{length}");
            assert_eq!(joined(&began[..length.min(HEADER + DEVICE.len() - 1)], &devices), None, "{length}");
        }
        assert_eq!(joined(&[&began[..], DEVICE].concat(), &devices), None);
        assert_eq!(joined(&began, &[b"QEVM\0\0\0\x04", DEVICE, b"\0"].concat()), None);
        assert_eq!(joined(&began, &[&b"QEVM\0\0\0\x03"[..], b"\x07", DEVICE, b"\0"].concat()), None);
        // A name length that exceeds the rest of the input.
        assert_eq!(joined(&began, &[b"QEVM\0\0\0\x03\x04\0\0\0\0\xff", DEVICE, b"\0"].concat()), None);
    }
}
