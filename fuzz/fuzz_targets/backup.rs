//! A backup as a stream from beginning to end, its records, and the index of a pack with the right checksums.

#![no_main]

use backup::{Description, HEAD, Head, LockRecord, Manifest, ReaderRecord, unpack, verify_stream};
use checksums::checksum;
use disk::NoProgress;
use lamina_fuzz::Input;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => {
            let verified = verify_stream(input.0, ("the stream", 0), None, &NoProgress);
            // The pack is encrypted, and the error states that the key is missing.
            if let Ok(verified) = verified {
                assert!(verified.bytes <= input.0.len() as u64);
            }
        }
        1 => {
            if let Ok(description) = Description::decode(input.0) {
                let bytes = description.encode().expect("a decoded record can be encoded");
                assert_eq!(Description::decode(&bytes).expect("an encoded record can be decoded"), description);
            }
            if let Ok(lock) = LockRecord::decode(input.0) {
                let bytes = lock.encode().expect("a decoded record can be encoded");
                assert_eq!(LockRecord::decode(&bytes).expect("an encoded record can be decoded"), lock);
            }
            if let Ok(reader) = ReaderRecord::decode(input.0) {
                let bytes = reader.encode().expect("a decoded record can be encoded");
                assert_eq!(ReaderRecord::decode(&bytes).expect("an encoded record can be decoded"), reader);
            }
            if let Ok(manifest) = Manifest::decode(input.0) {
                let bytes = manifest.encode().expect("a decoded record can be encoded");
                assert_eq!(Manifest::decode(&bytes).expect("an encoded record can be decoded"), manifest);
            }
        }
        _ => {
            let length = input.word(2) as usize;
            let index = input.bytes(length);
            let body = [index, input.0].concat();
            let (first, end) = (0, 1 << 20);
            let head = Head {
                backup: [1; 16],
                number: 0,
                first,
                end,
                index: index.len() as u32,
                body: body.len() as u32,
                body_sum: checksum(&body),
                index_sum: checksum(index),
                sealed: false,
            };
            let head = Head::decode(&head.encode()).expect("a valid head");
            let Ok((decoded, _)) = head.decode_body(&body, None) else { return };
            for chunk in decoded.values().flat_map(|content| &content.chunks) {
                let at = chunk.offset as usize - HEAD;
                if let Ok(plain) = unpack(chunk, &body[at..at + chunk.stored as usize]) {
                    assert_eq!(plain.len(), chunk.blocks() * 4096);
                }
            }
        }
    }
});
