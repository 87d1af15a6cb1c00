//! A damaged VMFSsparse redo log: read, written, shrunk, checked.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{Format, exercise};
use lamina_fuzz::{Input, images};
use layer::vmfssparse::{OpenOptions, VmfsSparse};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use work::NoProgress;

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let parent = input.u8() & 1 == 0;
    let file = Sectors::read(&mut input, BASES.get_or_init(images::vmfssparse));
    let format = Format {
        open: &|file, writable| {
            VmfsSparse::open(file, &OpenOptions { writable, parent, ..OpenOptions::reading("image") })
        },
        sound: &|layer: &VmfsSparse| layer.check().is_ok_and(|check| check.problem_count == 0),
        maintain: &|layer, _| drop(layer.shrink(&NoProgress)),
        strict: true,
        parent,
    };
    exercise(&file, &mut input, &format);
});
