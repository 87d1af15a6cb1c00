//! A damaged sparse extent of VMware Workstation: read, written, checked.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{Format, exercise};
use lamina_fuzz::{Input, images};
use layer::hosted::{Hosted, OpenOptions};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let parent = input.u8() & 1 == 0;
    let file = Sectors::read(&mut input, BASES.get_or_init(images::hosted));
    let format = Format {
        open: &|file, writable| {
            Hosted::open(file, &OpenOptions { image: "image".into(), writable, parent, force: false })
        },
        sound: &|layer: &Hosted| layer.check().is_ok_and(|check| check.is_sound()),
        maintain: &|layer, what| match what % 2 {
            0 => drop(layer.descriptor()),
            _ => drop(layer.set_descriptor(b"# Disk DescriptorFile\nversion=1\n")),
        },
        strict: true,
        parent,
    };
    exercise(&file, &mut input, &format);
});
