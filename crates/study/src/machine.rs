//! The machine on which the figures were measured.

use serde::Serialize;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A machine and its tools, as far as they can be determined. Missing information is not an error.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Date and time, UTC.
    pub date: String,
    /// Revision of the source, followed by `+` if the source was modified since.
    pub revision: String,
    /// Processor model.
    pub processor: String,
    /// Processors online.
    pub processors: usize,
    /// Memory in KiB.
    pub memory_kib: u64,
    /// Kernel release.
    pub kernel: String,
    /// File system of the work folder.
    pub file_system: String,
    /// Load averages at the start, which show whether other programs were running.
    pub load: String,
    /// Version of each tool: the first line of its output.
    pub tools: Vec<String>,
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|o| o.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().rfind(|l| !l.trim().is_empty()).map(|l| l.trim().to_string())
}

fn after_colon(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find(|l| l.starts_with(name))?.split_once(':').map(|(_, v)| v.trim().to_string())
}

impl Machine {
    /// Describes this machine, with the file system of `work`.
    pub fn describe(work: &Path) -> Machine {
        let unknown = || "unknown".to_string();
        let path = work.display().to_string();
        let changed = said("git", &["status", "--porcelain", "--untracked-files=no"]).is_some();
        let revision = said("git", &["rev-parse", "--short=12", "HEAD"]).map(|r| if changed { r + "+" } else { r });
        let memory = after_colon("/proc/meminfo", "MemTotal");
        let tools = [("fio", "--version"), ("nbdkit", "--version"), ("rustc", "--version")];
        let mut tools: Vec<String> = tools.iter().filter_map(|(p, a)| said(p, &[a])).collect();
        // qemu-nbd prints several lines, of which only the first is used.
        let qemu = Command::new("qemu-nbd").arg("--version").output().ok();
        tools.extend(qemu.and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(str::to_string)));
        Machine {
            date: said("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_else(unknown),
            revision: revision.unwrap_or_else(unknown),
            processor: after_colon("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_kib: memory.and_then(|m| m.split_whitespace().next()?.parse().ok()).unwrap_or(0),
            kernel: said("uname", &["-r"]).unwrap_or_else(unknown),
            file_system: said("df", &["--output=fstype,source", &path]).unwrap_or_else(unknown),
            load: fs::read_to_string("/proc/loadavg").map_or_else(|_| unknown(), |t| t.trim().to_string()),
            tools,
        }
    }
}
