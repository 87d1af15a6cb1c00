//! A text is parsed as the definition of a machine and as the record of an image. A value that parsing returns passes
//! the checks, and can be written and parsed again to the same value.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vm::definition::Definition;
use vm::instant::image::Record;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(machine) = Definition::parse(text, "fuzz") {
        machine.check().expect("parsing has checked the definition");
        let written = machine.to_text().expect("a parsed definition can be written");
        assert_eq!(Definition::parse(&written, "fuzz").expect("a written definition can be parsed"), machine);
    }
    if let Ok(record) = Record::parse(text, "fuzz") {
        assert_eq!(record.snapshots.len(), record.machine.disks.len());
    }
});
