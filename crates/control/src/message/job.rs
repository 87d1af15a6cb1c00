//! What can be asked of jobs: long work of the process that has the datastore open.

use super::line::Failure;
use super::{Reply, Request};
use serde::{Deserialize, Serialize};

/// Verbs of jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum JobRequest {
    /// Begin a request as a job that goes on when its client has gone.
    Start(Box<Request>),
    /// All jobs, the oldest first.
    List,
    /// One job.
    Show {
        /// Its identity.
        id: String,
    },
    /// Follow a job until it ends. Giving up the wait leaves the job alone.
    Wait {
        /// Its identity.
        id: String,
    },
    /// Have a job stop, and undo what it began.
    Cancel {
        /// Its identity.
        id: String,
    },
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Under way.
    Running,
    /// Done.
    Done,
    /// Ended with an error.
    Failed,
    /// Stopped on request.
    Cancelled,
}

impl JobState {
    /// The word for it.
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
    /// Its identity, unlike that of any job of another run of the server.
    pub id: String,
    /// What is done, in the words of the command line: `disk migrate`.
    pub kind: String,
    /// What it is done to: a disk, a snapshot, a path; empty where it is the datastore.
    pub object: String,
    /// It goes on when its client has gone.
    pub background: bool,
    /// Where it is.
    pub state: JobState,
    /// It was told to stop.
    pub cancelling: bool,
    /// Bytes or objects finished.
    pub done: u64,
    /// Of how many; 0 while that is not known.
    pub total: u64,
    /// When it began, in seconds since 1970.
    pub started: u64,
    /// When it ended.
    pub ended: Option<u64>,
    /// Why it failed.
    pub error: Option<Failure>,
}

/// How a job that was waited for ended well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobEnd {
    /// The job.
    pub job: JobInfo,
    /// What was asked, and the answer; absent where they are too long to be kept.
    pub outcome: Option<(Request, Reply)>,
}
