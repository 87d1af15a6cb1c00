//! The programs of both generations: those that are installed, and the newest of Debian, which `scripts/clients`
//! unpacks beside them.

use crate::operation::Style;
use std::process::{Command, Stdio};
use testkit::newest::newest;

/// Seconds after which a client counts as hung.
pub const CLIENT_SECONDS: &str = "120";

/// Where a program comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    Installed,
    Newest,
}

pub const GENERATIONS: [Generation; 2] = [Generation::Installed, Generation::Newest];

impl Generation {
    /// The path of a program.
    pub fn program(self, name: &str) -> String {
        match self {
            // Debian's libnbd belongs to Debian's Python, which need not be the first on PATH.
            Self::Installed if name == "python3" => "/usr/bin/python3".into(),
            Self::Installed => name.into(),
            Self::Newest => newest().join("bin").join(name).display().to_string(),
        }
    }

    /// A command that ends by itself.
    pub fn command(self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", CLIENT_SECONDS]).arg(self.program(name)).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a program to its end: what it printed, or what went wrong.
    pub fn run(self, name: &str, arguments: &[&str]) -> Result<String, String> {
        let output = self.command(name, arguments).output().unwrap_or_else(|e| panic!("timeout {name}: {e}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        Err(format!("{name} {arguments:?}: {}: {}{}", output.status, text.trim_end(), complaint.trim_end()))
    }

    /// The version of a program, as `MAJOR.MINOR.PATCH` or what else it calls itself.
    pub fn version(self, name: &str) -> String {
        let text = match name {
            "python3" => self.run(name, &["-c", "import nbd; print(nbd.NBD().get_version())"]),
            _ => self.run(name, &["--version"]),
        };
        let text = text.unwrap_or_else(|e| panic!("no version: {e}"));
        let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
        let first = text.lines().next().unwrap_or_default().replace('-', " ");
        first.split_whitespace().find(is_version).unwrap_or_else(|| panic!("{name}: no version in {text}")).into()
    }

    /// What a client of a library asks for by itself: extended headers if the library supports them.
    fn style(self, program: &str, first_extended: (u32, u32)) -> Style {
        let version = self.version(program);
        let mut numbers = version.split('.').map(|n| n.parse::<u32>().unwrap_or_default());
        let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        if version >= first_extended { Style::Extended } else { Style::Structured }
    }

    pub fn qemu_style(self) -> Style {
        self.style("qemu-io", (8, 2))
    }

    pub fn libnbd_style(self) -> Style {
        self.style("nbdinfo", (1, 18))
    }
}
