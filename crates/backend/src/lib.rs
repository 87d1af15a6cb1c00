//! Files as bytes at offsets: the only crate of lamina that accesses storage.
//!
//! The crates above open files by a [`Directory`], and read, write, flush and punch them through [`File`]. For
//! operations that overlap, each thread has a [`Queue`]. A medium must implement only these three traits. Two more
//! traits have the operations that only a local file system supports: [`LocalFile`] (a descriptor, space, the page
//! cache) and [`LocalFolder`] (permissions, files of other programs). For media without them, the methods of `dyn File`
//! and `dyn Directory` have substitutes, so the crates above need neither trait.
//!
//! The traits have three implementations: local files ([`local`]), with queues over io_uring ([`uring`]) or over a
//! thread pool where the kernel or a container forbids io_uring ([`portable`]); a simulated device for tests
//! ([`simulated`]), which drops, tears and reorders unflushed writes; and an [`overlay`], which keeps changes in memory
//! and never writes to the folder below. The overlay has no local part.
//!
//! Guarantees of every implementation, on which code above may rely:
//!
//! 1. A byte written is visible to later reads of the same process at once; it survives power loss only after
//!    [`File::sync`] returned, or when it was written with `durable`.
//! 2. A write interrupted by power loss may persist whole, not at all, or by any subset of its 512-byte sectors.
//! 3. Bytes never written, punched or only reserved read as zeros.
//! 4. After a failed flush the state of the unflushed writes before it is unknown; the caller must stop, not retry.
//! 5. A write to reserved space does not fail with ENOSPC. A file without a local part is allocated by its length: no
//!    write within the length fails with ENOSPC, even after a punch.
//! 6. A lock excludes every other owner until it is released or lost, and its loss can be detected ([`Lock`]). A medium
//!    that can revoke ownership fences the former owner.

mod buffer;
pub mod clock;
mod completions;
mod directory;
pub mod dirty;
mod file;
mod huge;
pub mod local;
pub mod overlay;
pub mod owner;
#[cfg(target_os = "linux")]
pub mod pagemap;
pub mod portable;
pub mod private;
#[cfg(target_os = "linux")]
pub mod process;
mod queue;
pub mod random;
mod readiness;
pub mod regular;
pub mod replace;
pub mod searched;
pub mod simulated;
#[cfg(target_os = "linux")]
pub mod uring;
mod validate;

pub use buffer::{BLOCK_SIZE, Block, Buffer, SharedSlice, release_idle};
pub use completions::{CompletionQueue, InFlight};
pub use directory::{Access, Directory, LocalFolder, Lock, Room};
pub use file::{File, IoMode, LocalFile, LocalPart, Placement};
pub use huge::prefer_huge_pages;
pub use queue::{Completion, QUEUE_DEPTH_MAX, QUEUE_POLLS_MAX, Queue, QueueKind};
