//! Unit tests of migrations: the mirror, the overlay of a live import, and recovery.

#![allow(clippy::unwrap_used)]

mod mirror;
mod native_layer;
mod recover;
