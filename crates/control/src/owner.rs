//! Carrying out a request on a datastore: by the datastore's server, or, if it is not served, by opening the datastore
//! for this request.

use crate::dispatch::{Service, Target, Watch, dispatch};
use crate::message::{Reply, Request};
use crate::socket::{self, Client};
use disk::{Datastore, Location, OpenOptions, QueueChoice};
use error::{Error, ErrorKind, Result};
use export::clients::Clients;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for an owner that does not answer: a server that is starting or stopping, or another command. After
/// this time the datastore counts as busy.
const OWNER_PATIENCE: Duration = Duration::from_secs(3);

/// Interval between attempts to reach the owner.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Options for opening a datastore for one request: the server's default options.
pub const OPEN_OPTIONS: OpenOptions = OpenOptions {
    mode: backend::IoMode::Buffered,
    queue: QueueChoice::Auto,
    metadata_cache: 128 << 20,
    write_buffer: 64 << 20,
    read_cache: None,
};

/// Carries out one request on the datastore, through its server or in this process.
pub fn ask(location: &Location, request: Request, watch: &dyn Watch) -> Result<Reply> {
    location.require()?;
    match reach(location, &request, watch)? {
        Owner::Server(mut client) => client.ask(request, watch),
        Owner::Us(datastore) => {
            let service = Service {
                clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
                datastore: Arc::clone(&datastore),
                location: location.clone(),
                served: None,
                jobs: None,
            };
            let outcome = dispatch(&Target::Open(service), request, watch);
            // A served datastore returns freed space in the background. Here the threads end with the command. What is
            // left after an interruption or an error is returned when the datastore is open for longer.
            if let Err(error) = datastore.return_freed(&|| !watch.cancelled()) {
                tracing::warn!(%error, "freed space is returned to the file system later");
            }
            // The reply is valid only if the datastore was closed without an error, because closing writes back all
            // data.
            let closed = datastore.close();
            outcome.and_then(|reply| closed.map(|()| reply))
        }
    }
}

/// The owner of a datastore: the process that holds the datastore's lock.
enum Owner {
    Server(Client),
    Us(Arc<Datastore>),
}

/// Opens the datastore for a process that serves it. Waits for an owner that does not answer: the kernel may still be
/// ending a server that was killed.
///
/// # Errors
/// `Busy` if the owner answers or does not end in time, `Interrupted` if `cancelled` returns true meanwhile.
pub fn open_to_serve(
    location: &Location,
    options: OpenOptions,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Arc<Datastore>> {
    register_sources();
    let deadline = Instant::now() + OWNER_PATIENCE;
    loop {
        match Datastore::open(location, options) {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                // The owner is a server that listens, so waiting for its end has no use.
                if socket::connect(location)?.is_some() {
                    return Err(error);
                }
                if cancelled() {
                    return Err(Error::new(ErrorKind::Interrupted, "interrupted while waiting for the datastore"));
                }
                thread::sleep(RETRY_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

/// Registers the sources from which the content of disks can arrive, so that datastores with such disks can be opened.
fn register_sources() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        for source in [backup::LIVE_SOURCE, backup::LIVE_BUCKET_SOURCE] {
            if let Err(error) = disk::migrate::register_live_source(source) {
                tracing::warn!("{error}");
            }
        }
    });
}

/// Connects to the owner, or opens the datastore.
fn reach(location: &Location, request: &Request, watch: &dyn Watch) -> Result<Owner> {
    let open = match request {
        Request::Check { repair: true, .. } => Datastore::open_repairing,
        _ => Datastore::open,
    };
    register_sources();
    let deadline = Instant::now() + OWNER_PATIENCE;
    loop {
        if let Some(stream) = socket::connect(location)? {
            return Ok(Owner::Server(Client::new(stream)?));
        }
        match open(location, OPEN_OPTIONS) {
            Ok(datastore) => {
                socket::remove_stale(location)?;
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
