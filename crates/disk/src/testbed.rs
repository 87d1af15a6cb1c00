//! Options of the tests of this crate. The tests in `tests` include this file by its path.

use disk::{OpenOptions, QueueChoice};

/// Options with small caches for opening a datastore.
pub fn options(queue: QueueChoice) -> OpenOptions {
    OpenOptions {
        mode: backend::IoMode::Buffered,
        queue,
        metadata_cache: 16 << 20,
        write_buffer: 8 << 20,
        read_cache: Some(1 << 20),
    }
}
