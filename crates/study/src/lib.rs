//! Measures lamina against its peers and against its own limits, from outside.
//!
//! What must hold of a measurement here:
//!
//! 1. The product is driven like any client would drive it: command line and NBD, nothing linked in.
//! 2. What is compared is interleaved run by run on one file system, and the order rotates, so that a noisy neighbour,
//!    a warming CPU or a filling disk meets every side alike. Figures are medians.
//! 3. Every side starts a run from the same state: dirty pages written back, caches warm (buffered) or dropped
//!    (direct).
//! 4. Raw samples are kept beside the verdict, with the machine and the options that made them.
//! 5. Processes and files of a run end with it, also when it fails or is interrupted.
//!
//! The parts: [`plan`] (options and sizes), [`scratch`] (work folder), [`volume`] (a
//! file system larger than the medium), [`process`] (children and interruption), [`nbd`] (a small pipelined client for
//! layouts and latencies), [`fio`] (the load generator), [`peers`] (other servers), [`datastore`] (lamina's command
//! line), [`statistics`], [`report`], [`machine`], [`figures`] (the pages that show kept results), and a module per
//! study in [`bars`].

#![forbid(unsafe_code)]

pub mod bars;
pub mod datastore;
pub mod error;
pub mod figures;
pub mod fio;
pub mod machine;
pub mod nbd;
pub mod peers;
pub mod plan;
pub mod process;
pub mod random;
pub mod report;
pub mod scratch;
pub mod statistics;
pub mod volume;

pub use error::{Error, Result};
