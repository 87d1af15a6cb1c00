//! The text of a descriptor: a text that parses can be written, and parses to the same descriptor.

#![no_main]

use layer::CAPACITY_MAX;
use layer::descriptor::Descriptor;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(descriptor) = Descriptor::parse(data) else { return };
    assert!(descriptor.capacity() <= CAPACITY_MAX);
    let _ = (descriptor.thin(), descriptor.database.get("ddb.adapterType"));
    let Ok(text) = descriptor.to_bytes() else {
        assert!(descriptor.extents.iter().any(|extent| extent.sectors == 0), "a parsed descriptor cannot be written");
        return;
    };
    assert_eq!(Descriptor::parse(&text).expect("a written descriptor can be parsed"), descriptor);
    let mut changed = descriptor.clone();
    let mut number = 7;
    changed.renew_content(&mut || {
        number += 1;
        number
    });
    assert_ne!(changed.content, descriptor.content);
    if let Ok(text) = changed.to_bytes() {
        assert_eq!(Descriptor::parse(&text).expect("a written descriptor can be parsed"), changed);
    }
});
