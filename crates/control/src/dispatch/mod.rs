//! Translation of requests to calls of the datastore, with a file for each group of requests.
//!
//! Invariants:
//! 1. [`dispatch()`] carries out every request, from any front end.
//! 2. In a process with jobs ([`Service::jobs`]), long work is a job, and subscribers are notified of every change
//!    before the front end gets the reply.

mod backup;
pub mod claims;
mod clone;
mod disk;
mod image;
mod machine;
mod scrub;
mod send;
mod snapshot;
mod stream;

pub use machine::disks;
pub use send::point_name;

use crate::events::changes;
use crate::jobs::{Jobs, kind};
use crate::message::{DiskRequest, ExportInfo, JobRequest, LabelRequest, Part, Reply, Request, Serving};
use crate::{owner, uri};
use ::disk::pace::Background;
use ::disk::{CheckOptions, Datastore, Location, NoProgress, Progress, Status};
use error::{Error, ErrorKind, Result};
use export::clients::Clients;
use export::nbd;
use std::sync::Arc;

/// The target of a request.
#[derive(Clone)]
pub enum Target {
    /// No datastore: the request is about files.
    Files,
    /// The datastore at a location, through the process that owns it, or opened by this process for one request.
    At(Location),
    /// A datastore that this process has open.
    Open(Service),
}

/// An open datastore with its clients and jobs.
#[derive(Clone)]
pub struct Service {
    /// The datastore.
    pub datastore: Arc<Datastore>,
    /// The location of the datastore.
    pub location: Location,
    /// The NBD clients of this process, or, if it does not serve the datastore, the NBD clients of the process that
    /// served the datastore last.
    pub clients: Arc<Clients>,
    /// The server; `None` if this process does not serve the datastore.
    pub served: Option<Served>,
    /// The jobs of this process; `None` if the datastore is open for one request only.
    pub jobs: Option<Arc<Jobs>>,
}

/// How a datastore is served.
#[derive(Clone)]
pub struct Served {
    /// The NBD server.
    pub nbd: Arc<nbd::Server>,
    /// Information about the server, for replies.
    pub serving: Arc<Serving>,
}

/// Receives progress and partial replies of a request, and reports cancellation.
pub trait Watch: Progress {
    /// Receives the next part of the reply. An error ends the request.
    fn part(&self, part: Part) -> Result<()>;
}

/// For requests that are quick and have their reply in one part.
impl Watch for NoProgress {
    fn part(&self, _: Part) -> Result<()> {
        Err(Error::new(ErrorKind::Invalid, "the server sent a reply in parts, although no parts were requested"))
    }
}

/// Progress of a request whose rate of work follows the latency of clients' requests.
struct Paced<'a> {
    background: Background<'a>,
    watch: &'a dyn Watch,
}

impl Progress for Paced<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(&self.background)
    }
}

impl Watch for Paced<'_> {
    fn part(&self, part: Part) -> Result<()> {
        self.watch.part(part)
    }
}

fn needs_datastore() -> Error {
    Error::new(ErrorKind::Invalid, "this command needs a datastore: give --datastore")
}

/// Carries out a request.
pub fn dispatch(target: &Target, request: Request, watch: &dyn Watch) -> Result<Reply> {
    if let Target::Open(Service { jobs: Some(jobs), .. }) = target
        && let Some(kind) = kind::of(&request)
    {
        return jobs.attached(kind, watch, |watch| carry_out(target, request, watch));
    }
    carry_out(target, request, watch)
}

/// As [`dispatch()`], but without making the request a job.
pub(crate) fn carry_out(target: &Target, request: Request, watch: &dyn Watch) -> Result<Reply> {
    match (request, target) {
        (Request::Machine(request), _) => machine::dispatch(target, *request, watch),
        (Request::Disk(DiskRequest::Resize { name, capacity, shrink, reconnect, tell_machine: true }), _) => {
            machine::resize(target, name, capacity, shrink, reconnect, watch)
        }
        (request, Target::At(location)) if request.needs_datastore() => owner::ask(location, request, watch),
        (request, Target::Open(service)) => {
            let changes = changes::of(&request);
            let reply = service.carry_out(request, watch)?;
            service.publish(|| changes.after(&reply));
            Ok(reply)
        }
        (Request::Backup(request), Target::Files | Target::At(_)) => backup::alone(request, watch),
        (request, Target::Files | Target::At(_)) => image::alone(request, watch),
    }
}

/// Carries out a request about labels.
fn label(datastore: &Datastore, request: LabelRequest) -> Result<Reply> {
    if let LabelRequest::Limit { label, limits } = &request {
        datastore.limit_label(label, limits)?;
    }
    let mut labels = datastore.labels()?;
    if let LabelRequest::Limit { label, .. } = &request {
        labels.retain(|one| one.name == *label);
    }
    Ok(Reply::Labels(labels))
}

impl Service {
    /// Notifies subscribers of changes, if the process has a list of jobs.
    fn publish(&self, changes: impl FnOnce() -> Vec<crate::message::Change>) {
        if let Some(jobs) = &self.jobs {
            jobs.events().publish(changes());
        }
    }

    /// The jobs of this process.
    fn jobs(&self) -> Result<&Arc<Jobs>> {
        let missing = || {
            let at = &self.location;
            let text = format!(
                "datastore '{at}' is not served, and only a server has jobs and events: run 'lamina serve {at}'"
            );
            Error::new(ErrorKind::Unsupported, text)
        };
        self.jobs.as_ref().ok_or_else(missing)
    }

    fn carry_out(&self, request: Request, watch: &dyn Watch) -> Result<Reply> {
        let datastore = &*self.datastore;
        let watch = &Paced { background: datastore.background(watch), watch };
        // Converts the trait object to its supertrait.
        let progress: &dyn Progress = watch;
        // Set here, because every front end sends its requests to this function.
        datastore.refuse_names(claims::refuse_left);
        Ok(match request {
            Request::Status => {
                Reply::Status { status: Box::new(datastore.status()?), serving: self.serving().cloned() }
            }
            Request::StatusSpace => {
                let space = Some(datastore.total_space(progress)?);
                let status = Box::new(Status { space, ..datastore.status()? });
                Reply::Status { status, serving: self.serving().cloned() }
            }
            Request::Check { data, repair } => Reply::Check(datastore.check(CheckOptions { data, repair }, progress)?),
            Request::Scrub(request) => scrub::dispatch(self, request, progress)?,
            Request::Disk(request) => disk::dispatch(self, request, watch)?,
            Request::Label(request) => label(datastore, request)?,
            Request::Snapshot(request) => snapshot::dispatch(self, request, watch)?,
            Request::Clone { disk, at, names, full: false } => {
                Reply::Disks(datastore.clone_linked(&disk, &at, &names, progress)?)
            }
            Request::Clone { disk, at, names, full: true } => clone::full(datastore, &disk, &at, &names, progress)?,
            Request::Convert(conversion) => image::convert(Some(datastore), &conversion, watch)?,
            Request::ExportArchive(export) => Reply::Converted(export.run(datastore, progress)?),
            Request::Image(request) => image::dispatch(request, watch)?,
            Request::Salvage(request) => image::salvage(&request, watch)?,
            // Without a server, each request ends with its process, so no request is left to wait for.
            Request::Settle => Reply::Settled,
            Request::Send(request) => send::send(self, &request, watch)?,
            Request::Receive(request) => send::receive(datastore, request)?,
            Request::Backup(request) => backup::dispatch(self, request, watch)?,
            Request::ExportList => self.exports(),
            Request::Machine(request) => machine::dispatch(&Target::Open(self.clone()), *request, watch)?,
            Request::Job(request) => self.job(request, watch)?,
            Request::Events => self.jobs()?.events().follow(watch)?,
        })
    }

    fn serving(&self) -> Option<&Serving> {
        self.served.as_ref().map(|served| &*served.serving)
    }

    fn exports(&self) -> Reply {
        let serving = self.serving();
        let export = |name: String| ExportInfo {
            read_only: name.contains('@') || serving.is_some_and(|serving| serving.read_only),
            uris: serving.map(|serving| uri::of_export(serving, &name)).unwrap_or_default(),
            name,
        };
        Reply::Exports(self.datastore.device_names().into_iter().map(export).collect())
    }

    fn job(&self, request: JobRequest, watch: &dyn Watch) -> Result<Reply> {
        Ok(match request {
            JobRequest::Start(request) => Reply::Job(self.jobs()?.start(Target::Open(self.clone()), *request)?),
            // A process without a list of jobs returns an empty list.
            JobRequest::List => Reply::Jobs(self.jobs.as_ref().map(|jobs| jobs.list()).unwrap_or_default()),
            JobRequest::Show { id } => Reply::Job(self.jobs()?.show(&id)?),
            JobRequest::Wait { id } => Reply::JobEnded(Box::new(self.jobs()?.wait(&id, watch)?)),
            JobRequest::Cancel { id } => Reply::Job(self.jobs()?.cancel(&id)?),
        })
    }
}
