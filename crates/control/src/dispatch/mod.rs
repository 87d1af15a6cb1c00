//! The one place where requests become calls of the datastore; a file for each noun.

pub mod claims;
mod clone;
mod disk;
mod image;
mod send;
mod snapshot;

pub use image::alone;
pub use send::point_name;

use crate::message::{ExportInfo, Reply, Request, Serving};
use crate::uri;
use ::disk::pace::Background;
use ::disk::{ChangedExtent, CheckOptions, Datastore, Progress};
use error::Result;
use export::clients::Clients;
use export::nbd;
use std::path::Path;

/// What requests are asked of.
#[derive(Clone, Copy)]
pub struct Service<'a> {
    /// The datastore, open in this process.
    pub datastore: &'a Datastore,
    /// Its folder.
    pub folder: &'a Path,
    /// The NBD clients of this process, or of the last one that served it.
    pub clients: &'a Clients,
    /// The NBD server of this process, if it has one.
    pub nbd: Option<&'a nbd::Server>,
    /// How this process serves it, if it does.
    pub serving: Option<&'a Serving>,
}

/// Follows a request: how far it is, whether it is still wanted, and the parts of an answer too long to hold.
pub trait Watch: Progress {
    /// Takes the next extents of a diff. An error ends the diff.
    fn extents(&self, batch: Vec<ChangedExtent>) -> Result<()>;
}

/// A request whose long work gives way to the requests of clients.
struct Paced<'a> {
    background: Background<'a>,
    watch: &'a dyn Watch,
}

impl Progress for Paced<'_> {
    fn update(&self, done: u64, total: u64) {
        self.background.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.background.cancelled()
    }

    fn rate(&self) -> u64 {
        self.background.rate()
    }

    fn moved(&self, bytes: u64) {
        self.background.moved(bytes);
    }
}

impl Watch for Paced<'_> {
    fn extents(&self, batch: Vec<ChangedExtent>) -> Result<()> {
        self.watch.extents(batch)
    }
}

/// Carries out one request.
pub fn dispatch(service: Service<'_>, request: Request, watch: &dyn Watch) -> Result<Reply> {
    let datastore = service.datastore;
    let watch = &Paced { background: datastore.background(watch), watch };
    // The trait object of the watch as one of its supertrait.
    let progress: &dyn Progress = watch;
    Ok(match request {
        Request::Status => Reply::Status { status: datastore.status()?, serving: service.serving.cloned() },
        Request::Check { data, repair } => Reply::Check(datastore.check(CheckOptions { data, repair }, progress)?),
        Request::Disk(request) => disk::dispatch(service, request, watch)?,
        Request::Snapshot(request) => snapshot::dispatch(service, request, watch)?,
        Request::Clone { disk, at, names, full: false } => {
            Reply::Disks(datastore.clone_linked(&disk, &at, &names, progress)?)
        }
        Request::Clone { disk, at, names, full: true } => clone::full(datastore, &disk, &at, &names, progress)?,
        Request::Convert(conversion) => image::convert(Some(datastore), &conversion, watch)?,
        Request::Image(request) => image::dispatch(request, watch)?,
        Request::Salvage(request) => image::salvage(&request, watch)?,
        // Without a server, a request ends with its process; with one, the server has waited for the request's end.
        Request::Settle => Reply::Settled,
        Request::Send(request) => send::send(datastore, &request, watch)?,
        Request::Receive(request) => send::receive(datastore, request)?,
        Request::ExportList => Reply::Exports(
            datastore
                .device_names()
                .into_iter()
                .map(|name| ExportInfo {
                    read_only: name.contains('@') || service.serving.is_some_and(|s| s.read_only),
                    uris: service.serving.map(|s| uri::of_export(s, &name)).unwrap_or_default(),
                    name,
                })
                .collect(),
        ),
    })
}
