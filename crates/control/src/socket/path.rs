//! The control socket in the datastore's folder: where it is, which process may bind it, what a stale one is.
//!
//! 1. Only the owner of the datastore (the holder of its lock) binds or removes the socket. Whatever lies there when
//!    one becomes owner belonged to a process that is gone: it is stale and may be removed.
//! 2. The socket has mode 0600 from the moment it exists.
//! 3. A datastore whose path is longer than a socket address holds works as any other: the socket is then reached
//!    through the descriptor of the folder.

use error::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Its name in the folder.
const NAME: &str = "control.sock";

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// The control socket of a datastore.
pub fn path(datastore: &Path) -> PathBuf {
    datastore.join(NAME)
}

/// The address of the socket, and the folder's descriptor when the address goes through it.
fn address(datastore: &Path) -> io::Result<(SocketAddrUnix, Option<OwnedFd>)> {
    match SocketAddrUnix::new(path(datastore)) {
        Ok(address) => Ok((address, None)),
        Err(rustix::io::Errno::NAMETOOLONG) => {
            let folder =
                rustix::fs::open(datastore, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            let short = format!("/proc/self/fd/{}/{NAME}", folder.as_raw_fd());
            Ok((SocketAddrUnix::new(short)?, Some(folder)))
        }
        Err(e) => Err(e.into()),
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// A connection to the server of the datastore; `None` when there is none (no socket, or a stale one).
pub fn connect(datastore: &Path) -> Result<Option<UnixStream>> {
    let attempt = || -> io::Result<UnixStream> {
        let (address, _folder) = address(datastore)?;
        let socket = new_socket()?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    };
    match attempt() {
        Ok(stream) => Ok(Some(stream)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(e) => Err(Error::io(format!("connecting to the server of datastore '{}'", datastore.display()), e)),
    }
}

/// Removes what an earlier owner left. Call only as owner. Anything that is not a socket is left alone and refused.
pub fn remove_stale(datastore: &Path) -> Result<()> {
    let path = path(datastore);
    let refuse = |e| Error::io(format!("removing the stale socket '{}'", path.display()), e);
    match std::fs::symlink_metadata(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(refuse(e)),
        Ok(metadata) if metadata.file_type().is_socket() => match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(refuse(e)),
            _ => Ok(()),
        },
        Ok(_) => Err(Error::new(
            ErrorKind::Exists,
            format!("'{}' is not a socket: move it away, lamina needs that name", path.display()),
        )),
    }
}

/// Binds the socket. Call only as owner.
pub fn bind(datastore: &Path) -> Result<UnixListener> {
    remove_stale(datastore)?;
    let attempt = || -> io::Result<UnixListener> {
        let (address, _folder) = address(datastore)?;
        let socket = new_socket()?;
        // Linux gives the file the mode of the socket, so no other user can connect even for an instant.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(socket.into())
    };
    attempt().map_err(|e| Error::io(format!("listening on '{}'", path(datastore).display()), e))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn bind_connect_and_the_stale_socket_of_a_dead_owner() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("d".repeat(120));
        std::fs::create_dir(&long).unwrap();
        for datastore in [folder.path(), &long] {
            assert!(connect(datastore).unwrap().is_none(), "no server yet");
            let listener = bind(datastore).unwrap();
            let mode = std::fs::metadata(path(datastore)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert!(connect(datastore).unwrap().is_some());
            drop(listener);
            assert!(path(datastore).exists(), "a killed owner leaves its socket");
            assert!(connect(datastore).unwrap().is_none(), "stale");
            let _next = bind(datastore).unwrap();
            assert!(connect(datastore).unwrap().is_some());
        }
    }

    #[test]
    fn a_file_in_the_way_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(path(folder.path()), "mine").unwrap();
        assert_eq!(bind(folder.path()).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(std::fs::read(path(folder.path())).unwrap(), b"mine");
    }
}
