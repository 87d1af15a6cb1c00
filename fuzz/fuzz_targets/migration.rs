//! The record of a migration, with the right checksum or with the input's: a record that decodes can be written and
//! read back unchanged.

#![no_main]

use backend::IoMode;
use intent::Intents;
use lamina_fuzz::layers::quiet_disk;
use libfuzzer_sys::fuzz_target;

// The modules for migration intents and what these use are private in the crate `disk`, so the target compiles their
// sources.
#[allow(dead_code)]
#[path = "../../crates/disk/src/migrate/intent.rs"]
mod intent;
#[allow(dead_code)]
#[path = "../../crates/disk/src/location.rs"]
mod location;
#[allow(dead_code)]
#[path = "../../crates/disk/src/sealed.rs"]
mod sealed;
#[allow(dead_code)]
#[path = "../../crates/disk/src/spare.rs"]
mod spare;

const NAME: &str = "migration-0f0e0d0c-0b0a-4908-8706-050403020100";

fuzz_target!(|data: &[u8]| {
    let disk = quiet_disk();
    let directory = disk.directory();
    let file = directory.create(NAME, IoMode::Buffered).expect("a new disk accepts new files");
    let bytes = match data.split_first() {
        Some((flags, body)) if flags & 1 == 0 => {
            [format!("lamina migration 1 crc32c={:08x}\n", checksums::checksum(body)).as_bytes(), body].concat()
        }
        Some((_, rest)) => rest.to_vec(),
        None => Vec::new(),
    };
    file.write_at(&[&bytes], 0, false).expect("a new disk accepts writes");
    let intents = Intents::new(directory);
    let Ok((found, damaged)) = intents.all() else { return };
    assert!(damaged.iter().all(|record| record.file == NAME), "a damaged record is named");
    for intent in &found {
        intents.put(intent).expect("a parsed record can be written");
    }
    assert_eq!(intents.all().expect("written records can be read").0, found);
});
