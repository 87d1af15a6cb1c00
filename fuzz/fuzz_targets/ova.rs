//! A damaged archive: its member list, description and manifest, and the disks in it.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{look, quiet_disk};
use lamina_fuzz::{Input, images};
use layer::ova::Ova;
use layer::stream::Stream;
use libfuzzer_sys::fuzz_target;
use std::io::Read;
use std::sync::OnceLock;

/// The most bytes read from one member.
const READ_MAX: u64 = 1 << 20;

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let mut input = Input(data);
    let file = Sectors::read(&mut input, BASES.get_or_init(images::ova));
    let disk = quiet_disk();
    let length = file.length;
    let file = file.write(&disk.directory(), "image");
    let before = disk.operations();
    if let Ok(archive) = Ova::open(file, "image") {
        for member in archive.members() {
            let name = member.name();
            assert!(!name.contains(['/', '\\', '\0']) && !matches!(name, "" | "." | ".."), "{name:?} is no plain name");
            assert!(member.size() <= length, "{name:?} is larger than the archive");
            let mut bytes = Vec::new();
            let _ = archive.reader(name).expect("the archive lists the member").take(READ_MAX).read_to_end(&mut bytes);
        }
        let _ = (archive.descriptor(), archive.machine(), archive.hardware(), archive.warnings());
        for described in archive.disks() {
            let section = archive.file(&described.file).expect("opening found the member");
            if let Ok(layer) = Stream::open(section, "image") {
                look(&layer, &mut input);
            }
        }
        if length < READ_MAX {
            let _ = archive.verify(&mut |_| Ok(()));
        }
    }
    assert_eq!(disk.operations(), before, "opening for reading changed the archive");
});
