//! The control interface of a datastore: every operation as a typed request with its reply, and the function that
//! carries out requests.
//!
//! Every operation is a [`Request`]. Only [`dispatch()`] translates a request to calls of [`disk::Datastore`] and
//! returns a [`Reply`]. A front end (the command line, the control socket) builds requests and shows replies. This
//! crate depends on no front end. The same code runs whether a request is carried out in the requesting process or,
//! through the control socket, by the owner of the datastore.
//!
//! ```text
//!  front end -> Request -> dispatch --- open in this process ------------> calls of disk, export, backup ...
//!                           \ \--- at a location - no server ----> open it, dispatch, close it
//!                            \                \--- its server ---> client ~~~ control socket ~~~ dispatch
//!                             machines: calls of vm in this process, which accesses disks by requests
//! ```
//!
//! ```text
//! message    requests, replies, and their encoding as lines
//! dispatch   from requests to calls; a file for each group
//! jobs       long operations: listed, waited for and cancelled by other requests
//! events     notifications of changes to subscribers
//! scrubs     starts scrubs of a served datastore when they are due
//! idle       compresses data of disks whose settings say so, when it was not written for a while
//! owner      the process that owns a datastore: an existing one, or this one for one request
//! socket     requests of other processes
//! uri        URIs by which clients reach an export
//! ```

#![forbid(unsafe_code)]

mod dispatch;
pub mod events;
pub mod idle;
pub mod jobs;
pub mod message;
mod owner;
pub mod scrubs;
pub mod socket;
pub mod uri;

pub use dispatch::claims::{refuse_left, refuse_to_replace};
pub use dispatch::{Served, Service, Target, Watch, disks, dispatch};
pub use message::{
    BackedUpMachine, BackupCreate, BackupMachine, BackupPlace, BackupRequest, BackupRestore, Change, CloneOptions,
    Cloned, ClonedMachine, DiskRequest, Event, ExportInfo, Failure, ImageRequest, ImportedMachine, JobEnd, JobInfo,
    JobRequest, JobState, LabelRequest, MachineActivity, MachineBackup, MachineImport, MachineInfo, MachineMemory,
    MachineNotice, MachineReply, MachineRequest, MachineRestore, MachineSnapshot, MachineSummary, MachineVerb,
    NewMachine, Part, ReceiveRequest, Reclaimable, Reconnect, Reply, Request, Resized, RestoredMachine, ScrubRequest,
    SendHow, SendPoint, SendRequest, SendTls, SentDisk, Serving, SnapshotRequest,
};
pub use owner::{OPEN_OPTIONS, open_to_serve};
