//! Unit tests of migrations: the mirror, live imports and their overlay, arriving disks, recovery, large empty disks,
//! and losses that are reported to clients.

#![allow(clippy::unwrap_used)]

mod arrive;
mod imports;
mod lost;
mod mirror;
mod native_layer;
mod recover;
mod sparse;
