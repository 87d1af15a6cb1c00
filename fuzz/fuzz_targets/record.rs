//! The body of a batch of operations: operations that decode can be encoded, and decode to the same operations again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use store::journal::{Operation, Reader, Writer};

fn decode(body: &[u8]) -> (Vec<Operation>, bool) {
    let mut reader = Reader::new(body);
    let mut operations = Vec::new();
    loop {
        match reader.next_operation() {
            Ok(Some(operation)) => operations.push(operation),
            Ok(None) => return (operations, true),
            Err(_) => return (operations, false),
        }
    }
}

fn encode(operations: &[Operation]) -> Vec<u8> {
    let mut writer = Writer::default();
    operations.iter().for_each(|operation| writer.push(operation));
    writer.finish().concat()
}

fuzz_target!(|data: &[u8]| {
    let (operations, _) = decode(data);
    let body = encode(&operations);
    assert!(body.len() <= data.len());
    let (again, whole) = decode(&body);
    assert!(whole && encode(&again) == body);
});
