//! The identity of a process, by which a later process on the same host finds that it has ended.
//!
//! 1. A process is identified by the boot of its host, the namespaces of its number and of times, the number, and the
//!    time at which it started. So another process that gets the number later is not mistaken for it.
//! 2. It is reported as ended only if that is certain. On another host, or in another container, it is unknown, and so
//!    it is if `/proc` shows the processes of another namespace.

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::fs;
use std::io;
use std::path::Path;

/// The field of `/proc/PID/stat` with the time of the start, counted from the field after the name (proc(5)).
const STARTED: usize = 19;
const PROC: &str = "/proc";
/// Stands for what `/proc` does not show.
const UNKNOWN: &str = "unknown";

/// The identity of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Identity of the boot of the host.
    pub boot: String,
    /// The namespaces of process numbers and of times.
    pub namespace: String,
    /// The number of the process.
    pub number: u32,
    /// When the process started, in ticks since the boot.
    pub started: u64,
}

/// The name of this host, for messages.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| UNKNOWN.to_owned(), |name| name.trim().to_owned())
}

fn started(proc: &Path, number: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(proc.join(format!("{number}/stat")))?;
    // The name of the program is in parentheses, and may contain spaces and parentheses itself.
    let field = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(STARTED));
    let field = field.and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{number}/stat has no start time")))
}

impl ProcessIdentity {
    /// The identity of this process. Where it cannot be determined, it is one of which nothing is known.
    pub fn own() -> Self {
        let unknown =
            || Self { boot: UNKNOWN.to_owned(), namespace: UNKNOWN.to_owned(), number: std::process::id(), started: 0 };
        Self::shown(Path::new(PROC)).unwrap_or_else(|_| unknown())
    }

    /// The identity of this process according to a file system of processes.
    fn shown(proc: &Path) -> io::Result<Self> {
        let number = std::process::id();
        // A container may have the file system of its host, where processes have other numbers.
        if fs::read_link(proc.join("self"))? != Path::new(&number.to_string()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "/proc belongs to another namespace"));
        }
        let mut namespace = fs::read_link(proc.join("self/ns/pid"))?.to_string_lossy().into_owned();
        // The times at which processes started differ between these namespaces, which Linux has since 5.6.
        if let Ok(time) = fs::read_link(proc.join("self/ns/time")) {
            namespace = format!("{namespace} {}", time.to_string_lossy());
        }
        let boot = fs::read_to_string(proc.join("sys/kernel/random/boot_id"))?.trim().to_owned();
        Ok(Self { boot, namespace, number, started: started(proc, number)? })
    }

    /// Whether the process has certainly ended.
    pub fn has_ended(&self) -> bool {
        let Ok(own) = Self::shown(Path::new(PROC)) else { return false };
        if (&own.boot, &own.namespace) != (&self.boot, &self.namespace) {
            return false;
        }
        let Some(number) = i32::try_from(self.number).ok().and_then(Pid::from_raw) else { return false };
        match test_kill_process(number) {
            Err(Errno::SRCH) => true,
            // /proc may hide the processes of other users, and then nothing is known.
            _ => started(Path::new(PROC), self.number).is_ok_and(|started| started != self.started),
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
        let own = ProcessIdentity::own();
        assert_eq!(own, ProcessIdentity::own());
        assert!(!own.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let number = child.id();
        let other = ProcessIdentity { number, started: started(Path::new(PROC), number).unwrap(), ..own.clone() };
        assert!(!other.has_ended());
        // Another process has the number now.
        assert!(ProcessIdentity { started: other.started + 1, ..other.clone() }.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(other.has_ended());
        assert!(!ProcessIdentity { boot: "another".into(), ..other.clone() }.has_ended());
        assert!(!ProcessIdentity { namespace: "pid:[1]".into(), ..other }.has_ended());
        assert!(!host_name().is_empty());
    }

    #[test]
    fn nothing_is_known_where_proc_belongs_to_another_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let shown = |number: u32| {
            let link = folder.path().join("self");
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(number.to_string(), &link).unwrap();
            ProcessIdentity::shown(folder.path())
        };
        let process = folder.path().join(std::process::id().to_string());
        fs::create_dir_all(process.join("ns")).unwrap();
        std::os::unix::fs::symlink("pid:[2]", process.join("ns/pid")).unwrap();
        fs::copy("/proc/self/stat", process.join("stat")).unwrap();
        fs::create_dir_all(folder.path().join("sys/kernel/random")).unwrap();
        fs::write(folder.path().join("sys/kernel/random/boot_id"), "boot\n").unwrap();
        let own = shown(std::process::id()).unwrap();
        assert_eq!((own.namespace.as_str(), own.boot.as_str()), ("pid:[2]", "boot"));
        std::os::unix::fs::symlink("time:[3]", process.join("ns/time")).unwrap();
        assert_eq!(shown(std::process::id()).unwrap().namespace, "pid:[2] time:[3]");
        // The numbers of the link's target belong to another process of the namespace of this file system.
        let other = folder.path().join("1");
        std::os::unix::fs::symlink(&process, other).unwrap();
        assert!(shown(1).is_err());
    }
}
