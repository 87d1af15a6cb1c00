//! Tests of chains over mock layers and over the real formats: histories against a plain vector, many threads,
//! failures, crashes, caches.

#![allow(clippy::unwrap_used)]

mod caches;
mod concurrent;
mod crashes;
mod failures;
mod formats;
mod merges;
mod mock;
mod model;
mod objects;
mod snapshots;
