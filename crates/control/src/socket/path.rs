//! The path of the control socket in the datastore's folder, which process may bind it, and when it is stale.
//!
//! 1. Only the owner of the datastore (the holder of its lock) binds or removes the socket. A socket that exists when a
//!    process becomes the owner was bound by a process that has ended, so it is stale and may be removed.
//! 2. The socket is created with mode 0600. If a group may connect too, the socket's group is changed first, and then
//!    its mode to 0660.
//! 3. The path of a datastore may be longer than a socket address allows: the socket is then reached through the
//!    descriptor of the folder.
//! 4. A datastore without a local folder has no control socket, and so no server.

use connections::listen;
use disk::Location;
use error::{Error, Result};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Name of the socket in the folder.
const NAME: &str = "control.sock";

/// The control socket of a datastore.
pub fn path(datastore: &Location) -> Result<PathBuf> {
    datastore.need_folder("a control socket or a server").map(|folder| folder.join(NAME))
}

/// Connects to the server of the datastore; `None` if there is none (no socket, or a stale one).
pub fn connect(datastore: &Location) -> Result<Option<UnixStream>> {
    let Some(folder) = datastore.local_path() else { return Ok(None) };
    match listen::connect(&folder.join(NAME)) {
        Ok(stream) => Ok(Some(stream)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(e) => Err(Error::io(format!("connecting to the server of datastore '{datastore}'"), e)),
    }
}

/// Removes the socket of an earlier owner. Only the owner of the datastore may call this. A file that is not a socket
/// is refused.
pub fn remove_stale(datastore: &Location) -> Result<()> {
    datastore.local_path().map_or(Ok(()), |folder| listen::remove_stale(&folder.join(NAME)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::socket::Server;
    use error::ErrorKind;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    fn serve(datastore: &Location) -> Result<Server> {
        Server::start(datastore, None, Box::new(|_, _| Err(Error::new(ErrorKind::Unsupported, "a test"))))
    }

    #[test]
    fn a_stale_socket_of_an_ended_owner_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("d".repeat(120));
        std::fs::create_dir(&long).unwrap();
        for datastore in [folder.path(), &long] {
            let datastore = &Location::from(datastore);
            let path = path(datastore).unwrap();
            assert!(connect(datastore).unwrap().is_none(), "no server yet");
            let server = serve(datastore).unwrap();
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert!(connect(datastore).unwrap().is_some());
            drop(server);
            assert!(!path.exists());
            // Creates a stale socket, such as a killed owner leaves.
            let short = folder.path().join("s");
            drop(UnixListener::bind(&short).unwrap());
            std::fs::rename(&short, &path).unwrap();
            assert!(connect(datastore).unwrap().is_none(), "stale");
            let _next = serve(datastore).unwrap();
            assert!(connect(datastore).unwrap().is_some());
        }
    }

    #[test]
    fn a_regular_file_at_the_path_of_the_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let datastore = &Location::from(folder.path());
        let path = path(datastore).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert_eq!(serve(datastore).err().unwrap().kind(), ErrorKind::Exists);
        assert_eq!(remove_stale(datastore).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
