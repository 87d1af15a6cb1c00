//! Disks in VMware's formats, from outside: histories against a model, power cuts, folders of other makers.

mod adopting;
mod crashes;
mod histories;
mod operations;
mod world;
