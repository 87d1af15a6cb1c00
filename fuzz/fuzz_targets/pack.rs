//! A pack of compressed blocks, whose index has the right checksum.

#![no_main]

use checksums::checksum;
use lamina_fuzz::Input;
use libfuzzer_sys::fuzz_target;
use store::pack::Pack;

const BLOCK: usize = 4096;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let corrected = input.u8() & 1 == 1;
    let mut bytes = input.0.to_vec();
    bytes.resize(bytes.len().next_multiple_of(BLOCK).max(BLOCK), 0);
    if corrected {
        let end = 16 + 8 * usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
        if end <= bytes.len() {
            bytes[8..12].fill(0);
            let sum = checksum(&bytes[..end]);
            bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let Ok(pack) = Pack::decode(&bytes) else { return };
    let mut out = vec![0; BLOCK];
    for index in 0..257 {
        if let Ok(sums) = pack.read(index..index + 1, &mut out) {
            assert_eq!(sums, [checksum(&out)]);
        }
    }
});
