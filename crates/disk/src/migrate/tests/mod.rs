#![allow(clippy::unwrap_used)]

mod mirror;
mod native_layer;
mod recover;
