//! The control side of a datastore: every verb as a typed request with its reply, and the one place that carries it
//! out.
//!
//! Every verb is a [`Request`]; [`dispatch()`] is the only place that turns one into calls of [`disk::Datastore`] and a
//! [`Reply`]. A face (the command line, the control socket) builds requests and shows replies; none is needed by this
//! crate. The same code runs whether a request is carried out in the process that asks or by the owner of the datastore
//! behind the control socket.
//!
//! ```text
//!  face -> Request -> dispatch --- open in this process ------------------> calls of disk, export, replication
//!                           \ \--- at a location - no server ----> open it, dispatch, close it
//!                            \                \--- its server ---> client ~~~ control socket ~~~ dispatch
//!                             machines: calls of vm in this process, whose disks are requests again
//! ```
//!
//! ```text
//! message    requests, replies, and their encoding as lines
//! dispatch   requests to calls; a file for each noun
//! jobs       long work: listed, waited for and cancelled by other requests
//! events     changes, told to whatever subscribes
//! owner      the process that owns a datastore: found, or become for one request
//! socket     requests of other processes
//! uri        under which URIs clients reach an export
//! ```

#![forbid(unsafe_code)]

mod dispatch;
pub mod events;
pub mod jobs;
pub mod message;
mod owner;
pub mod socket;
pub mod uri;

pub use dispatch::claims::refuse_to_replace;
pub use dispatch::{Served, Service, Target, Watch, disks, dispatch};
pub use message::{
    Change, CloneOptions, Cloned, ClonedMachine, DiskRequest, Event, ExportInfo, Failure, ImageRequest, JobEnd,
    JobInfo, JobRequest, JobState, MachineActivity, MachineInfo, MachineMemory, MachineNotice, MachineReply,
    MachineRequest, MachineSnapshot, MachineSummary, MachineVerb, NewMachine, Part, ReceiveRequest, Reconnect, Reply,
    Request, Resized, SendHow, SendPoint, SendRequest, SendTls, SentDisk, Serving, SnapshotRequest,
};
pub use owner::OPEN_OPTIONS;
