//! `lamina scrub`.

use crate::cli::interval::{Interval, parse_interval};
use crate::cli::size::parse_rate;
use clap::{Args, Subcommand};
use control::{Request, ScrubRequest};

/// Read all metadata and data of the datastore, to find damage before it is needed.
///
/// With --every, servers of the datastore scrub it at this interval. Clients are not delayed: the rate follows their
/// latency.
#[derive(Debug, Args)]
pub struct ScrubArguments {
    /// Have servers scrub the datastore at this interval, such as 12h, 7d or 4w; 'never' ends the schedule.
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub every: Option<Interval>,

    /// Rate of the scheduled scrubs in bytes per second, such as 50M; 0 for no limit. By default it stays as it is.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, requires = "every")]
    pub rate: Option<u64>,

    /// The operation.
    #[command(subcommand)]
    pub command: Option<ScrubCommand>,
}

/// Operations on scrubs.
#[derive(Debug, Subcommand)]
pub enum ScrubCommand {
    /// Scrub the datastore now. A scrub that was stopped or interrupted is continued.
    Start {
        /// Rate in bytes per second, such as 50M.
        #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
        rate: Option<u64>,
        /// Begin again instead of continuing an interrupted scrub.
        #[arg(long)]
        restart: bool,
    },
    /// Show the state of the scrub, and each damaged place with the disks and snapshots that refer to it.
    Status,
    /// Stop the running scrub. 'scrub start' continues it.
    Cancel,
}

impl ScrubArguments {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let request = match (&self.command, self.every) {
            (Some(_), Some(_)) => return Err("--every sets the schedule, and takes no further command".into()),
            (None, None) => {
                return Err("give --every TIME, or a command: scrub start, scrub status or scrub cancel".into());
            }
            (None, Some(Interval(None))) if self.rate.is_some() => {
                return Err("--every never ends the schedule, so --rate has no effect".into());
            }
            (None, Some(Interval(every))) => ScrubRequest::Schedule { every, rate: self.rate },
            (Some(ScrubCommand::Start { rate, restart }), None) => {
                ScrubRequest::Start { rate: *rate, restart: *restart }
            }
            (Some(ScrubCommand::Status), None) => ScrubRequest::Status,
            (Some(ScrubCommand::Cancel), None) => ScrubRequest::Cancel,
        };
        Ok(Request::Scrub(request))
    }
}
