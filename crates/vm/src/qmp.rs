//! QMP, the protocol of QEMU's monitor and of its guest agent: one JSON object per line (QEMU's "QMP protocol
//! specification"). The client blocks, with one request at a time.
//!
//! 1. Every wait has a timeout: a peer that does not answer, or takes no further connection, causes an error.
//! 2. Input is bounded: a line longer than [`LINE_MAX`] ends the connection.
//! 3. Events received while waiting for a reply are kept, at most the newest [`EVENTS_MAX`].
//! 4. Requests are numbered. A reply with another number belongs to an earlier request that timed out, and is skipped.
//!    A reply without a number is accepted only from peers that do not return numbers (old guest agents).

use error::{Error, ErrorKind, IoContext, Result};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg, socket_with,
};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Longest accepted line. QEMU's schema is a line of about 256 KiB. The guest agent sends a program's standard output
/// and standard error, up to 16 MiB each, in one line in base64.
const LINE_MAX: usize = 48 << 20;

/// Most events that are kept until the caller fetches them.
const EVENTS_MAX: usize = 1024;

/// Interval of attempts to connect to a socket that does not exist yet.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

/// An event that QEMU has reported.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The event's name, such as `SHUTDOWN`.
    pub name: String,
    /// The event's data.
    pub data: Value,
}

/// A connection to the monitor of QEMU, or to a guest agent.
pub struct Client {
    stream: UnixStream,
    path: PathBuf,
    unread: Vec<u8>,
    events: VecDeque<Event>,
    patience: Duration,
    /// Number of the last request that was sent.
    number: u64,
}

impl Client {
    /// Connects to QEMU's monitor, waiting until the socket exists, and negotiates the protocol.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self> {
        let mut client = Self::connect_plain(path, patience)?;
        client.greet()?;
        Ok(client)
    }

    /// Connects to a peer that sends no greeting: a guest agent.
    pub fn connect_plain(path: &Path, patience: Duration) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let stream = loop {
            match dial(path, deadline.saturating_duration_since(Instant::now())) {
                Ok(stream) => break stream,
                Err(e) if not_yet(&e) && Instant::now() < deadline => thread::sleep(CONNECT_INTERVAL),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let text = format!(
                        "'{}' took no connection within {patience:?}: other connections to it are open",
                        path.display()
                    );
                    return Err(Error::new(ErrorKind::Io, text));
                }
                Err(e) => return Err(Error::io(format!("connecting to '{}'", path.display()), e)),
            }
        };
        Self::over(stream, path, patience)
    }

    /// A client over an existing connection; errors call the peer `path`.
    pub fn over(stream: UnixStream, path: &Path, patience: Duration) -> Result<Self> {
        stream.set_write_timeout(Some(patience.max(CONNECT_INTERVAL))).during(|| "setting up a connection".into())?;
        Ok(Self { stream, path: path.into(), unread: Vec::new(), events: VecDeque::new(), patience, number: 0 })
    }

    /// Waits for the monitor's greeting, and negotiates the protocol.
    pub fn greet(&mut self) -> Result<()> {
        let deadline = Instant::now() + self.patience;
        // A QEMU that is starting may send an event before the greeting.
        let greeting = loop {
            let message = self.line(deadline)?;
            if message.get("event").is_none() {
                break message;
            }
            self.keep(message)?;
        };
        if greeting.get("QMP").is_none() {
            return Err(self.odd(&greeting));
        }
        self.execute("qmp_capabilities", json!({})).map(drop)
    }

    /// Sets how long replies may take from now on.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sends a command, and waits for the reply.
    ///
    /// # Errors
    /// `Unsupported` if the peer does not have the command, `Invalid` with the peer's message if the peer refuses it,
    /// `Io` if the peer has disconnected or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = self.request(command, arguments);
        self.send(&request)?;
        self.answer(command)
    }

    fn request(&mut self, command: &str, arguments: Value) -> Value {
        self.number += 1;
        json!({ "execute": command, "arguments": arguments, "id": self.number })
    }

    /// The reply to the latest request.
    fn answer(&mut self, command: &str) -> Result<Value> {
        let deadline = Instant::now() + self.patience;
        loop {
            let mut message = self.line(deadline).map_err(|error| error.context(format!("'{command}'")))?;
            let is_answer = message.get("return").is_some() || message.get("error").is_some();
            if is_answer && message.get("id").is_some_and(|id| *id != self.number) {
                continue;
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(refusal) = message.get("error") {
                let word = |key: &str| refusal.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
                let kind = match word("class").as_str() {
                    "CommandNotFound" => ErrorKind::Unsupported,
                    _ => ErrorKind::Invalid,
                };
                return Err(Error::new(kind, format!("QEMU refuses '{command}': {}", word("desc"))));
            }
            self.keep(message)?;
        }
    }

    /// Sends a command that ends the peer, so that no reply is expected.
    pub fn send(&mut self, message: &Value) -> Result<()> {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        self.stream.write_all(&line).map_err(|e| self.lost(e))
    }

    /// Passes an open file to QEMU, under a name that migrations can use.
    pub fn pass(&mut self, name: &str, file: &impl AsFd) -> Result<()> {
        self.execute_with("getfd", json!({ "fdname": name }), file).map(drop)
    }

    /// Passes an open file to QEMU for as long as `work` runs. `work` gets a name by which commands of QEMU that open
    /// files by name find the passed file. So QEMU needs no permission to open the file itself.
    pub fn lend<T>(&mut self, file: &impl AsFd, work: impl FnOnce(&mut Self, &str) -> Result<T>) -> Result<T> {
        let set = self.execute_with("add-fd", json!({}), file)?["fdset-id"].clone();
        let outcome = work(self, &format!("/dev/fdset/{set}"));
        let removed = self.execute("remove-fd", json!({ "fdset-id": set }));
        let value = outcome?;
        removed.map(|_| value)
    }

    /// Sends a command with an open file, and waits for the reply.
    fn execute_with(&mut self, command: &str, arguments: Value, file: &impl AsFd) -> Result<Value> {
        let request = self.request(command, arguments);
        let line = format!("{request}\n");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: [BorrowedFd<'_>; 1] = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&files));
        let sent = sendmsg(&self.stream, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::NOSIGNAL)
            .map_err(|e| self.lost(e.into()))?;
        // The file descriptor was sent with the first bytes of the line; the rest follows without a descriptor.
        self.send_bytes(&line.as_bytes()[sent..])?;
        self.answer(command)
    }

    /// Sends raw bytes, which the guest agent needs to find the beginning of a line.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(|e| self.lost(e))
    }

    /// The next event whose name is in `names`; earlier events with other names are kept. `None` if no such event
    /// arrives in time.
    pub fn wait_event(&mut self, names: &[&str], patience: Duration) -> Result<Option<Event>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(index) = self.events.iter().position(|event| names.contains(&event.name.as_str())) {
                return Ok(self.events.remove(index));
            }
            match self.line_or_timeout(deadline)? {
                Some(message) => self.keep(message)?,
                None => return Ok(None),
            }
        }
    }

    fn keep(&mut self, message: Value) -> Result<()> {
        let Some(name) = message.get("event").and_then(Value::as_str) else { return Err(self.odd(&message)) };
        let event = Event { name: name.to_owned(), data: message.get("data").cloned().unwrap_or(Value::Null) };
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
        Ok(())
    }

    /// The next message of the peer.
    pub fn line(&mut self, deadline: Instant) -> Result<Value> {
        self.line_or_timeout(deadline)?.ok_or_else(|| {
            let text = format!("no answer from '{}' within {:?}", self.path.display(), self.patience);
            Error::new(ErrorKind::Io, text)
        })
    }

    fn line_or_timeout(&mut self, deadline: Instant) -> Result<Option<Value>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.unread[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=searched + end).collect();
                // The guest agent sends the byte 0xff, which never occurs in text, before a reply to
                // guest-sync-delimited.
                let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
                if text.trim_ascii().is_empty() {
                    searched = 0;
                    continue;
                }
                return match serde_json::from_slice(text) {
                    Ok(message) => Ok(Some(message)),
                    Err(e) => {
                        let text = format!("'{}' sent a line that is no message: {e}", self.path.display());
                        Err(Error::new(ErrorKind::Invalid, text))
                    }
                };
            }
            searched = self.unread.len();
            if searched > LINE_MAX {
                // The rest of the line cannot be skipped, so the stream cannot be decoded any further.
                let text = format!("'{}' sent a line of more than {LINE_MAX} bytes", self.path.display());
                return Err(Error::new(ErrorKind::Io, text));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left)).map_err(|e| self.lost(e))?;
            let mut part = [0; 16 << 10];
            match self.stream.read(&mut part) {
                Ok(0) => return Err(self.lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => self.unread.extend_from_slice(&part[..length]),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.lost(e)),
            }
        }
    }

    fn lost(&self, error: io::Error) -> Error {
        Error::io(format!("exchanging messages with '{}'", self.path.display()), error)
    }

    fn odd(&self, message: &Value) -> Error {
        let mut text = message.to_string();
        text.truncate(text.char_indices().nth(200).map_or(text.len(), |(index, _)| index));
        Error::new(ErrorKind::Invalid, format!("'{}' sent an unexpected message: {text}", self.path.display()))
    }
}

/// Connects within `patience`; `WouldBlock` after that time. QEMU accepts one connection at a time and lets two more
/// wait, also after their ends were closed. A further one would wait as long as the first one is open.
fn dial(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(patience.max(CONNECT_INTERVAL)))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Whether another attempt to connect may succeed.
fn not_yet(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, NotFound, WouldBlock};
    matches!(error.kind(), NotFound | ConnectionRefused | WouldBlock | Interrupted)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    /// A peer that sends a greeting, after an event, and then replies to each line with the next of `answers`.
    fn peer(folder: &Path, answers: Vec<&'static str>) -> PathBuf {
        let path = folder.join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"event\": \"RESUME\"}\r\n{\"QMP\": {\"version\": {}}}\r\n").unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in std::iter::once("{\"return\": {}}\n").chain(answers) {
                if lines.next().is_none() {
                    return;
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
            // The peer sends nothing more, but stays connected until the client disconnects.
            while lines.next().is_some() {}
        });
        path
    }

    #[test]
    fn replies_errors_and_events_are_distinguished() {
        let folder = tempfile::tempdir().unwrap();
        let path = peer(
            folder.path(),
            vec![
                "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"paused\"}}\n",
                "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"what?\"}}\n",
                "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
            ],
        );
        let mut client = Client::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(client.execute("query-status", json!({})).unwrap(), json!({ "status": "paused" }));
        assert_eq!(client.wait_event(&["STOP"], Duration::ZERO).unwrap().unwrap().name, "STOP");
        assert_eq!(client.execute("nonsense", json!({})).unwrap_err().kind(), ErrorKind::Unsupported);
        let refusal = client.execute("cont", json!({})).unwrap_err();
        assert_eq!((refusal.kind(), refusal.to_string().contains("no")), (ErrorKind::Invalid, true));
        client.set_patience(Duration::from_millis(20));
        assert_eq!(client.execute("cont", json!({})).unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn a_late_reply_to_an_earlier_request_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        // Request 1 is the one that negotiates the protocol.
        let path = peer(
            folder.path(),
            vec![
                "{\"return\": \"late\", \"id\": 1}\n{\"return\": \"mine\", \"id\": 2}\n",
                "{\"error\": {\"class\": \"GenericError\", \"desc\": \"late\"}, \"id\": \"x\"}\n{\"return\": 3}\n",
            ],
        );
        let mut client = Client::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(client.execute("a", json!({})).unwrap(), "mine");
        assert_eq!(client.execute("b", json!({})).unwrap(), 3);
    }

    #[test]
    fn a_line_without_end_ends_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let flood = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut sent = 0usize;
            // Writes until the client closes the connection.
            while let Ok(length) = stream.write(&[b'['; 64 << 10]) {
                sent += length;
            }
            sent
        });
        let error = Client::connect(&path, Duration::from_secs(60)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.to_string().contains("a line of more than"), "{error}");
        let sent = flood.join().unwrap();
        assert!((LINE_MAX..LINE_MAX + (4 << 20)).contains(&sent), "{sent}");
    }

    #[test]
    fn a_file_descriptor_is_passed_to_qemu() {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let content = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut line = [0; 1024];
            let got =
                recvmsg(&stream, &mut [io::IoSliceMut::new(&mut line)], &mut control, RecvFlags::empty()).unwrap();
            assert!(line[..got.bytes].ends_with(b"\n"));
            stream.write_all(b"{\"return\": {}}\n").unwrap();
            let mut files = control.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
                _ => Vec::new(),
            });
            let mut text = String::new();
            std::fs::File::from(files.next().unwrap()).read_to_string(&mut text).unwrap();
            text
        });
        let mut client = Client::connect_plain(&path, Duration::from_secs(10)).unwrap();
        std::fs::write(folder.path().join("state"), "of devices").unwrap();
        client.pass("state", &std::fs::File::open(folder.path().join("state")).unwrap()).unwrap();
        assert_eq!(content.join().unwrap(), "of devices");
    }

    #[test]
    fn invalid_messages_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = peer(folder.path(), vec!["nonsense\n", "[1]\n"]);
        let mut client = Client::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(client.execute("a", json!({})).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(client.execute("b", json!({})).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_peer_that_takes_no_further_connection_is_given_up() {
        use crate::agent::Agent;
        use std::sync::mpsc;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        // As QEMU listens while a connection is open.
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let (done, outcome) = mpsc::channel();
        thread::spawn(move || {
            let patience = Duration::from_millis(20);
            for _ in 0..3 {
                let _ = done.send(Client::connect(&path, patience).map(drop));
            }
            let _ = done.send(Agent::connect(&path, patience).map(|agent| assert!(agent.is_none())));
        });
        let ended = || outcome.recv_timeout(Duration::from_secs(60)).expect("it waits without end");
        for _ in 0..3 {
            assert_eq!(ended().unwrap_err().kind(), ErrorKind::Io);
        }
        ended().unwrap();
        drop(listener);
    }

    #[test]
    fn connecting_to_a_missing_socket_is_not_found() {
        let folder = tempfile::tempdir().unwrap();
        let error = Client::connect(&folder.path().join("none"), Duration::from_millis(5)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
}
