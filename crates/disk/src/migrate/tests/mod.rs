//! Unit tests of migrations: the mirror, live imports and their overlay, arriving disks, recovery, and large empty
//! disks.

#![allow(clippy::unwrap_used)]

mod arrive;
mod imports;
mod mirror;
mod native_layer;
mod recover;
mod sparse;
