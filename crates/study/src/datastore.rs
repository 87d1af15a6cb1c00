//! lamina's command line, as the study uses it.
//!
//! What must hold: the verbs go to the server when one runs (the command line finds it by itself), and their time is
//! what a script would see, process start included. Where starting a process would drown what is timed, [`Control`]
//! says the same over the datastore's control socket.

use crate::error::{Doing, Error, Result};
use crate::fio::Endpoint;
use crate::peers::{self, Kind, Server};
use crate::plan::Mode;
use crate::process::{self, Service};
use crate::scratch::Scratch;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest time one verb may take.
const VERB_TIME_MAX: Duration = Duration::from_secs(1800);

/// A datastore of its own in the work folder.
#[derive(Debug)]
pub struct Datastore {
    program: PathBuf,
    path: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    /// Whether the program knows `serve --client-grace`: 0.1.0 does not.
    has_grace: bool,
}

/// Longest wait for an answer on the control socket.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// A connection to a server's control socket: a line of JSON there, a line back.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
    /// The server's, so that programs of different age can be compared: what is asked here is the same in all of them.
    version: u64,
}

impl Control {
    /// Takes a snapshot; the time from the request to the answer that it is there.
    pub fn snapshot(&mut self, disk: &str, name: &str) -> Result<Duration> {
        self.request(json!({ "snapshot": { "create": { "of": [[disk, name]], "options": {} } } }))
    }

    fn request(&mut self, request: Value) -> Result<Duration> {
        let line = json!({ "version": self.version, "message": { "request": request } });
        let began = Instant::now();
        let mut answer = self.exchange(Some(&line))?;
        loop {
            let message = &answer["message"];
            if message.get("reply").is_some() {
                return Ok(began.elapsed());
            }
            if message.get("progress").is_none() {
                return Err(Error::Answer(format!("control socket: {answer}")));
            }
            answer = self.exchange(None)?;
        }
    }

    /// Sends a line, if there is one to send, and reads one.
    fn exchange(&mut self, line: Option<&Value>) -> Result<Value> {
        let doing = || "talking to the control socket".to_string();
        if let Some(line) = line {
            self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).doing(doing)?;
        }
        let mut answer = String::new();
        self.stream.read_line(&mut answer).doing(doing)?;
        serde_json::from_str(&answer).map_err(|e| Error::Answer(format!("control socket: {e}: {answer:?}")))
    }
}

/// How a datastore is served.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Buffered or direct.
    pub mode: Mode,
    /// Bound of the metadata cache in bytes, when not the default.
    pub metadata_cache: Option<u64>,
    /// Refuse writes.
    pub read_only: bool,
    /// Receive what other servers send, with this certificate and key.
    pub receive: Option<Keys>,
}

/// A certificate that is for this machine and signed by itself: of servers and of clients.
#[derive(Clone, Debug)]
pub struct Keys {
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
}

impl Keys {
    /// Makes one in the work folder.
    pub fn make(scratch: &Scratch) -> Result<Keys> {
        let keys = Keys { certificate: scratch.path("certificate.pem"), key: scratch.path("key.pem") };
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]);
        command.args(["-subj", "/CN=lamina", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]);
        command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        command.arg("-keyout").arg(&keys.key).arg("-out").arg(&keys.certificate);
        process::run(&mut command)?;
        Ok(keys)
    }
}

impl Serving {
    /// With defaults in everything but the mode.
    pub fn plain(mode: Mode) -> Serving {
        Serving { mode, metadata_cache: None, read_only: false, receive: None }
    }
}

impl Datastore {
    /// Makes one.
    pub fn init(program: &Path, scratch: &Scratch, name: &str) -> Result<Datastore> {
        Self::init_at(program, scratch, name, scratch.path(name), None)
    }

    /// Makes one in a folder of the caller's choice, with a journal of this size, such as `4M`.
    pub fn init_at(
        program: &Path,
        scratch: &Scratch,
        name: &str,
        path: PathBuf,
        journal: Option<&str>,
    ) -> Result<Datastore> {
        if !program.is_file() {
            let program = program.display();
            return Err(Error::Usage(format!(
                "no lamina at {program}: build it (make build) or name it with --lamina"
            )));
        }
        let size = journal.map(|size| ["--journal-size", size]);
        process::run(Command::new(program).arg("init").args(size.into_iter().flatten()).arg(&path))?;
        let (socket, log) = (scratch.socket(name), scratch.path(&format!("{name}.log")));
        let has_grace = process::run(Command::new(program).args(["serve", "--help"]))?.contains("--client-grace");
        Ok(Datastore { program: program.into(), path, socket, log, has_grace })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a verb; how long it took.
    pub fn verb<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<Duration> {
        let mut command = Command::new(&self.program);
        command.arg("--datastore").arg(&self.path).args(words);
        let began = Instant::now();
        process::run_within(&mut command, VERB_TIME_MAX)?;
        Ok(began.elapsed())
    }

    /// Runs a verb; what it printed.
    pub fn text<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<String> {
        process::run_within(Command::new(&self.program).arg("--datastore").arg(&self.path).args(words), VERB_TIME_MAX)
    }

    /// Runs a verb that answers in JSON.
    pub fn ask<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<Value> {
        let mut command = Command::new(&self.program);
        command.arg("--datastore").arg(&self.path).args(words).arg("--json");
        let text = process::run_within(&mut command, VERB_TIME_MAX)?;
        serde_json::from_str(&text)
            .map_err(|e| Error::Answer(format!("{}: {e}: {}", process::shown(&command), text.trim())))
    }

    /// Creates a thin disk.
    pub fn create(&self, disk: &str, size: u64) -> Result<()> {
        self.create_as(disk, size, "thin").map(|_| ())
    }

    /// Creates a disk of a provisioning type; how long that took.
    pub fn create_as(&self, disk: &str, size: u64, provisioning: &str) -> Result<Duration> {
        self.verb(&["disk", "create", disk, "--size", &size.to_string(), "--provisioning", provisioning])
    }

    /// Creates a disk in one of VMware's formats: flat, with snapshots that are deltas of this format.
    pub fn create_vmdk(&self, disk: &str, size: u64, provisioning: &str, delta: Option<&str>) -> Result<()> {
        let size = size.to_string();
        let mut words =
            vec!["disk", "create", disk, "--size", &size, "--provisioning", provisioning, "--format", "vmdk"];
        words.extend(delta.map(|delta| ["--delta", delta]).into_iter().flatten());
        self.verb(&words).map(|_| ())
    }

    /// Figures of a disk's chain and caches.
    pub fn statistics(&self, disk: &str) -> Result<Value> {
        self.ask(&["disk", "stats", disk])
    }

    /// The folder in which a disk in VMware's formats has its files.
    pub fn images(&self, disk: &str) -> PathBuf {
        self.path.join("images").join(disk)
    }

    /// Deletes a disk.
    pub fn delete(&self, disk: &str) -> Result<()> {
        self.verb(&["disk", "delete", disk]).map(|_| ())
    }

    /// Takes a snapshot.
    pub fn snapshot(&self, disk: &str, name: &str) -> Result<Duration> {
        self.verb(&["snapshot", "create", &format!("{disk}@{name}")])
    }

    /// Deletes a snapshot.
    pub fn delete_snapshot(&self, disk: &str, name: &str) -> Result<Duration> {
        self.verb(&["snapshot", "delete", &format!("{disk}@{name}")])
    }

    /// Makes the head equal to a snapshot.
    pub fn revert(&self, disk: &str, name: &str) -> Result<Duration> {
        self.verb(&["snapshot", "revert", &format!("{disk}@{name}")])
    }

    /// A connection to the control socket of its server.
    pub fn control(&self) -> Result<Control> {
        let path = self.path.join("control.sock");
        let doing = || format!("connecting to {} (a path above 107 bytes cannot be: see --work)", path.display());
        let connect = |version| -> Result<Control> {
            let stream = UnixStream::connect(&path).doing(doing)?;
            stream.set_read_timeout(Some(ANSWER_TIME_MAX)).doing(doing)?;
            Ok(Control { stream: BufReader::new(stream), version })
        };
        // A version that no server has is refused by a line with the server's own.
        let refusal = connect(0)?.exchange(Some(&json!({ "version": 0, "message": "cancel" })))?;
        let version = refusal["version"].as_u64();
        connect(version.ok_or_else(|| Error::Answer(format!("control socket: {refusal}")))?)
    }

    /// Where a disk or snapshot of it is served.
    pub fn endpoint(&self, export: &str) -> Endpoint {
        Endpoint { socket: self.socket.clone(), export: export.into() }
    }

    /// Serves it; ready when `export` can be opened. Also how long that took from the start of the process.
    pub fn serve(&self, serving: &Serving, export: &str) -> Result<(Server, Duration)> {
        let mut command = Command::new(&self.program);
        command.arg("serve").arg(&self.path).arg("--socket").arg(&self.socket).args(["--io", serving.mode.word()]);
        // fio closes its connections without a disconnect request, and its disks are reverted and deleted right after.
        if self.has_grace {
            command.args(["--client-grace", "0"]);
        }
        if let Some(bytes) = serving.metadata_cache {
            command.args(["--metadata-cache", &bytes.to_string()]);
        }
        if serving.read_only {
            command.arg("--read-only");
        }
        if let Some(Keys { certificate, key }) = &serving.receive {
            command.args(["--receive", "127.0.0.1:0", "--tls-cert"]).arg(certificate).arg("--tls-key").arg(key);
            command.arg("--tls-client-ca").arg(certificate);
        }
        let began = Instant::now();
        let service = Service::start(&mut command, &self.log)?;
        let endpoint = self.endpoint(export);
        peers::wait_ready(&service, &endpoint)?;
        // Disks are served a moment before verbs are answered: ready is when both are.
        while !service.has_said("ready:") {
            if service.ended() || began.elapsed() > peers::START_TIME_MAX {
                return Err(service.failure("does not get ready"));
            }
            process::pause(Duration::from_millis(1))?;
        }
        let time = began.elapsed();
        Ok((Server { name: "lamina".into(), kind: Kind::Ours, endpoint, data: self.path.clone(), service }, time))
    }
}
