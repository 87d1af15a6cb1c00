//! Chains over mock layers: histories against a plain vector, many threads, failures, crashes, caches.

#![allow(clippy::unwrap_used)]

mod caches;
mod concurrent;
mod crashes;
mod failures;
mod merges;
mod mock;
mod model;
mod random;
mod snapshots;
