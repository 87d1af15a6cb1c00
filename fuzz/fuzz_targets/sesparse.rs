//! A damaged SEsparse image, with or without a dirty journal: read, replayed, written, wiped, shrunk, checked,
//! repaired.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{Format, exercise};
use lamina_fuzz::{Input, images};
use layer::sesparse::{DirtyJournal, Options, SeSparse};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use work::NoProgress;

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let flags = input.u8();
    let journal = if flags & 1 == 0 { DirtyJournal::Replay } else { DirtyJournal::Refuse };
    let punch = (flags & 2 == 0).then_some(1 << 20);
    let file = Sectors::read(&mut input, BASES.get_or_init(images::sesparse));
    let repair = flags & 4 != 0;
    let format = Format {
        open: &|file, write| SeSparse::open(file, "image", Options { write, journal, cache: 1 << 20, punch, repair }),
        // In an image with findings, a grain without an owner may be used by two blocks of the disk.
        sound: &|layer: &SeSparse| layer.check(false, &NoProgress).is_ok_and(|report| report.is_clean()),
        maintain: &|layer, what| match what % 4 {
            0 => drop(layer.wipe(what & 4 == 0, &NoProgress)),
            1 => drop(layer.shrink(&NoProgress)),
            2 => drop(layer.check(true, &NoProgress)),
            _ => drop(layer.check(false, &NoProgress)),
        },
        strict: false,
        parent: true,
    };
    exercise(&file, &mut input, &format);
});
