//! A damaged streamOptimized extent: its index is found at the end or by its markers, and its grains are decompressed.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{look, quiet_disk};
use lamina_fuzz::{Input, images};
use layer::stream::Stream;
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let file = Sectors::read(&mut input, BASES.get_or_init(images::stream));
    let disk = quiet_disk();
    let file = file.write(&disk.directory(), "image");
    let before = disk.operations();
    let whole = Stream::open(Arc::clone(&file), "image").is_ok();
    let layer = Stream::salvage(file, "image");
    assert!(!whole || layer.is_ok(), "opens normally, but not for salvage");
    if let Ok(layer) = layer {
        look(&layer, &mut input);
        let _ = (layer.descriptor(), layer.warnings());
    }
    assert_eq!(disk.operations(), before, "opening for reading changed the image");
});
