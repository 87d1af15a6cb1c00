//! The identity of a process, by which a later process on the same host finds that it has ended.
//!
//! 1. A process is identified by the boot of its host, the namespace of its number, the number, and the time at which
//!    it started. So another process that gets the number later is not mistaken for it.
//! 2. It is reported as ended only if that is certain. On another host, or in another container, it is unknown.

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::fs;
use std::io;

/// The field of `/proc/PID/stat` with the time of the start, counted from the field after the name (proc(5)).
const STARTED: usize = 19;

/// The identity of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Identity of the boot of the host.
    pub boot: String,
    /// The namespace of process numbers.
    pub namespace: String,
    /// The number of the process.
    pub number: u32,
    /// When the process started, in ticks since the boot.
    pub started: u64,
}

/// The name of this host.
pub fn host_name() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_owned())
}

fn started(number: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{number}/stat"))?;
    // The name of the program is in parentheses, and may contain spaces and parentheses itself.
    let field = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(STARTED));
    let field = field.and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{number}/stat has no start time")))
}

impl ProcessIdentity {
    /// The identity of this process.
    pub fn own() -> io::Result<Self> {
        let number = std::process::id();
        let namespace = fs::read_link("/proc/self/ns/pid")?;
        Ok(Self {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
            namespace: namespace.to_string_lossy().into_owned(),
            number,
            started: started(number)?,
        })
    }

    /// Whether the process has certainly ended.
    pub fn has_ended(&self) -> bool {
        let Ok(own) = Self::own() else { return false };
        if (&own.boot, &own.namespace) != (&self.boot, &self.namespace) {
            return false;
        }
        let Some(number) = i32::try_from(self.number).ok().and_then(Pid::from_raw) else { return false };
        match test_kill_process(number) {
            Err(Errno::SRCH) => true,
            // /proc may hide the processes of other users, and then nothing is known.
            _ => started(self.number).is_ok_and(|started| started != self.started),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn only_a_process_of_this_boot_and_namespace_that_does_not_exist_has_ended() {
        let own = ProcessIdentity::own().unwrap();
        assert_eq!(own, ProcessIdentity::own().unwrap());
        assert!(!own.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let number = child.id();
        let other = ProcessIdentity { number, started: started(number).unwrap(), ..own.clone() };
        assert!(!other.has_ended());
        // Another process has the number now.
        assert!(ProcessIdentity { started: other.started + 1, ..other.clone() }.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(other.has_ended());
        assert!(!ProcessIdentity { boot: "another".into(), ..other.clone() }.has_ended());
        assert!(!ProcessIdentity { namespace: "pid:[1]".into(), ..other }.has_ended());
        assert!(!host_name().unwrap().is_empty());
    }
}
