//! `lamina job`.

use clap::Subcommand;
use control::{JobRequest, Request};

/// Verbs of jobs: long work of the server. A job is cancelled with its client, unless it was started with --background.
#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// List jobs: those under way, and the newest that have ended.
    List,
    /// Show one job.
    Show {
        /// The job, as 'job list' shows it.
        #[arg(value_name = "JOB")]
        id: String,
    },
    /// Wait until a job ends, print its answer and end with its exit code. Interrupting the wait leaves the job alone.
    Wait {
        /// The job.
        #[arg(value_name = "JOB")]
        id: String,
    },
    /// Cancel a job: it undoes what it began. 'job wait' waits for the end of that.
    Cancel {
        /// The job.
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
