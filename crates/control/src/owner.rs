//! Carrying out a request on a datastore: by its server, or, if it is not served, by opening it for this request.

use crate::dispatch::{Service, Target, Watch, dispatch};
use crate::message::{Reply, Request};
use crate::socket::{self, Client};
use disk::{Datastore, OpenOptions, QueueChoice};
use error::{Error, ErrorKind, Result};
use export::clients::Clients;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for another owner that does not answer (a server that is starting or stopping, or another command)
/// before the datastore counts as busy.
const OWNER_PATIENCE: Duration = Duration::from_secs(3);

/// Interval between attempts during this time.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Options for opening a datastore for one request: the defaults of the server.
pub const OPEN_OPTIONS: OpenOptions = OpenOptions {
    mode: backend::IoMode::Buffered,
    queue: QueueChoice::Auto,
    metadata_cache: 128 << 20,
    write_buffer: 64 << 20,
};

/// Returns an error with a helpful message if the folder does not exist.
pub fn require_folder(path: &Path) -> Result<()> {
    let sentence = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => format!("'{}' is not a folder: a datastore is one", path.display()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            format!("no datastore at '{path}': make one with `lamina init {path}`", path = path.display())
        }
        Err(e) => return Err(Error::io(format!("looking for the datastore '{}'", path.display()), e)),
    };
    Err(Error::new(ErrorKind::NotFound, sentence))
}

/// Carries out one request on the datastore, through its server or in this process.
pub fn ask(path: &Path, request: Request, watch: &dyn Watch) -> Result<Reply> {
    require_folder(path)?;
    match reach(path, &request, watch)? {
        Owner::Server(mut client) => client.ask(request, watch),
        Owner::Us(datastore) => {
            let service = Service {
                clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
                datastore: Arc::clone(&datastore),
                folder: path.into(),
                served: None,
                jobs: None,
            };
            let outcome = dispatch(&Target::Open(service), request, watch);
            // The reply is valid only after the datastore was closed, which writes back all data.
            let closed = datastore.close();
            outcome.and_then(|reply| closed.map(|()| reply))
        }
    }
}

/// The owner of the datastore.
enum Owner {
    Server(Client),
    Us(Arc<Datastore>),
}

/// Connects to the owner, or opens the datastore.
fn reach(path: &Path, request: &Request, watch: &dyn Watch) -> Result<Owner> {
    let open = match request {
        Request::Check { repair: true, .. } => Datastore::open_repairing,
        _ => Datastore::open,
    };
    let deadline = Instant::now() + OWNER_PATIENCE;
    loop {
        if let Some(stream) = socket::connect(path)? {
            return Ok(Owner::Server(Client::new(stream)?));
        }
        match open(path, OPEN_OPTIONS) {
            Ok(datastore) => {
                socket::remove_stale(path)?;
                return Ok(Owner::Us(datastore));
            }
            Err(e) if e.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                if watch.cancelled() {
                    return Err(Error::new(ErrorKind::Interrupted, "interrupted while waiting for the datastore"));
                }
                thread::sleep(RETRY_INTERVAL);
            }
            Err(e) => return Err(e),
        }
    }
}
