//! Requests about scrubs.

use serde::{Deserialize, Serialize};

/// Operations on the scrubs of a datastore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScrubRequest {
    /// Scrub the datastore: continue an interrupted scrub, or begin one.
    Start {
        /// Bytes per second; 0 for no limit. `None` for the rate of the interrupted scrub, or else of the schedule.
        rate: Option<u64>,
        /// Begin again instead of continuing an interrupted scrub.
        restart: bool,
    },
    /// Show the state of scrubs and the list of damage.
    Status,
    /// Stop the running scrub; the next scrub continues it.
    Cancel,
    /// Have servers scrub the datastore at an interval.
    Schedule {
        /// Seconds from the start of a scrub to the start of the next one; `None` for no scrubs.
        every: Option<u64>,
        /// Bytes per second; 0 for no limit. `None` for the rate of the present schedule.
        rate: Option<u64>,
    },
}

impl ScrubRequest {
    /// Whether the request may take long.
    pub fn takes_long(&self) -> bool {
        matches!(self, Self::Start { .. } | Self::Status)
    }
}
