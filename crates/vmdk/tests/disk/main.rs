//! Disks in VMware's formats, tested from outside: histories against a model, power cuts, adopted folders.

#![allow(clippy::unwrap_used)]

mod adopting;
mod checks;
mod crashes;
mod embedded;
mod failing_operations;
mod full;
mod histories;
mod media;
mod operations;
mod raw;
mod refused_flushes;
mod remains;
mod world;
