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
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The file that records that a command has paused the guest.
pub(crate) const HELD: &str = "held";
/// How long the agent may take to answer when file systems are thawed during recovery.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);

impl Change {
    /// Records that the guest is about to be paused, so that the next command resumes it if this command is killed. The
    /// caller has checked whether the guest is running. Dropping the result removes the record, unless it is kept.
    pub fn hold(&self, hold: Hold) -> Result<Holding> {
        let path = self.machine().folder().join(HELD);
        let text = serde_json::to_vec(&hold)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("'{}' cannot be written: {e}", path.display())))?;
        // The record need not be durable, because a power cut ends the guest too.
        private::write(&path, &text).during(|| format!("writing '{}'", path.display()))?;
        Ok(Holding { path, kept: AtomicBool::new(false) })
    }

    /// If a command that paused the guest was killed, resumes the guest. Returns whether there was such a command.
    pub fn let_go_on(&self) -> Result<bool> {
        let path = self.machine().folder().join(HELD);
        let Some(text) = durable::read(&path)? else { return Ok(false) };
        // If the file is empty, the command was killed before it paused the guest.
        let hold: Hold = serde_json::from_str(&text).unwrap_or_default();
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
            if hold.thaw
                && let Some(mut agent) = self.machine().agent(AGENT_PATIENCE)?
            {
                agent.thaw()?;
            }
        }
        remove_if_there(&path)?;
        Ok(true)
    }
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
        if !*self.kept.get_mut()
            && let Err(error) = remove_if_there(&self.path)
        {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::machine::Machine;
    use std::os::unix::net::UnixStream;

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
    }
}
