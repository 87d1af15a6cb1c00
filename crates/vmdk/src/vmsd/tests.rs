//! Lists of snapshots.
