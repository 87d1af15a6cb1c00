//! The guest agent: QEMU's own (`qemu-ga`), reached through a serial port of the guest.
//!
//! 1. To detect an agent, [`Agent::connect`] sends a number and reads until the agent returns the number
//!    (`guest-sync-delimited`). So the rest of a reply to an earlier client is never taken for a reply to this client.
//! 2. A guest without an agent is not an error: [`Agent::connect`] returns `None`.
//! 3. A frozen guest is thawed in every case: [`Frozen`] thaws when dropped, and a request to freeze that the agent has
//!    not answered is followed by one to thaw.

use crate::qmp::Client;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a command of the agent may take, unless the call sets another limit.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long freezing may take, since the guest writes out its buffers.
const FREEZE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a reply with the output of a program, up to 45 MB, may take.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(120);
/// Pauses between queries whether a program in the guest has ended: the first pause, and the longest one. Each query
/// takes processor time from the program.
const POLL: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(40)];
/// Most bytes that one command writes or reads in the guest.
const DATA_MAX: usize = 1 << 20;

/// A connection to an agent that has answered.
pub struct Agent {
    client: Client,
}

/// The result of a program that ran in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The exit code; `None` if a signal ended the program.
    pub code: Option<i64>,
    /// The signal that ended the program, if one did.
    pub signal: Option<i64>,
    /// The program's standard output.
    pub output: Vec<u8>,
    /// Whether the agent kept only the beginning of the standard output.
    pub output_cut: bool,
    /// The program's standard error.
    pub errors: Vec<u8>,
    /// Whether the agent kept only the beginning of the standard error.
    pub errors_cut: bool,
}

/// Outcome of a request to run a program in the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// The program ran and has ended.
    Ended(Ended),
    /// The guest has no such program; with the agent's message.
    NotFound(String),
    /// The guest has the program but cannot run it; with the agent's message.
    NotRunnable(String),
    /// The program was still running at the end of the time limit, and continues to run.
    StillRuns {
        /// The program's process id in the guest.
        pid: i64,
    },
}

/// Numbers the attempts of this process to synchronise with an agent.
static ATTEMPTS: AtomicU32 = AtomicU32::new(1);

impl Agent {
    /// The agent behind a socket; `None` if none answers within `patience`.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Option<Self>> {
        let begun = Instant::now();
        match Client::connect_plain(socket, patience) {
            Ok(client) => Self::over(client, patience.saturating_sub(begun.elapsed())),
            Err(error) if error.kind() == ErrorKind::NotFound || begun.elapsed() >= patience => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The agent at the other end of a connection; `None` if none answers within `patience`.
    pub fn over(mut client: Client, patience: Duration) -> Result<Option<Self>> {
        let deadline = Instant::now() + patience;
        // Different for each attempt: a reply to an earlier one would be followed by the error for the byte below,
        // which would count as the reply to the next command. The process's number is at least 1, and a stale reply
        // may have the number 0.
        let attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed);
        let number = u64::from(std::process::id()) << 20 | u64::from(attempt & 0xf_ffff);
        // 0xff makes the agent discard a partial line that an earlier client sent.
        client.send_bytes(&[0xff])?;
        client.send(&json!({ "execute": "guest-sync-delimited", "arguments": { "id": number } }))?;
        loop {
            match client.line(deadline) {
                Ok(answer) if answer["return"] == number => break,
                Ok(_) => {}
                // The line may be the rest of a reply to another client, so it is skipped.
                Err(error) if error.kind() == ErrorKind::Invalid && Instant::now() < deadline => {}
                // The agent does not answer, has disconnected, or is not an agent.
                Err(_) => return Ok(None),
            }
        }
        client.set_patience(PATIENCE);
        Ok(Some(Self { client }))
    }

    /// Freezes the guest's file systems and runs its freeze hooks (which flush databases).
    pub fn freeze(self) -> Result<Frozen> {
        self.freeze_within(FREEZE_PATIENCE)
    }

    fn freeze_within(mut self, patience: Duration) -> Result<Frozen> {
        self.client.set_patience(patience);
        let frozen = self.client.execute("guest-fsfreeze-freeze", json!({}));
        self.client.set_patience(PATIENCE);
        match frozen {
            Ok(count) => Ok(Frozen { agent: Some(self), count: count.as_u64().unwrap_or(0) }),
            Err(error) => {
                // The agent may still freeze the file systems; it carries out this request afterwards.
                if error.kind() == ErrorKind::Io {
                    let _ = self.thaw();
                }
                Err(error)
            }
        }
    }

    /// Thaws all frozen file systems, even if another client froze them; returns their number.
    pub fn thaw(&mut self) -> Result<u64> {
        Ok(self.client.execute("guest-fsfreeze-thaw", json!({}))?.as_u64().unwrap_or(0))
    }

    /// Runs a program in the guest and waits for its end.
    ///
    /// # Errors
    /// If the program cannot be started, or has not ended within `patience`.
    pub fn execute(&mut self, program: &str, arguments: &[&str], input: &[u8], patience: Duration) -> Result<Ended> {
        let failed = |kind, what: String| Err(Error::new(kind, format!("'{program}' in the guest {what}")));
        match self.run(program, arguments, input, patience)? {
            Execution::Ended(ended) => Ok(ended),
            Execution::NotFound(why) => failed(ErrorKind::NotFound, format!("was not found: {why}")),
            Execution::NotRunnable(why) => failed(ErrorKind::Invalid, format!("could not be started: {why}")),
            Execution::StillRuns { .. } => failed(ErrorKind::Io, format!("has not ended within {patience:?}")),
        }
    }

    /// As [`Agent::execute`], but returns an outcome without an exit code as a value instead of an error.
    pub fn run(&mut self, program: &str, arguments: &[&str], input: &[u8], patience: Duration) -> Result<Execution> {
        if input.len() > DATA_MAX {
            let text = format!("{} bytes are more than the guest agent takes at once", input.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut wanted = json!({ "path": program, "arg": arguments, "capture-output": true });
        if !input.is_empty() {
            wanted["input-data"] = BASE64.encode(input).into();
        }
        // On a slow host one reply may take as long as the program may run.
        self.client.set_patience(patience.max(PATIENCE));
        let started = self.client.execute("guest-exec", wanted);
        self.client.set_patience(PATIENCE);
        let pid = match started {
            Ok(started) => started["pid"].clone(),
            // The agent reports the error of the guest's system call only as text.
            Err(error) if error.kind() == ErrorKind::Invalid && error.to_string().starts_with("QEMU refuses") => {
                let why = error.to_string();
                let missing = ["No such file or directory", "cannot find the file"].iter().any(|one| why.contains(one));
                return Ok(if missing { Execution::NotFound(why) } else { Execution::NotRunnable(why) });
            }
            Err(error) => return Err(error),
        };
        let deadline = Instant::now() + patience;
        let mut pause = POLL[0];
        loop {
            self.client.set_patience(OUTPUT_PATIENCE);
            let status = self.client.execute("guest-exec-status", json!({ "pid": pid }));
            self.client.set_patience(PATIENCE);
            let status = status?;
            if status["exited"] == true {
                let data = |key: &str| decoded(status[key].as_str().unwrap_or(""));
                return Ok(Execution::Ended(Ended {
                    code: status["exitcode"].as_i64(),
                    signal: status["signal"].as_i64(),
                    output: data("out-data")?,
                    output_cut: status["out-truncated"] == true,
                    errors: data("err-data")?,
                    errors_cut: status["err-truncated"] == true,
                }));
            }
            if Instant::now() >= deadline {
                return Ok(Execution::StillRuns { pid: pid.as_i64().unwrap_or_default() });
            }
            thread::sleep(pause);
            pause = POLL[1].min(pause * 2);
        }
    }

    /// Sets the guest's clock to the host's time.
    pub fn set_time(&mut self) -> Result<()> {
        let nanoseconds = backend::clock::nanoseconds();
        match self.client.execute("guest-set-time", json!({ "time": nanoseconds })) {
            // An agent whose guest has no `hwclock` (which would set the hardware clock) refuses the command. The
            // hardware clock is right already, because QEMU emulates it.
            Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) => self.set_date(error),
            outcome => outcome.map(drop),
        }
    }

    /// Sets the clock by running `date` in the guest; `refusal` is the error to return if that fails too.
    fn set_date(&mut self, refusal: Error) -> Result<()> {
        let time = format!("@{}", backend::clock::seconds());
        match self.execute("/bin/date", &["-u", "-s", &time], &[], PATIENCE) {
            Ok(Ended { code: Some(0), .. }) => Ok(()),
            _ => Err(refusal),
        }
    }

    /// Requests the guest to shut down.
    pub fn shut_down(&mut self) -> Result<()> {
        self.client.send(&json!({ "execute": "guest-shutdown", "arguments": { "mode": "powerdown" } }))
    }

    /// The guest's information about its network cards.
    pub fn interfaces(&mut self) -> Result<Value> {
        self.client.execute("guest-network-get-interfaces", json!({}))
    }
}

/// A guest whose file systems are frozen.
pub struct Frozen {
    agent: Option<Agent>,
    /// Number of frozen file systems.
    pub count: u64,
}

impl Frozen {
    /// Thaws the file systems and returns their number. If this number is lower than [`Frozen::count`], the guest has
    /// thawed some file systems on its own, and copies made while the file systems were to be frozen are only
    /// crash-consistent.
    pub fn thaw(mut self) -> Result<(Agent, u64)> {
        let mut agent = self.agent.take().ok_or_else(|| Error::new(ErrorKind::Stopped, "thawed already"))?;
        let count = agent.thaw()?;
        Ok((agent, count))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take()
            && let Err(error) = agent.thaw()
        {
            tracing::error!("a guest's file systems stay frozen: {error}");
        }
    }
}

/// Decodes base64 output of the agent.
fn decoded(text: &str) -> Result<Vec<u8>> {
    let wrong = |e| Error::new(ErrorKind::Invalid, format!("the guest agent sent data that is not base64: {e}"));
    BASE64.decode(text).map_err(wrong)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    /// The agent is slow: its guest has much to write out.
    #[test]
    fn a_guest_that_is_frozen_too_late_is_thawed() {
        let (own, peer) = UnixStream::pair().unwrap();
        let client = Client::over(own, Path::new("agent"), PATIENCE).unwrap();
        let guest = thread::spawn(move || {
            let mut lines = BufReader::new(peer.try_clone().unwrap()).lines();
            let freeze = lines.next().unwrap().unwrap();
            let thaw: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            (&peer).write_all(format!("{}\n", json!({ "return": 1, "id": thaw["id"] })).as_bytes()).unwrap();
            (freeze, thaw["execute"].clone())
        });
        let late = Agent { client }.freeze_within(Duration::from_millis(20)).err().unwrap();
        assert_eq!(late.kind(), ErrorKind::Io);
        let (freeze, thaw) = guest.join().unwrap();
        assert!(freeze.contains("guest-fsfreeze-freeze") && thaw == "guest-fsfreeze-thaw");
    }

    /// An agent that starts late replies to an attempt that was given up, too.
    #[test]
    fn replies_to_an_earlier_attempt_are_skipped() {
        let (own, peer) = UnixStream::pair().unwrap();
        let client = || Client::over(own.try_clone().unwrap(), Path::new("agent"), PATIENCE).unwrap();
        assert!(Agent::over(client(), Duration::from_millis(20)).unwrap().is_none());
        let guest = thread::spawn(move || {
            let mut lines = BufReader::new(peer.try_clone().unwrap());
            let mut line = || {
                let mut line = Vec::new();
                lines.read_until(b'\n', &mut line).unwrap();
                serde_json::from_slice::<Value>(line.strip_prefix(&[0xff]).unwrap_or(&line)).unwrap()
            };
            let stray = json!({ "error": { "class": "GenericError", "desc": "JSON parse error, stray" } });
            for synchronise in [line(), line()] {
                let back = json!({ "return": synchronise["arguments"]["id"] });
                (&peer).write_all(format!("{stray}\n{back}\n").as_bytes()).unwrap();
            }
            let ping = line();
            (&peer).write_all(format!("{}\n", json!({ "return": 7, "id": ping["id"] })).as_bytes()).unwrap();
        });
        let mut agent = Agent::over(client(), PATIENCE).unwrap().unwrap();
        assert_eq!(agent.client.execute("guest-ping", json!({})).unwrap(), 7);
        guest.join().unwrap();
    }

    #[test]
    fn data_is_transferred_unchanged() {
        let bytes: Vec<u8> = (0..=255).collect();
        for length in 0..bytes.len() {
            assert_eq!(decoded(&BASE64.encode(&bytes[..length])).unwrap(), &bytes[..length]);
        }
        assert_eq!(BASE64.encode(b"lamina"), "bGFtaW5h");
        assert_eq!(BASE64.encode(b"disk"), "ZGlzaw==");
        assert!(decoded("a b").is_err());
    }
}
