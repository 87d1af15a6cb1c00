//! Disks in VMware's formats, from outside: histories against a model, power cuts, folders of other makers.

#![allow(clippy::unwrap_used)]

mod adopting;
mod checks;
mod crashes;
mod failing_operations;
mod full;
mod histories;
mod media;
mod operations;
mod raw;
mod world;
