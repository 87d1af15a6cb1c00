//! Standard input or output as the stream of a backup. The process that carries the request out may be a server, which
//! has another standard output. So this process listens at a Unix socket in the folder of the datastore, the other
//! process connects to it, and a thread here copies.
//!
//! 1. One connection is accepted. Then the name of the socket is removed.
//! 2. The end of standard input is the end of the stream; closing the reader of standard output ends the request.

use control::{BackupPlace, BackupRequest, Request};
use disk::Location;
use error::{Error, ErrorKind, IoContext, Result};
use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval of checks for a connection.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);

/// The direction in which bytes are copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// From standard input.
    In,
    /// To standard output.
    Out,
}

/// The stream of a request.
pub struct Stream {
    path: PathBuf,
    over: Arc<AtomicBool>,
    direction: Direction,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Stream {
    /// Prepares the stream of a request, if the request has one, and writes the path of its socket into the request.
    pub fn prepare(request: &mut Request, datastore: &Location) -> Result<Option<Self>> {
        let Request::Backup(request) = request else { return Ok(None) };
        let direction = match request {
            BackupRequest::Restore(_) => Direction::In,
            _ => Direction::Out,
        };
        let Some(BackupPlace::Process(path)) = request.place_mut() else { return Ok(None) };
        let folder = datastore.need_folder("backups through standard input or output")?;
        datastore.require()?;
        let bytes: [u8; 8] = backend::random::bytes()?;
        let number = u64::from_le_bytes(bytes);
        // The server has another working directory.
        let folder = std::path::absolute(folder).during(|| format!("finding '{datastore}'"))?;
        let name = format!("backup-{number:016x}.sock");
        *path = folder.join(&name);
        let during = || format!("making a socket for the backup in '{}'", folder.display());
        // The path may be longer than a socket address allows, so the socket is reached through the open folder.
        let open = File::open(&folder).during(during)?;
        let short = format!("/proc/self/fd/{}/{name}", open.as_raw_fd());
        let listener = UnixListener::bind(short).during(during)?;
        let owner = open.metadata().during(during)?;
        if std::fs::symlink_metadata(&*path).during(during)?.uid() != owner.uid() {
            // This process is root, and the server may be another user, who has to connect.
            lchown(&*path, Some(owner.uid()), Some(owner.gid())).during(during)?;
        }
        listener.set_nonblocking(true).during(during)?;
        let over = Arc::new(AtomicBool::new(false));
        let (place, stop) = (path.clone(), Arc::clone(&over));
        let work = move || {
            let accepted = accept(&listener, &stop);
            drop(listener);
            let _ = std::fs::remove_file(&place);
            match accepted? {
                Some(stream) => copy(&stream, direction),
                None => Ok(()),
            }
        };
        let thread = std::thread::Builder::new().name("backup-stream".to_owned()).spawn(work);
        let thread = thread.map_err(|error| Error::io("starting a thread for a backup", error))?;
        Ok(Some(Self { path: path.clone(), over, direction, thread: Some(thread) }))
    }

    /// Waits until everything was written to standard output, after the request has ended. Standard input is not read
    /// any more.
    pub fn finish(mut self) -> io::Result<()> {
        self.over.store(true, Ordering::Release);
        match self.thread.take() {
            // A thread that reads standard input is not joined, because the other end of standard input may never be
            // closed.
            Some(thread) if self.direction == Direction::Out => {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of the backup failed")))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // Usually the thread has already removed the socket's file.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The connection of the process that carries out the request; `None` if the request has ended without a connection.
fn accept(listener: &UnixListener, over: &AtomicBool) -> io::Result<Option<UnixStream>> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(Some(stream));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if over.load(Ordering::Acquire) {
                    return Ok(None);
                }
                std::thread::sleep(ACCEPT_INTERVAL);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn copy(mut stream: &UnixStream, direction: Direction) -> io::Result<()> {
    match direction {
        Direction::In => {
            let copied = io::copy(&mut io::stdin().lock(), &mut stream);
            stream.shutdown(Shutdown::Write).and(copied.map(drop))
        }
        Direction::Out => {
            let mut out = io::stdout().lock();
            let copied = io::copy(&mut stream, &mut out).and_then(|_| out.flush());
            // The other process gets an error at its next write.
            let _ = stream.shutdown(Shutdown::Both);
            copied
        }
    }
}

/// The error of a request with a stream, for `--background`.
pub fn refuse_background(request: &Request) -> Result<()> {
    match request {
        Request::Backup(request) if matches!(request.place(), Some(BackupPlace::Process(_))) => Err(Error::new(
            ErrorKind::Invalid,
            "a backup through standard input or output cannot run in the background",
        )),
        _ => Ok(()),
    }
}
