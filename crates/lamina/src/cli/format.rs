//! Parsers of format names.

use disk::{DeltaFormat, DiskFormat};

/// Parses the format of a disk.
pub fn parse_format(text: &str) -> Result<DiskFormat, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}

/// Parses the format of snapshots.
pub fn parse_delta(text: &str) -> Result<DeltaFormat, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}
