//! lamina's command line, as used by the studies.
//!
//! If a server is running, commands use it. Their time includes the start of a process, as in a script. If this start
//! would dominate the measured time, a study uses [`Control`], which sends the same requests over the datastore's
//! control socket.

use crate::error::{Doing, Error, Result};
use crate::fio::Endpoint;
use crate::peers::{self, Kind, Server};
use crate::plan::Mode;
use crate::process::{self, Service};
use crate::scratch::Scratch;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time limit of a command.
const VERB_TIME_MAX: Duration = Duration::from_secs(1800);

/// A datastore in the work folder.
#[derive(Debug)]
pub struct Datastore {
    program: PathBuf,
    path: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    /// Whether the program supports `serve --client-grace`, which 0.1.0 does not.
    has_grace: bool,
}

/// Time limit of a reply on the control socket.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// A connection to a server's control socket, over which lines of JSON are sent and received.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
    /// Protocol version of the server. It is queried, so that older programs can be measured too: the requests used
    /// here are the same in all versions.
    version: u64,
}

impl Control {
    /// Takes a snapshot; returns the time from the request to the reply.
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

    /// Sends a line, if one is given, and reads a line.
    fn exchange(&mut self, line: Option<&Value>) -> Result<Value> {
        let doing = || "exchanging messages over the control socket".to_string();
        if let Some(line) = line {
            self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).doing(doing)?;
        }
        let mut answer = String::new();
        self.stream.read_line(&mut answer).doing(doing)?;
        serde_json::from_str(&answer).map_err(|e| Error::Answer(format!("control socket: {e}: {answer:?}")))
    }
}

/// The way in which a datastore is served.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Whether data files are opened buffered or direct.
    pub mode: Mode,
    /// Limit of the metadata cache in bytes; `None` for the default.
    pub metadata_cache: Option<u64>,
    /// Whether to refuse writes.
    pub read_only: bool,
    /// The service that listens on TCP on loopback, with TLS and client certificates; `None` for the unix socket only.
    pub over_tcp: Option<(OverTcp, Keys)>,
}

/// A service over TCP.
#[derive(Clone, Copy, Debug)]
pub enum OverTcp {
    /// NBD.
    Nbd,
    /// Receiving from other servers.
    Receive,
}

impl OverTcp {
    /// The name of the service's option, and of its address in the status.
    fn name(self) -> &'static str {
        match self {
            OverTcp::Nbd => "tcp",
            OverTcp::Receive => "receive",
        }
    }
}

/// A self-signed certificate for this host, which servers and clients use.
#[derive(Clone, Debug)]
pub struct Keys {
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// The private key, PEM.
    pub key: PathBuf,
}

impl Keys {
    /// Creates a certificate in the work folder.
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
    /// The default settings, except for the mode.
    pub fn plain(mode: Mode) -> Serving {
        Serving { mode, metadata_cache: None, read_only: false, over_tcp: None }
    }
}

impl Datastore {
    /// Creates a datastore.
    pub fn init(program: &Path, scratch: &Scratch, name: &str) -> Result<Datastore> {
        Self::init_at(program, scratch, name, scratch.path(name), None)
    }

    /// Creates a datastore in a given folder, with a journal of this size, such as `4M`.
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

    /// The folder of the datastore.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a command; returns its duration.
    pub fn verb<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<Duration> {
        let mut command = Command::new(&self.program);
        command.arg("--datastore").arg(&self.path).args(words);
        let began = Instant::now();
        process::run_within(&mut command, VERB_TIME_MAX)?;
        Ok(began.elapsed())
    }

    /// Runs a command; returns its output.
    pub fn text<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<String> {
        process::run_within(Command::new(&self.program).arg("--datastore").arg(&self.path).args(words), VERB_TIME_MAX)
    }

    /// Runs a command with JSON output.
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

    /// Creates a disk with a provisioning type; returns the duration.
    pub fn create_as(&self, disk: &str, size: u64, provisioning: &str) -> Result<Duration> {
        self.verb(&["disk", "create", disk, "--size", &size.to_string(), "--provisioning", provisioning])
    }

    /// Creates a flat disk in VMware's format, whose snapshots are deltas of the given format.
    pub fn create_vmdk(&self, disk: &str, size: u64, provisioning: &str, delta: Option<&str>) -> Result<()> {
        let size = size.to_string();
        let mut words =
            vec!["disk", "create", disk, "--size", &size, "--provisioning", provisioning, "--format", "vmdk"];
        words.extend(delta.map(|delta| ["--delta", delta]).into_iter().flatten());
        self.verb(&words).map(|_| ())
    }

    /// Statistics of a disk's chain and caches.
    pub fn statistics(&self, disk: &str) -> Result<Value> {
        self.ask(&["disk", "stats", disk])
    }

    /// The folder with the files of a disk in a VMware format.
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

    /// Reverts the head to a snapshot.
    pub fn revert(&self, disk: &str, name: &str) -> Result<Duration> {
        self.verb(&["snapshot", "revert", &format!("{disk}@{name}")])
    }

    /// Connects to the server's control socket.
    pub fn control(&self) -> Result<Control> {
        let path = self.path.join("control.sock");
        let doing =
            || format!("connecting to {} (a path of more than 107 bytes does not work: see --work)", path.display());
        let connect = |version| -> Result<Control> {
            let stream = UnixStream::connect(&path).doing(doing)?;
            stream.set_read_timeout(Some(ANSWER_TIME_MAX)).doing(doing)?;
            Ok(Control { stream: BufReader::new(stream), version })
        };
        // The server refuses a request with version 0, and the error has the server's version.
        let refusal = connect(0)?.exchange(Some(&json!({ "version": 0, "message": "cancel" })))?;
        let version = refusal["version"].as_u64();
        connect(version.ok_or_else(|| Error::Answer(format!("control socket: {refusal}")))?)
    }

    /// The address of a service over TCP.
    pub fn address(&self, service: OverTcp) -> Result<SocketAddr> {
        let status = self.ask(&["status"])?;
        let address = status["serving"][service.name()].as_str().and_then(|address| address.parse().ok());
        address.ok_or_else(|| Error::Answer(format!("the status has no address of --{}", service.name())))
    }

    /// The endpoint of a disk or snapshot.
    pub fn endpoint(&self, export: &str) -> Endpoint {
        Endpoint { socket: self.socket.clone(), export: export.into() }
    }

    /// Serves the datastore, and waits until `export` can be opened; returns the server and the time since its process
    /// started.
    pub fn serve(&self, serving: &Serving, export: &str) -> Result<(Server, Duration)> {
        let mut command = Command::new(&self.program);
        command.arg("serve").arg(&self.path).arg("--socket").arg(&self.socket).args(["--io", serving.mode.word()]);
        // The grace time for clients that may reconnect is 0, because fio disconnects without a disconnect request, and
        // its disks are reverted and deleted directly afterwards.
        if self.has_grace {
            command.args(["--client-grace", "0"]);
        }
        if let Some(bytes) = serving.metadata_cache {
            command.args(["--metadata-cache", &bytes.to_string()]);
        }
        if serving.read_only {
            command.arg("--read-only");
        }
        if let Some((service, Keys { certificate, key })) = &serving.over_tcp {
            command.arg(format!("--{}", service.name())).arg("127.0.0.1:0");
            command.arg("--tls-cert").arg(certificate).arg("--tls-key").arg(key);
            command.arg("--tls-client-ca").arg(certificate);
        }
        let began = Instant::now();
        let service = Service::start(&mut command, &self.log)?;
        let endpoint = self.endpoint(export);
        peers::wait_ready(&service, &endpoint)?;
        // NBD is ready shortly before the control socket, so the loop waits for the ready line, which is printed when
        // both are.
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
