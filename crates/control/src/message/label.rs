//! Requests about labels of disks.

use disk::LimitsChange;
use serde::{Deserialize, Serialize};

/// Operations on labels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LabelRequest {
    /// All labels of disks, and all labels with limits, each with its limits and its use.
    List,
    /// Change the limits of all disks with a label.
    Limit {
        /// The label as `key=value`.
        label: String,
        /// What to change.
        limits: LimitsChange,
    },
}
