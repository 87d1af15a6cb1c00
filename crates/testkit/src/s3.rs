//! An S3 server for tests, s3s-fs, which stores objects as files, and a proxy before it that causes faults. The server
//! is a program of its own, which `scripts/setup s3` builds.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The bucket of the server.
pub const BUCKET: &str = "lab";
pub const KEY_ID: &str = "key-of-tests";
pub const SECRET: &str = "secret-of-tests";
/// Most bytes of the head of a request.
const HEAD_MAX: usize = 64 << 10;
/// How often the server is started until it has a port.
const STARTS: usize = 10;

/// What happens to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server answers it.
    None,
    /// The proxy answers it with this head, which ends with an empty line, and what follows.
    Answer(String),
    /// The connection is cut after this many bytes of the body were sent to the server, or in the head of a request
    /// without a body.
    CutRequest(usize),
    /// The server answers it, and the connection is cut after this many bytes of the answer.
    CutAnswer(usize),
    /// It is delayed.
    Wait(Duration),
}

impl Fault {
    /// An answer without a body.
    pub fn status(status: u16) -> Self {
        Self::Answer(format!("HTTP/1.1 {status} fault\r\ncontent-length: 0\r\n\r\n"))
    }
}

type Rule = Box<dyn FnMut(&str) -> Fault + Send>;

struct Proxy {
    server: u16,
    rule: Mutex<Rule>,
    seen: Mutex<Vec<String>>,
}

/// A server with one bucket.
pub struct S3 {
    folder: tempfile::TempDir,
    child: Child,
    proxy: Arc<Proxy>,
    port: u16,
}

/// The program, in the folder of tools next to the output of cargo.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(3).unwrap().join("tools/bin/s3s-fs");
    assert!(program.exists(), "{} is missing: run 'scripts/setup s3'", program.display());
    program
}

/// Starts the server, with the port on which it listens.
fn listening(folder: &Path) -> (Child, u16) {
    for _ in 0..STARTS {
        // The server cannot say which free port it has chosen. Another process may get this one before the server does.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(program());
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--access-key", KEY_ID, "--secret-key", SECRET]).arg(folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut ended = false;
        crate::process::until("the S3 server listens", || {
            ended = child.try_wait().unwrap().is_some();
            ended || TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        if !ended && listens(&child, port) {
            return (child, port);
        }
        let _ = child.kill();
        child.wait().unwrap();
    }
    panic!("the S3 server does not start");
}

/// Whether it is this process that listens on a port of the loopback address. Another one may have got the port.
fn listens(child: &Child, port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    // State 0A is LISTEN; the tenth column is the socket's inode.
    let address = format!("0100007F:{port:04X}");
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut listening = rows.filter(|row| row.len() > 9 && row[1] == address && row[3] == "0A");
    let Some(socket) = listening.next().map(|row| format!("socket:[{}]", row[9])) else { return false };
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{}/fd", child.id())) else { return false };
    descriptors.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == Path::new(&socket)))
}

impl S3 {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let (child, server) = listening(folder.path());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Proxy { server, rule: Mutex::new(Box::new(|_| Fault::None)), seen: Mutex::default() };
        let started = Self { folder, child, proxy: Arc::new(proxy), port };
        let proxy = started.proxy.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let proxy = proxy.clone();
                std::thread::spawn(move || proxy.serve(client));
            }
        });
        started
    }

    /// The URL of the server.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The variables with which a command reaches the server.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let credentials = [("AWS_ACCESS_KEY_ID", KEY_ID.into()), ("AWS_SECRET_ACCESS_KEY", SECRET.into())];
        credentials.into_iter().chain([("AWS_ENDPOINT_URL", self.endpoint())]).collect()
    }

    /// The folder of the objects with a prefix; each is a file.
    pub fn objects(&self, prefix: &str) -> PathBuf {
        self.folder.path().join(BUCKET).join(prefix)
    }

    /// Lets a rule decide about each request, of which it gets the head in lower case.
    pub fn rule(&self, rule: impl FnMut(&str) -> Fault + Send + 'static) {
        *self.proxy.rule.lock().unwrap() = Box::new(rule);
    }

    /// Causes these faults of the next requests whose heads contain `words`.
    pub fn faults(&self, words: &'static str, faults: impl IntoIterator<Item = Fault>) {
        let mut faults: VecDeque<Fault> = faults.into_iter().collect();
        self.rule(move |head| match head.contains(words) {
            true => faults.pop_front().unwrap_or(Fault::None),
            false => Fault::None,
        });
    }

    /// The heads of the requests since the last call, in lower case.
    pub fn seen(&self) -> Vec<String> {
        std::mem::take(&mut *self.proxy.seen.lock().unwrap())
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Proxy {
    /// Serves the requests of a connection. A failed connection is the concern of the client.
    fn serve(&self, mut client: TcpStream) {
        while self.request(&mut client).is_ok_and(|again| again) {}
        let _ = client.shutdown(Shutdown::Both);
    }

    /// Serves a request; returns whether the connection can have another one.
    fn request(&self, client: &mut TcpStream) -> io::Result<bool> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            client.read_exact(&mut byte)?;
            head.push(byte[0]);
            assert!(head.len() < HEAD_MAX);
        }
        let text = String::from_utf8_lossy(&head).to_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
        self.seen.lock().unwrap().push(text.clone());
        let fault = (self.rule.lock().unwrap())(&text);
        if let Fault::Wait(time) = fault {
            std::thread::sleep(time);
        }
        let mut body = vec![0; length];
        client.read_exact(&mut body)?;
        if let Fault::Answer(answer) = fault {
            client.write_all(answer.as_bytes())?;
            return Ok(true);
        }
        let mut server = TcpStream::connect(("127.0.0.1", self.server))?;
        let end = head.len() - 2;
        server.write_all(&head[..end])?;
        if length == 0 && matches!(fault, Fault::CutRequest(_)) {
            // Without its last line the request is not complete.
            server.shutdown(Shutdown::Both)?;
            return Ok(false);
        }
        server.write_all(b"connection: close\r\n\r\n")?;
        if let Fault::CutRequest(bytes) = fault {
            server.write_all(&body[..bytes.min(length)])?;
            server.shutdown(Shutdown::Both)?;
            return Ok(false);
        }
        server.write_all(&body)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        if let Fault::CutAnswer(bytes) = fault {
            answer.truncate(bytes);
        }
        client.write_all(&answer)?;
        Ok(false)
    }
}
