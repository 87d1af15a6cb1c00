//! A damaged qcow2 image, with and without an external data file.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{look, quiet_disk};
use lamina_fuzz::{Input, images};
use layer::qcow2::{Header, Qcow2};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let with_data = input.u8() & 1 == 1;
    let file = Sectors::read(&mut input, BASES.get_or_init(images::qcow2));
    let disk = quiet_disk();
    let file = file.write(&disk.directory(), "image");
    let before = disk.operations();
    let Ok(header) = Header::read(&*file) else { return };
    let _ = (header.backing(), header.data_file(), header.marked_corrupt());
    // The image file also serves as the data file: the reader reads a data file in the same way.
    let data = (header.external_data() || with_data).then(|| Arc::clone(&file));
    if let Ok(layer) = Qcow2::open(file, data, "image") {
        look(&layer, &mut input);
    }
    assert_eq!(disk.operations(), before, "opening for reading changed the image");
});
