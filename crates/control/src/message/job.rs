//! Requests about jobs: long operations of the process that has the datastore open.

use super::line::Failure;
use super::{Reply, Request};
use serde::{Deserialize, Serialize};

/// Operations on jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum JobRequest {
    /// Start a request as a job that continues when its client disconnects.
    Start(Box<Request>),
    /// All jobs, the oldest first.
    List,
    /// One job.
    Show {
        /// The job's id.
        id: String,
    },
    /// Wait until a job ends. Cancelling the wait does not cancel the job.
    Wait {
        /// The job's id.
        id: String,
    },
    /// Cancel a job, and undo the work of its operation.
    Cancel {
        /// The job's id.
        id: String,
    },
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Running.
    Running,
    /// Succeeded.
    Done,
    /// Failed with an error.
    Failed,
    /// Cancelled.
    Cancelled,
}

impl JobState {
    /// The state's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobInfo {
    /// The job's id, unique across all runs of the server.
    pub id: String,
    /// The command, as on the command line: `disk migrate`.
    pub kind: String,
    /// The object of the operation: a disk, a snapshot or a path; empty for the datastore itself.
    pub object: String,
    /// Whether the job continues when its client disconnects.
    pub background: bool,
    /// The job's state.
    pub state: JobState,
    /// Whether cancelling the job was requested.
    pub cancelling: bool,
    /// Bytes or objects processed so far.
    pub done: u64,
    /// Bytes or objects in total; 0 while unknown.
    pub total: u64,
    /// When the job began, in seconds since 1970.
    pub started: u64,
    /// When the job ended, in seconds since 1970; `None` while it runs.
    pub ended: Option<u64>,
    /// Why the job failed.
    pub error: Option<Failure>,
}

/// The result of waiting for a job that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobEnd {
    /// The job.
    pub job: JobInfo,
    /// The request and its reply; `None` if they are too long to be kept.
    pub outcome: Option<(Request, Reply)>,
}
