//! Names of formats as arguments.

use disk::{DeltaFormat, DiskFormat};

/// What a disk is made of.
pub fn parse_format(text: &str) -> Result<DiskFormat, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}

/// What snapshots are made of.
pub fn parse_delta(text: &str) -> Result<DeltaFormat, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}
