//! A damaged vsanSparse object, with right or wrong checksums: replayed, read, written, checked.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{Format, exercise};
use lamina_fuzz::{Input, images};
use layer::vsansparse::{OpenOptions, VsanSparse};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let flags = input.u8();
    let mut file = Sectors::read(&mut input, BASES.get_or_init(images::vsansparse));
    if flags & 1 == 0 {
        images::seal_vsansparse(&mut file);
    }
    let parent = flags & 2 == 0;
    let format = Format {
        open: &|file, writable| {
            let options = OpenOptions { writable, parent, cache_bytes: 1 << 16, ..OpenOptions::reading("image") };
            VsanSparse::open(file, &options)
        },
        sound: &|layer: &VsanSparse| layer.check().is_ok_and(|check| check.problem_count == 0),
        maintain: &|layer, _| drop(layer.checkpoint()),
        strict: false,
        parent,
    };
    exercise(&file, &mut input, &format);
});
