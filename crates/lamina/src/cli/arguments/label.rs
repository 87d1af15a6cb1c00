//! Arguments of the commands about labels.

use crate::cli::size::parse_size;
use clap::Subcommand;
use control::{LabelRequest, Request};
use disk::LimitsChange;

/// Subcommands of `lamina label`.
#[derive(Debug, Subcommand)]
pub enum LabelCommand {
    /// List the labels of disks, with their quotas, reservations and use.
    List,
    /// Limit all disks with a label together, at once and permanently.
    Limit {
        /// The label, such as tenant=a.
        #[arg(value_name = "KEY=VALUE")]
        label: String,
        /// Most space that the disks may map together; 0 for no quota.
        #[arg(long, value_name = "SIZE", value_parser = parse_size, required_unless_present = "reservation")]
        quota: Option<u64>,
        /// Space that the disks can map together whatever other disks write; 0 for no reservation.
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        reservation: Option<u64>,
    },
}

impl LabelCommand {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Label(match self {
            Self::List => LabelRequest::List,
            Self::Limit { label, quota, reservation } => LabelRequest::Limit {
                label: label.clone(),
                limits: LimitsChange { quota: *quota, reservation: *reservation },
            },
        })
    }
}
