//! `lamina job`.

use clap::Subcommand;
use control::{JobRequest, Request};

/// Manage jobs: long operations of the server. A job is cancelled when its client disconnects, unless it was started
/// with --background.
#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// List jobs: running ones, and the newest that have ended.
    List,
    /// Show one job.
    Show {
        /// The job's id, as 'job list' shows it.
        #[arg(value_name = "JOB")]
        id: String,
    },
    /// Wait until a job ends, print its result and exit with its exit code. Interrupting the wait does not cancel the
    /// job.
    Wait {
        /// The job's id.
        #[arg(value_name = "JOB")]
        id: String,
    },
    /// Cancel a job and undo its work. 'job wait' waits until the job has ended.
    Cancel {
        /// The job's id.
        #[arg(value_name = "JOB")]
        id: String,
    },
}

impl JobCommand {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Job(match self {
            Self::List => JobRequest::List,
            Self::Show { id } => JobRequest::Show { id: id.clone() },
            Self::Wait { id } => JobRequest::Wait { id: id.clone() },
            Self::Cancel { id } => JobRequest::Cancel { id: id.clone() },
        })
    }
}
