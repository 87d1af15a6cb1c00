//! Lines of the matrix: one client, style, transport and operation each, on its own disk. A line passes if the client
//! succeeds, has connected in the expected style, and has left the disk with the right content.

use crate::operation::{Operation, Style};
use crate::served::{Served, Target};
use std::fmt;

/// One line of the matrix.
#[derive(Clone)]
pub struct Line {
    /// Name and version of the client.
    pub client: String,
    pub style: Style,
    pub tls: bool,
    pub operation: Operation,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connection = if self.tls { "TLS" } else { "unix" };
        write!(f, "{}, {:?}, {connection}, {}", self.client, self.style, self.operation.name())
    }
}

pub struct Matrix {
    served: Served,
    failures: Vec<String>,
    lines: usize,
}

impl Matrix {
    pub fn new() -> Self {
        Self { served: Served::start(), failures: Vec::new(), lines: 0 }
    }

    /// Tests one line.
    pub fn line(&mut self, line: Line, run: impl FnOnce(&Target, &Line) -> Result<(), String>) {
        let disk = format!("line{}", self.lines);
        self.lines += 1;
        self.served.make(&disk);
        let log_before = self.served.server.log().len();
        let target = Target { served: &self.served, export: disk.clone(), tls: line.tls };
        let outcome = run(&target, &line)
            .and_then(|()| self.connected(&disk, &line, log_before))
            .and_then(|()| self.compare(&disk, &line))
            .and_then(|()| self.survives(&disk, &line));
        if let Err(message) = outcome {
            self.failures.push(format!("{line}: {message}"));
        }
    }

    /// Checks in the server's log that the client connected in the expected style, so that a client that falls back to
    /// another style fails.
    fn connected(&self, disk: &str, line: &Line, log_before: usize) -> Result<(), String> {
        let log = self.served.server.log();
        let connected: Vec<&str> = log[log_before..]
            .lines()
            .filter(|text| text.contains(&format!("name=\"{disk}\"")) && text.contains("connected style="))
            .collect();
        let style = format!("style={:?}", line.style);
        if connected.is_empty() || !connected.iter().all(|text| text.contains(&style)) {
            return Err(format!("did not connect with {style}: {connected:?}"));
        }
        Ok(())
    }

    /// Data written with FUA must survive a kill of the server.
    fn survives(&mut self, disk: &str, line: &Line) -> Result<(), String> {
        if line.operation != Operation::Fua {
            return Ok(());
        }
        self.served.restart("KILL");
        self.compare(disk, line).map_err(|message| format!("after the server was killed {message}"))
    }

    fn compare(&self, disk: &str, line: &Line) -> Result<(), String> {
        let (found, expected) = (self.served.content(disk), line.operation.content());
        match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of the disk is {:#x} and not {:#x}", found[at], expected[at])),
        }
    }

    /// Fails if lines of the matrix have failed, and lists these lines.
    pub fn finish(mut self) {
        assert_eq!(self.served.server.stop("TERM"), Some(0));
        assert!(
            self.failures.is_empty(),
            "{} of {} lines failed:\n{}",
            self.failures.len(),
            self.lines,
            self.failures.join("\n")
        );
        self.served.store.is_clean();
    }
}
