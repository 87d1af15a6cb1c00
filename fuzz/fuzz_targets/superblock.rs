//! Two arbitrary copies of the superblock in front of a datastore that is otherwise whole.

#![no_main]

use lamina_fuzz::{Image, Input, options, overwrite, seal};
use libfuzzer_sys::fuzz_target;
use store::Engine;
use store::engine::CheckOptions;

/// Bytes of a copy that mean something.
const USED: usize = 144;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.u8();
    let disk = if flags & 2 == 0 { Image::closed() } else { Image::crashed() }.restore();
    let directory = disk.directory();
    for copy in 0..2 {
        // Words to change, where the copy as it is, is not wanted whole.
        let file = directory.open("superblock", backend::IoMode::Buffered).expect("it is there");
        let mut bytes = vec![0; 4096];
        file.read_at(&mut bytes, copy * 4096).expect("the medium is whole");
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
