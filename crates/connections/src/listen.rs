//! Addresses to listen on: unix sockets with their files, and TCP.
//!
//! 1. A unix socket has its final permissions from the moment its file exists. When the listener is dropped, the file
//!    is removed, unless another file has replaced it.
//! 2. A file that is not a socket is never removed.
//! 3. TCP beyond loopback needs TLS with client certificates, unless the operator allows insecure TCP ([`Access`]).

use crate::limits::{BACKLOG, BACKLOG_OWNED};
use crate::tls::TlsConfig;
use error::{Error, ErrorKind, IoContext, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket with a path of at most 107 bytes. A socket file on which no process listens is replaced.
    Unix {
        /// Path of the socket.
        path: PathBuf,
        /// Permission bits of the socket file, such as `0o600` for its owner only. They decide which users may connect.
        mode: u32,
        /// The group of the socket file; `None` for the group of this process.
        group: Option<u32>,
    },
    /// A unix socket with mode 0600, in a folder whose lock the caller holds. So an existing socket file was created by
    /// an earlier owner, and is replaced. The path may be longer than a socket address allows: [`connect`] can connect
    /// to it nevertheless.
    Owned {
        /// Path of the socket.
        path: PathBuf,
        /// A group that may connect too. The socket then has mode 0660.
        group: Option<u32>,
    },
    /// A TCP address; port 0 selects a free one.
    Tcp(SocketAddr),
}

/// An address on which the service listens, in the form that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address, with the actual port.
    Tcp(SocketAddr),
}

/// The conditions that decide whether the service may listen on a TCP address beyond loopback.
#[derive(Clone, Debug)]
pub struct Access {
    /// The TLS configuration, if TLS is offered.
    pub tls: Option<TlsConfig>,
    /// Whether the operator allows insecure TCP.
    pub insecure_tcp: bool,
    /// What a client of an unprotected port could do, for the error message: `read every disk`.
    pub exposes: &'static str,
    /// How to listen securely, for the error message.
    pub remedy: &'static str,
}

impl Access {
    /// The conditions for a service that listens on unix sockets only.
    pub const LOCAL: Self = Self { tls: None, insecure_tcp: false, exposes: "connect", remedy: "use a unix socket" };

    fn check(&self, address: SocketAddr) -> Result<()> {
        let missing = match &self.tls {
            _ if self.insecure_tcp || address.ip().to_canonical().is_loopback() => return Ok(()),
            None => "there is no TLS",
            Some(tls) if !tls.required => "TLS is not required",
            Some(tls) if tls.client_authorities.is_none() => "no client certificates are asked for",
            Some(_) => return Ok(()),
        };
        let text = format!(
            "not listening on {address}: {missing}, so anyone on the network could {}; {}",
            self.exposes, self.remedy
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) address: Address,
    pub(crate) file: Option<SocketFile>,
}

impl Listen {
    /// Creates a listening, non-blocking socket.
    pub(crate) fn bind(&self, access: &Access) -> Result<Listener> {
        let listener = match self {
            Self::Unix { path, mode, group } => bind_unix(path, *mode, *group, false)?,
            Self::Owned { path, group } => bind_unix(path, if group.is_some() { 0o660 } else { 0o600 }, *group, true)?,
            Self::Tcp(address) => {
                access.check(*address)?;
                let during = || format!("listening on {address}");
                let listener = TcpListener::bind(address).during(during)?;
                let address = Address::Tcp(listener.local_addr().during(during)?);
                Listener { socket: listener.into(), address, file: None }
            }
        };
        // The socket is non-blocking, because a client may disconnect between poll and accept.
        rustix::io::ioctl_fionbio(&listener.socket, true)
            .map_err(|error| Error::io("preparing a socket to listen", error.into()))?;
        Ok(listener)
    }
}

/// A socket file that this process created, identified by its inode.
pub(crate) struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::symlink_metadata(path).ok()?;
        Some(Self { path: path.to_owned(), inode: (metadata.dev(), metadata.ino()) })
    }

    /// Removes the file, unless the path now names another file.
    pub(crate) fn remove(&self) {
        if Self::of(&self.path).is_some_and(|file| file.inode == self.inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "the socket could not be removed");
        }
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// The address of a socket. If the path is too long for a socket address, the address uses the descriptor of the
/// folder, which must stay open while the address is used.
fn address(path: &Path) -> io::Result<(SocketAddrUnix, Option<OwnedFd>)> {
    let (folder, name) = match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => match (path.parent(), path.file_name()) {
            (Some(folder), Some(name)) => (folder, name),
            _ => return Err(Errno::NAMETOOLONG.into()),
        },
        address => return Ok((address?, None)),
    };
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    Ok((SocketAddrUnix::new(short)?, Some(folder)))
}

/// Connects to a unix socket with a path of any length.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let (address, _folder) = address(path)?;
    let socket = new_socket()?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket.into())
}

/// Removes the socket file of an earlier owner of the folder. Only the current owner may call this. Other files are not
/// changed.
///
/// # Errors
/// `Exists` for a file that is not a socket, and errors of the system.
pub fn remove_stale(path: &Path) -> Result<()> {
    let what = || format!("removing the stale socket '{}'", path.display());
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.during(what)?,
    };
    if !metadata.file_type().is_socket() {
        let text = format!("'{}' is not a socket: move it away, lamina needs that name", path.display());
        return Err(Error::new(ErrorKind::Exists, text));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(what(), error)),
        _ => Ok(()),
    }
}

fn bind_unix(path: &Path, mode: u32, group: Option<u32>, owned: bool) -> Result<Listener> {
    let what = || format!("listening on unix socket {}", path.display());
    let (address, _folder) = match SocketAddrUnix::new(path) {
        Err(error) if !owned || error != Errno::NAMETOOLONG => {
            let text = format!("{}: {error}; a socket path may have 107 bytes at most", what());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        _ => address(path).during(what)?,
    };
    let mode = Mode::from_raw_mode(mode);
    let attempt = || -> rustix::io::Result<OwnedFd> {
        let socket = new_socket()?;
        // On Linux the file is created with the permissions of the socket, so that other users can connect at no
        // moment. If the group of the file has to be changed, the present group must not be able to connect before the
        // change.
        let first = if group.is_some() { mode & Mode::from_raw_mode(0o700) } else { mode };
        rustix::fs::fchmod(&socket, first)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, if owned { BACKLOG_OWNED } else { BACKLOG })?;
        Ok(socket)
    };
    let socket = match attempt() {
        Err(Errno::ADDRINUSE) => {
            if !owned && is_live(path) {
                let text = format!("{}: another server listens there", what());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            remove_stale(path)?;
            attempt()
        }
        outcome => outcome,
    };
    let socket = socket.map_err(|error| Error::io(what(), error.into()))?;
    if let Some(group) = group {
        let giving = |error| Error::io(format!("{}: giving it to group {group}", what()), error);
        std::os::unix::fs::chown(path, None, Some(group)).map_err(giving)?;
    }
    // Restores permission bits that the umask has removed.
    rustix::fs::chmod(path, mode).map_err(|error| Error::io(what(), error.into()))?;
    let file = SocketFile::of(path)
        .ok_or_else(|| Error::new(ErrorKind::Io, format!("{}: the socket file was removed", what())))?;
    Ok(Listener { socket, address: Address::Unix(path.to_owned()), file: Some(file) })
}

/// Whether a process listens on the socket: a connection succeeds, or fails because the backlog is full.
fn is_live(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket && !matches!(connect(path), Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn unix(path: &Path, mode: u32) -> Listen {
        Listen::Unix { path: path.to_owned(), mode, group: None }
    }

    #[test]
    fn a_socket_without_listener_is_replaced_and_one_with_a_listener_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for mode in [0o600, 0o660, 0o666] {
            let listener = unix(&path, mode).bind(&Access::LOCAL).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            let error = unix(&path, mode).bind(&Access::LOCAL).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            connect(&path).unwrap();
            // The state of the socket file after its process was killed.
            drop(listener);
            assert!(path.exists());
            // A process that another test has just forked holds the listener until it executes its program.
            let refused = (0..1000).find_map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                connect(&path).err()
            });
            assert_eq!(refused.unwrap().kind(), io::ErrorKind::ConnectionRefused);
        }
        assert_eq!(
            unix(&path.join("x".repeat(120)), 0o600).bind(&Access::LOCAL).err().unwrap().kind(),
            ErrorKind::Invalid
        );
    }

    #[test]
    fn the_owner_of_a_folder_replaces_any_socket_and_may_have_a_long_path() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("d".repeat(120));
        std::fs::create_dir(&long).unwrap();
        for path in [folder.path().join("s"), long.join("s")] {
            assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
            let first = Listen::Owned { path: path.clone(), group: None }.bind(&Access::LOCAL).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let second = Listen::Owned { path: path.clone(), group: None }.bind(&Access::LOCAL).unwrap();
            connect(&path).unwrap();
            first.file.unwrap().remove();
            assert!(path.exists(), "the file of a later owner is not removed");
            second.file.unwrap().remove();
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        std::fs::write(&path, "mine").unwrap();
        for listen in [unix(&path, 0o600), Listen::Owned { path: path.clone(), group: None }] {
            let error = listen.bind(&Access::LOCAL).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Exists);
            assert!(error.to_string().contains("not a socket"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        }
    }

    #[test]
    fn tcp_beyond_loopback_needs_client_certificates_or_an_explicit_option() {
        let tls = |clients: bool, required| TlsConfig {
            certificate: "c".into(),
            key: "k".into(),
            client_authorities: clients.then(|| "a".into()),
            required,
        };
        let access = |tls, insecure_tcp| Access { tls, insecure_tcp, ..Access::LOCAL };
        let refused = |address: &str, access: Access| {
            access.check(address.parse().unwrap()).map_err(|error| error.to_string()).err()
        };
        for (beyond, within) in
            [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("[::ffff:192.0.2.1]:1", "127.3.2.1:1")]
        {
            for (cause, tls) in [
                (Some("there is no TLS"), None),
                (Some("TLS is not required"), Some(tls(true, false))),
                (Some("no client certificates"), Some(tls(false, true))),
                (None, Some(tls(true, true))),
            ] {
                let found = refused(beyond, access(tls.clone(), false));
                assert_eq!(found.is_some(), cause.is_some(), "{beyond} {found:?}");
                assert!(found.is_none_or(|text| text.contains(cause.unwrap())), "{beyond} {cause:?}");
                assert_eq!(refused(within, access(tls.clone(), false)), None);
                assert_eq!(refused(beyond, access(tls, true)), None);
            }
        }
    }
}
