//! The guest agent: QEMU's own (`qemu-ga`), reached through a serial port of the guest.
//!
//! 1. Whether an agent answers is found by asking with a number of our own and reading until it comes back
//!    (`guest-sync-delimited`), so that half an answer to an earlier client is never taken for ours.
//! 2. A guest without an agent is no error: [`Agent::connect`] says `None`.
//! 3. A frozen guest is thawed again whatever happens: [`Frozen`] thaws when dropped.

use crate::qmp::Client;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use error::{Error, ErrorKind, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long a command of the agent may take, unless it says otherwise.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long freezing may take: the guest writes out what it holds.
const FREEZE_PATIENCE: Duration = Duration::from_secs(60);
/// How long is waited before the end of a program in the guest is asked for, at first and at the longest: each question
/// takes of the processor that the program needs.
const POLL: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(40)];
/// Most bytes that one command writes or reads in the guest.
const DATA_MAX: usize = 1 << 20;

/// A connection to an agent that answers.
pub struct Agent {
    client: Client,
}

/// What a program in the guest did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code; `None` when a signal ended it.
    pub code: Option<i64>,
    /// What it wrote to its output.
    pub output: Vec<u8>,
    /// What it complained about.
    pub errors: Vec<u8>,
}

impl Agent {
    /// The agent behind a socket; `None` when none answers within `patience`.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Option<Self>> {
        let begun = Instant::now();
        match Client::connect_plain(socket, patience) {
            Ok(client) => Self::over(client, patience.saturating_sub(begun.elapsed())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The agent at the other end of a connection; `None` when none answers within `patience`.
    pub fn over(mut client: Client, patience: Duration) -> Result<Option<Self>> {
        let deadline = Instant::now() + patience;
        // Never zero, so that it is told apart from what an agent answers to garbage.
        let number = u64::from(std::process::id()) << 20 | (deadline.elapsed().as_nanos() as u64 & 0xf_ffff) | 1;
        // The byte ends whatever half a line is on its way.
        client.send_bytes(&[0xff])?;
        client.send(&json!({ "execute": "guest-sync-delimited", "arguments": { "id": number } }))?;
        loop {
            match client.line(deadline) {
                Ok(answer) if answer["return"] == number => break,
                Ok(_) => {}
                // What is left of others' answers may be cut in the middle.
                Err(error) if error.kind() == ErrorKind::Invalid && Instant::now() < deadline => {}
                // Silent, gone, or no agent at all.
                Err(_) => return Ok(None),
            }
        }
        client.set_patience(PATIENCE);
        Ok(Some(Self { client }))
    }

    /// Holds the guest's file systems still, with what its hooks do (databases flush). How many were frozen.
    pub fn freeze(mut self) -> Result<Frozen> {
        self.client.set_patience(FREEZE_PATIENCE);
        let count = self.client.execute("guest-fsfreeze-freeze", json!({}))?.as_u64().unwrap_or(0);
        self.client.set_patience(PATIENCE);
        Ok(Frozen { agent: Some(self), count })
    }

    /// Thaws all frozen file systems, whichever client froze them; how many they were.
    pub fn thaw(&mut self) -> Result<u64> {
        Ok(self.client.execute("guest-fsfreeze-thaw", json!({}))?.as_u64().unwrap_or(0))
    }

    /// Runs a program in the guest to its end.
    pub fn execute(&mut self, program: &str, arguments: &[&str], input: &[u8], patience: Duration) -> Result<Ended> {
        if input.len() > DATA_MAX {
            let text = format!("{} bytes are more than the guest agent takes at once", input.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut wanted = json!({ "path": program, "arg": arguments, "capture-output": true });
        if !input.is_empty() {
            wanted["input-data"] = BASE64.encode(input).into();
        }
        let pid = self.client.execute("guest-exec", wanted)?["pid"].clone();
        let deadline = Instant::now() + patience;
        let mut pause = POLL[0];
        loop {
            let status = self.client.execute("guest-exec-status", json!({ "pid": pid }))?;
            if status["exited"] == true {
                let data = |key: &str| decoded(status[key].as_str().unwrap_or(""));
                return Ok(Ended {
                    code: status["exitcode"].as_i64(),
                    output: data("out-data")?,
                    errors: data("err-data")?,
                });
            }
            if Instant::now() >= deadline {
                let text = format!("'{program}' in the guest has not ended within {patience:?}");
                return Err(Error::new(ErrorKind::Io, text));
            }
            thread::sleep(pause);
            pause = POLL[1].min(pause * 2);
        }
    }

    /// Asks the guest to power itself off.
    pub fn shut_down(&mut self) -> Result<()> {
        self.client.send(&json!({ "execute": "guest-shutdown", "arguments": { "mode": "powerdown" } }))
    }

    /// What the guest says about its network cards.
    pub fn interfaces(&mut self) -> Result<Value> {
        self.client.execute("guest-network-get-interfaces", json!({}))
    }
}

/// A guest whose file systems stand still.
pub struct Frozen {
    agent: Option<Agent>,
    /// File systems that were frozen.
    pub count: u64,
}

impl Frozen {
    /// Lets them go on. How many were thawed: fewer than were frozen means that the guest gave up waiting, and what was
    /// copied meanwhile is only crash-consistent.
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

/// What the agent sends as base64.
fn decoded(text: &str) -> Result<Vec<u8>> {
    let wrong = |e| Error::new(ErrorKind::Invalid, format!("the guest agent sent data that is not base64: {e}"));
    BASE64.decode(text).map_err(wrong)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn data_crosses_unchanged() {
        let bytes: Vec<u8> = (0..=255).collect();
        for length in 0..bytes.len() {
            assert_eq!(decoded(&BASE64.encode(&bytes[..length])).unwrap(), &bytes[..length]);
        }
        assert_eq!(BASE64.encode(b"lamina"), "bGFtaW5h");
        assert_eq!(BASE64.encode(b"disk"), "ZGlzaw==");
        assert!(decoded("a b").is_err());
    }
}
