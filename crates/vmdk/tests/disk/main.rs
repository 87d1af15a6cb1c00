//! Disks in VMware's formats, from outside: histories against a model, power cuts, folders of other makers.

#![allow(clippy::unwrap_used)]

mod adopting;
mod crashes;
mod histories;
mod operations;
mod world;
