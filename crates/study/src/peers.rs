//! The servers of a comparison. Each has an image file, a process and a socket.
//!
//! | name | server and image | buffered | direct |
//! |---|---|---|---|
//! | `nbdkit` | nbdkit file on a raw file | page cache | `cache=none`: still the page cache, pages dropped after use |
//! | `qemu-raw` | qemu-nbd on the same raw file | writeback, threads | none, Linux AIO |
//! | `qemu-raw-uring` | qemu-nbd on the same raw file | writeback, io_uring | none, io_uring |
//! | `qcow2` | qemu-nbd on qcow2 as `qemu-img create` makes it | writeback, threads | none, Linux AIO |
//! | `qcow2-ext` | qcow2 with extended_l2 and clusters of 128 KiB | writeback, threads | none, Linux AIO |
//!
//! The raw servers share one file that was written before, so that only the servers differ. Only one of them is used at
//! a time. nbdkit has no direct I/O, so the direct column has nbdkit's closest mode.

use crate::error::{Doing, Error, Result};
use crate::fio::Endpoint;
use crate::nbd::Client;
use crate::plan::Mode;
use crate::process::{self, Service};
use crate::scratch::Scratch;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time limit for the start of a server.
pub const START_TIME_MAX: Duration = Duration::from_secs(120);
/// Number of clients that a server must accept: the measuring client, and the clients that check the server's state.
const CLIENTS: &str = "8";

/// Kind of a server, for studies that compare with one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A server of a raw file.
    Raw,
    /// A server of a qcow2 file.
    Qcow2,
    /// A server of an image that lamina also serves.
    Image,
    /// lamina itself.
    Ours,
    /// Another lamina program, as baseline.
    Baseline,
}

/// A running server with one disk.
#[derive(Debug)]
pub struct Server {
    /// The server's name, for its column in the report.
    pub name: String,
    /// The server's kind.
    pub kind: Kind,
    /// The server's endpoint.
    pub endpoint: Endpoint,
    /// The file or folder with the server's data.
    pub data: PathBuf,
    /// The server's process.
    pub service: Service,
}

/// Waits until a server answers requests for an export; returns the duration.
pub fn wait_ready(service: &Service, endpoint: &Endpoint) -> Result<Duration> {
    let began = Instant::now();
    loop {
        let failed = match Client::connect(&endpoint.socket, &endpoint.export) {
            Ok(_) => return Ok(began.elapsed()),
            Err(e) => e,
        };
        if service.ended() {
            return Err(service.failure("ended before it answered"));
        }
        // The socket may not exist yet, or no process may listen on it yet. Other errors are final.
        if !matches!(failed, Error::Io { .. }) || began.elapsed() > START_TIME_MAX {
            return Err(service.failure(&format!("does not answer: {failed}")));
        }
        process::pause(Duration::from_millis(1))?;
    }
}

/// Images of the other servers, created once for both modes.
pub struct Images {
    /// The raw image, of which every byte is written.
    pub raw: PathBuf,
    qcow2: PathBuf,
    qcow2_extended: PathBuf,
}

impl Images {
    /// Fills the raw image with random bytes and converts it.
    pub fn make(scratch: &Scratch, size: u64, seed: u64) -> Result<Images> {
        let raw = scratch.path("disk.raw");
        crate::scratch::random_file(&raw, size, seed)?;
        let images = Images { raw, qcow2: scratch.path("default.qcow2"), qcow2_extended: scratch.path("ext.qcow2") };
        convert(&images.raw, &images.qcow2, None)?;
        convert(&images.raw, &images.qcow2_extended, Some("extended_l2=on,cluster_size=128k"))?;
        Ok(images)
    }
}

/// Creates an empty qcow2 image.
pub fn create_qcow2(path: &Path, size: u64, options: Option<&str>) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    if let Some(options) = options {
        command.args(["-o", options]);
    }
    process::run(command.arg(path).arg(size.to_string())).map(|_| ())
}

fn convert(from: &Path, to: &Path, options: Option<&str>) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", "qcow2"]);
    if let Some(options) = options {
        command.args(["-o", options]);
    }
    process::run(command.arg(from).arg(to)).map(|_| ())
}

/// Starts every server that this machine can run. A server that the kernel does not permit is returned with the reason.
pub fn start(scratch: &Scratch, images: &Images, mode: Mode) -> Result<(Vec<Server>, Vec<String>)> {
    let mut servers = vec![start_one(scratch, "nbdkit", Kind::Raw, &images.raw, nbdkit("file", &images.raw, mode))?];
    let mut absent = Vec::new();
    let own = if mode == Mode::Direct { "native" } else { "threads" };
    let qemu = [
        ("qemu-raw", Kind::Raw, &images.raw, "raw", own),
        ("qemu-raw-uring", Kind::Raw, &images.raw, "raw", "io_uring"),
        ("qcow2", Kind::Qcow2, &images.qcow2, "qcow2", own),
        ("qcow2-ext", Kind::Qcow2, &images.qcow2_extended, "qcow2", own),
    ];
    for (name, kind, image, format, engine) in qemu {
        match start_one(scratch, name, kind, image, qemu_nbd(image, format, mode, engine)) {
            Ok(server) => servers.push(server),
            // Containers often forbid io_uring, so this failure is reported; any other failure ends the study.
            Err(Error::Command { detail, .. }) if engine == "io_uring" => {
                absent.push(format!("{name} ({}) cannot run here: {detail}", mode.word()));
            }
            Err(other) => return Err(other),
        }
    }
    Ok((servers, absent))
}

fn start_one(scratch: &Scratch, name: &str, kind: Kind, data: &Path, command: Invocation) -> Result<Server> {
    let socket = scratch.socket(name);
    // Removes the socket of the same server in the other mode.
    let _ = std::fs::remove_file(&socket);
    let mut process = Command::new(command.program);
    process.arg(command.socket_option).arg(&socket).args(&command.arguments);
    let service = Service::start(&mut process, &scratch.path(&format!("{name}.log")))?;
    let endpoint = Endpoint { socket, export: command.export };
    wait_ready(&service, &endpoint)?;
    Ok(Server { name: name.into(), kind, endpoint, data: data.into(), service })
}

/// Starts qemu-nbd on an image of any format, with its parents. In reports the server is named `qemu-nbd`.
pub fn start_image(scratch: &Scratch, image: &Path, format: &str, mode: Mode, writable: bool) -> Result<Server> {
    start_named(scratch, "qemu-nbd", image, format, mode, writable)
}

/// Starts qemu-nbd on an image, under a given name.
pub fn start_named(
    scratch: &Scratch,
    name: &str,
    image: &Path,
    format: &str,
    mode: Mode,
    writable: bool,
) -> Result<Server> {
    let engine = if mode == Mode::Direct { "native" } else { "threads" };
    let mut command = qemu_nbd(image, format, mode, engine);
    if !writable {
        command.arguments.insert(0, "--read-only".into());
    }
    start_one(scratch, name, Kind::Image, image, command)
}

/// Starts nbdkit on a folder of empty raw files with the given names. Each file is an export.
pub fn start_folder(scratch: &Scratch, names: &[String], size: u64, mode: Mode) -> Result<Server> {
    let folder = scratch.path("files");
    std::fs::create_dir(&folder).doing(|| format!("creating {}", folder.display()))?;
    for name in names {
        let file = std::fs::File::create(folder.join(name)).and_then(|file| file.set_len(size));
        file.doing(|| format!("creating {name} in {}", folder.display()))?;
    }
    let command = Invocation { export: names[0].clone(), ..nbdkit("dir", &folder, mode) };
    start_one(scratch, "nbdkit", Kind::Raw, &folder, command)
}

struct Invocation {
    program: &'static str,
    socket_option: &'static str,
    arguments: Vec<String>,
    /// Name of the export; empty for the default export.
    export: String,
}

/// The command line of nbdkit for a `file`, or for each file of a `dir`.
fn nbdkit(what: &str, path: &Path, mode: Mode) -> Invocation {
    let path = format!("{what}={}", path.display());
    let mut arguments = vec!["-f".into(), "--exit-with-parent".into(), "file".into(), path];
    if mode == Mode::Direct {
        arguments.push("cache=none".into());
    }
    Invocation { program: "nbdkit", socket_option: "-U", arguments, export: String::new() }
}

fn qemu_nbd(image: &Path, format: &str, mode: Mode, engine: &str) -> Invocation {
    // In QEMU's options a comma ends a value unless it is doubled.
    let file = image.display().to_string().replace(',', ",,");
    let cache = if mode == Mode::Direct { "none" } else { "writeback" };
    let arguments = vec![
        "--persistent".into(),
        format!("--shared={CLIENTS}"),
        format!("--cache={cache}"),
        format!("--aio={engine}"),
        "--discard=unmap".into(),
        "--detect-zeroes=off".into(),
        "--image-opts".into(),
        // QEMU's locks are switched off, because three servers use the raw file, one after another.
        format!("driver={format},file.driver=file,file.filename={file},file.locking=off"),
    ];
    Invocation { program: "qemu-nbd", socket_option: "-k", arguments, export: String::new() }
}
