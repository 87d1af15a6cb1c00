//! The record that a command has paused a guest, or that the guest's agent has frozen its file systems.
//!
//! The record exists from before the guest is paused until the guest executes again. If the command is killed or cannot
//! resume the guest, the record stays, and the next command resumes the guest.

use crate::durable;
use crate::machine::{Change, remove_if_there};
use crate::qmp::Client;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The file that records that a command has paused the guest.
pub(crate) const HELD: &str = "held";
/// How long the agent may take to answer when file systems are thawed during recovery.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);
/// How long commands try to thaw file systems whose agent does not answer. The time is limited, because the guest may
/// have started again without an agent, and every command waits for the agent.
const THAW_MAX: Duration = Duration::from_secs(600);

impl Change {
    /// Records that the guest is about to be paused, so that the next command resumes it if this command is killed. The
    /// caller has checked whether the guest is running. Dropping the result removes the record, unless it is kept.
    pub fn hold(&self, hold: Hold) -> Result<Holding> {
        let path = self.machine().folder().join(HELD);
        // The record of an earlier command, if the agent has not thawed the guest's file systems since.
        let before = read(&path)?.filter(|before| before.thaw && !hold.thaw);
        let hold = Hold { thaw: hold.thaw || before.is_some(), ..hold };
        write(&path, hold)?;
        Ok(Holding { path, before, kept: AtomicBool::new(false) })
    }

    /// If a command that paused the guest was killed, resumes the guest. Returns whether there was such a command.
    ///
    /// # Errors
    /// `Busy`, and the record stays, if the guest's agent does not answer now and file systems may be frozen.
    pub fn let_go_on(&self) -> Result<bool> {
        self.let_go_on_within(AGENT_PATIENCE)
    }

    fn let_go_on_within(&self, patience: Duration) -> Result<bool> {
        let path = self.machine().folder().join(HELD);
        let Some(hold) = read(&path)? else { return Ok(false) };
        if crate::instant::freeze::frozen(self.machine())?.is_some() {
            // The machine is frozen, so the machine continues from its image, and its old process must not execute the
            // guest.
            for process in self.machine().processes()? {
                process.end()?;
            }
        }
        self.sweep()?;
        if self.machine().process()?.is_some() {
            if hold.resume {
                self.machine().monitor()?.execute("cont", json!({}))?;
            }
            if hold.thaw {
                match self.machine().agent(patience)? {
                    Some(mut agent) => {
                        agent.thaw()?;
                    }
                    None if is_recent(&path) => {
                        if hold.resume {
                            // A user may pause the guest before the next command.
                            write(&path, Hold { resume: false, ..hold })?;
                        }
                        let text = "the guest's agent does not answer, and file systems of the guest may be frozen; \
                                    the next command about machines tries again to thaw them";
                        return Err(Error::new(ErrorKind::Busy, text));
                    }
                    None => {}
                }
            }
        }
        remove_if_there(&path)?;
        Ok(true)
    }
}

fn read(record: &Path) -> Result<Option<Hold>> {
    // If the file is empty, the command was killed before it paused the guest.
    Ok(durable::read(record)?.map(|text| serde_json::from_str(&text).unwrap_or_default()))
}

fn write(record: &Path, hold: Hold) -> Result<()> {
    let text = serde_json::to_vec(&hold)
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("'{}' cannot be written: {e}", record.display())))?;
    // The record need not be durable, because a power cut ends the guest too.
    private::write(record, &text).during(|| format!("writing '{}'", record.display()))
}

/// Whether a record was written within [`THAW_MAX`].
fn is_recent(record: &Path) -> bool {
    let written = fs::metadata(record).and_then(|metadata| metadata.modified()).ok();
    written.and_then(|written| written.elapsed().ok()).is_some_and(|age| age < THAW_MAX)
}

/// What has to be undone after a guest was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Whether the guest was running and has to be resumed.
    pub resume: bool,
    /// Whether the guest's agent has frozen its file systems, which have to be thawed.
    pub thaw: bool,
}

/// The guest may be paused while a value of this type exists.
pub struct Holding {
    path: PathBuf,
    /// What the record of an earlier command states. This record stays.
    before: Option<Hold>,
    /// Whether the record stays.
    kept: AtomicBool,
}

impl Holding {
    /// Leaves the record to the next command, because the guest may still be paused, or its file systems frozen.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Resumes a guest whose process is connected to `monitor`. If this fails, the next command resumes the guest.
    pub(crate) fn resume(&self, monitor: &mut Client) -> Result<()> {
        monitor.execute("cont", json!({})).map(drop).inspect_err(|_| self.keep())
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        let outcome = match self.before {
            Some(before) => write(&self.path, before),
            None => remove_if_there(&self.path),
        };
        if let Err(error) = outcome {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::machine::Machine;
    use crate::qemu::command::RunFolder;
    use crate::qemu::process::Starting;
    use std::ffi::OsString;
    use std::os::unix::net::UnixStream;
    use std::time::SystemTime;

    #[test]
    fn the_record_stays_until_the_guest_is_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::at(folder.path());
        let change = machine.change().unwrap();
        let holding = change.hold(Hold { resume: true, thaw: false }).unwrap();
        let (own, peer) = UnixStream::pair().unwrap();
        let mut monitor = Client::over(own, folder.path(), Duration::from_secs(5)).unwrap();
        // The monitor does not answer, as that of a QEMU that waits for its disks.
        drop(peer);
        holding.resume(&mut monitor).unwrap_err();
        drop(holding);
        assert!(machine.is_held(), "the next command resumes the guest");
        drop(change.hold(Hold { resume: true, thaw: false }).unwrap());
        assert!(!machine.is_held());
        // The next command could not thaw the file systems, and pauses the guest itself.
        change.hold(Hold { resume: false, thaw: true }).unwrap().keep();
        drop(change.hold(Hold { resume: true, thaw: false }).unwrap());
        assert_eq!(read(&folder.path().join(HELD)).unwrap(), Some(Hold { resume: false, thaw: true }));
        drop(change.hold(Hold { resume: false, thaw: true }).unwrap());
        assert!(!machine.is_held());
    }

    #[test]
    fn the_record_stays_while_the_agent_does_not_answer_for_a_limited_time() {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::at(folder.path());
        let change = machine.change().unwrap();
        let run = RunFolder(folder.path().join("run.1"));
        fs::create_dir(&run.0).unwrap();
        change.link(&run).unwrap();
        let monitor = format!("unix:{},server=on,wait=off", run.monitor().display());
        let pid = run.pid_file().display().to_string();
        let arguments = ["-machine", "none", "-nodefaults", "-display", "none", "-pidfile", &pid, "-qmp", &monitor];
        let arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
        let starting = Starting::new(Path::new("qemu-system-x86_64"), &arguments, &run.errors(), None).unwrap();
        let (process, _) = starting.finish(&run, Duration::from_secs(30)).unwrap();
        change.hold(Hold { resume: false, thaw: true }).unwrap().keep();
        let error = change.let_go_on_within(Duration::from_millis(20)).unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("may be frozen"), "{error}");
        assert!(machine.is_held(), "the next command tries again");
        let record = fs::File::options().write(true).open(folder.path().join(HELD)).unwrap();
        record.set_modified(SystemTime::now() - 2 * THAW_MAX).unwrap();
        assert!(change.let_go_on_within(Duration::from_millis(20)).unwrap());
        assert!(!machine.is_held());
        process.end().unwrap();
    }
}
