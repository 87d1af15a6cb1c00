//! Client programs of both generations: the installed ones, and the newest ones in Debian, which `scripts/clients`
//! unpacks.

use crate::operation::Style;
use std::process::{Command, Stdio};
use testkit::newest::newest;

/// Time limit of a client in seconds.
pub const CLIENT_SECONDS: &str = "120";

/// Origin of a program.
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
            // Debian's libnbd needs Debian's Python, which need not be the first one in PATH.
            Self::Installed if name == "python3" => "/usr/bin/python3".into(),
            Self::Installed => name.into(),
            Self::Newest => newest().join("bin").join(name).display().to_string(),
        }
    }

    /// A command with a time limit.
    pub fn command(self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", CLIENT_SECONDS]).arg(self.program(name)).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a program; returns its output or an error.
    pub fn run(self, name: &str, arguments: &[&str]) -> Result<String, String> {
        let output = self.command(name, arguments).output().unwrap_or_else(|e| panic!("timeout {name}: {e}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        Err(format!("{name} {arguments:?}: {}: {}{}", output.status, text.trim_end(), complaint.trim_end()))
    }

    /// The version of a program: `MAJOR.MINOR.PATCH`, or as the program prints it.
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

    /// The style that a client requests by default: extended headers if its library supports them.
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
