//! Migrations from within: the mirror, the layer of a native disk above images, and what opening settles.

#![allow(clippy::unwrap_used)]

mod mirror;
mod native_layer;
mod recover;
