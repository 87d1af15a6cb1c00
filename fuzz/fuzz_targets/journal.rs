//! A journal ring of arbitrary bytes, read as recovery does.

#![no_main]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, IoMode};
use lamina_fuzz::{Input, seal_batches};
use libfuzzer_sys::fuzz_target;
use store::journal::{Journal, Place, Reader};

const SIZE: usize = 256 * BLOCK_SIZE;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let sealed = input.u8() & 1 == 1;
    let tail = Place { position: input.word(8) & !(BLOCK_SIZE as u64 - 1), sequence: input.word(8) };
    let mut ring = vec![0; SIZE];
    // Pieces of the input at block boundaries, so that small inputs make several batches.
    while !input.is_empty() {
        let at = input.word(1) as usize * BLOCK_SIZE;
        let length = input.word(2) as usize;
        let bytes = input.bytes(length.min(SIZE - at));
        ring[at..at + bytes.len()].copy_from_slice(bytes);
    }
    if sealed {
        seal_batches(&mut ring);
    }
    let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    let file = disk.directory().create("journal", IoMode::Buffered).expect("a new disk accepts new files");
    file.write_at(&[&ring], 0, false).expect("a new disk accepts writes");
    let salt = u64::from_le_bytes(*b"saltsalt");
    let mut journal = Journal::new(file, SIZE as u64, salt, tail);
    let (mut at, mut incarnation) = (tail, 0);
    while let Some(batch) = journal.read(at, incarnation).expect("the simulated disk has no faults") {
        assert!(batch.next > at && batch.incarnation >= incarnation);
        let mut reader = Reader::new(&batch.body);
        while let Ok(Some(_)) = reader.next_operation() {}
        (at, incarnation) = (batch.next, batch.incarnation);
        if at.position - tail.position > SIZE as u64 {
            break;
        }
    }
    let _ = journal.continuation(at, incarnation).expect("the simulated disk has no faults");
    // A batch that is appended at this position must be found at this position.
    if at.position < 1 << 61 && at.sequence < 1 << 61 && incarnation < u64::MAX {
        journal.resume(at, incarnation + 1);
        journal.release(at);
        journal.append(store::journal::BatchKind::Operations, &[b"body"]).expect("an empty ring has space");
        let found = journal
            .read(at, incarnation)
            .expect("the simulated disk has no faults")
            .expect("the appended batch is valid");
        assert_eq!(found.body, b"body");
    }
});
