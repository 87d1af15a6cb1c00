//! Unit tests of migrations: the mirror, live imports and their overlay, and recovery.

#![allow(clippy::unwrap_used)]

mod imports;
mod mirror;
mod native_layer;
mod recover;
