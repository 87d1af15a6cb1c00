//! Unit tests of migrations: the mirror, the overlay of a live import, recovery, and large empty disks.

#![allow(clippy::unwrap_used)]

mod mirror;
mod native_layer;
mod recover;
mod sparse;
