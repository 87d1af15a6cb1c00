//! Bytes at offsets: the only part of lamina that touches a medium.
//!
//! The crates above ask for files of a [`Directory`] and read, write, flush and punch them through [`File`]; work that
//! must overlap goes through a per-thread [`Queue`]. A medium has to do no more. What only a local file system can do
//! is in two traits of its own, which a medium may lack: [`LocalFile`] (a descriptor, space, the page cache) and
//! [`LocalFolder`] (permissions, files of other programs). The methods of `dyn File` and `dyn Directory` say what takes
//! their place then; no code above needs either trait.
//!
//! Three implementations stand behind these traits: local files ([`local`]), with queues over io_uring ([`uring`]) or
//! over a thread pool where the kernel or a container forbids io_uring ([`portable`]); and a simulated device for tests
//! ([`simulated`]) that drops, tears and reorders what was not flushed. An [`overlay`] keeps what changes in memory and
//! leaves the folder below alone; it has nothing of a local file system.
//!
//! What every implementation guarantees; code above may rely on no more:
//!
//! 1. A byte written is visible to later reads of the same process at once; it survives power loss only after
//!    [`File::sync`] returned, or when it was written with `durable`.
//! 2. A write interrupted by power loss may persist whole, not at all, or by any subset of its 512-byte sectors.
//! 3. Bytes never written, punched or only reserved read as zeros.
//! 4. After a failed flush nothing is known of the writes before it; the caller must stop, not retry.
//! 5. What was reserved has its space: writing it does not fail with ENOSPC. A file without a local part takes space by
//!    its length, and all of its length has its space, also after it was punched.
//! 6. A lock excludes every other owner until it is given back or lost, and its loss can be seen ([`Lock`]). What can
//!    revoke ownership fences the former owner.

mod buffer;
pub mod clock;
mod completions;
mod directory;
mod file;
pub mod local;
pub mod overlay;
#[cfg(target_os = "linux")]
pub mod pagemap;
pub mod portable;
mod queue;
pub mod random;
mod readiness;
pub mod replace;
pub mod simulated;
#[cfg(target_os = "linux")]
pub mod uring;
mod validate;

pub use buffer::{BLOCK_SIZE, Block, Buffer, SharedSlice, release_idle};
pub use completions::{CompletionQueue, InFlight};
pub use directory::{Access, Directory, LocalFolder, Lock, Room};
pub use file::{File, IoMode, LocalFile, LocalPart, Placement};
pub use queue::{Completion, QUEUE_DEPTH_MAX, QUEUE_POLLS_MAX, Queue, QueueKind};
