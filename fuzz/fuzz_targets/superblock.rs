//! Two arbitrary copies of the superblock of an otherwise undamaged datastore.

#![no_main]

use lamina_fuzz::{Image, Input, options, overwrite, seal};
use libfuzzer_sys::fuzz_target;
use store::Engine;
use store::engine::CheckOptions;

/// The bytes of a superblock that are in use.
const USED: usize = 144;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.u8();
    let disk = if flags & 2 == 0 { Image::closed() } else { Image::crashed() }.restore();
    let directory = disk.directory();
    for copy in 0..2 {
        // Changes single words of the copy, or replaces all of it.
        let file = directory.open("superblock", backend::IoMode::Buffered).expect("the file exists");
        let mut bytes = vec![0; 4096];
        file.read_at(&mut bytes, copy * 4096).expect("the simulated disk has no faults");
        if flags & 4 == 0 {
            for _ in 0..input.u8() % 4 {
                let at = usize::from(input.u8()) % (USED / 8) * 8;
                bytes[at..at + 8].copy_from_slice(&input.word(8).to_le_bytes());
            }
        } else {
            let new = input.bytes(USED);
            bytes[..new.len()].copy_from_slice(new);
        }
        if flags & 1 == 1 {
            seal(&mut bytes, 12);
        }
        overwrite(&directory, "superblock", copy * 4096, &bytes);
    }
    if let Ok(engine) = Engine::open(directory, options()) {
        let _ = engine.check(CheckOptions { data: true, repair: flags & 8 != 0 }, &|_, _| true);
        let _ = engine.close();
    }
});
