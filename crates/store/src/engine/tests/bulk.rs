//! Bulk writes, which full clones and imports make: they use the free blocks of any region whose table can be read.

use super::unreadable::lose_loaded;
use super::*;
use crate::space::{REGION_BLOCKS, TABLE_ENTRIES};

#[test]
fn a_bulk_write_passes_over_table_entries_that_were_lost_after_their_region_was_loaded() {
    for corrupt in [false, true] {
        let (disk, engine) = with_a_block(3000);
        let copy = add_disk(&engine, "copy", BLOCKS, Provisioning::Thin);
        // The page has the entries of the next free blocks.
        let next = (own_block(&engine, 1, 0).start + 1) / TABLE_ENTRIES;
        let mend = lose_loaded(&disk, &engine, "data.table", next, corrupt);
        BulkWriter::new(&engine, copy).write(0, &slice(7, 64)).unwrap();
        engine.flush().unwrap();
        assert_eq!(engine.failure(), None);
        let head = engine.head(copy);
        let planned = engine.plan_head(&head, 0..1).unwrap();
        let Some(Part::Stored(stored)) = planned.parts.first() else { panic!("corrupt: {corrupt}: not in the file") };
        assert!(stored.block >= REGION_BLOCKS, "corrupt: {corrupt}");
        drop(planned);
        mend();
        engine.load_unreadable();
        let read = engine.read_blocks("copy", 0..64, &|range| engine.plan_head(&head, range)).unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
        is_whole(&engine);
    }
}
