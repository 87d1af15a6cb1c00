//! Measures lamina through its public interfaces, and compares it with other servers and with its own limits.
//!
//! Invariants of the measurements:
//!
//! 1. lamina is used through its command line and NBD, as by any client; none of its code is linked.
//! 2. Sides of a comparison alternate run by run on the same file system, in a rotating order, so that other load, a
//!    warming CPU or a filling disk affects all sides alike. Figures are medians.
//! 3. Every side begins a run in the same state: dirty pages are written back, and the side's data is in the page cache
//!    (buffered) or dropped from it (direct).
//! 4. Raw samples are stored with the findings, together with the machine and the options.
//! 5. At the end of a run its processes are ended and its files removed, also if the run fails or is interrupted.
//!
//! Modules: [`plan`] (options and sizes), [`scratch`] (work folder), [`volume`] (a sparse file system larger than the
//! storage), [`process`] (child processes and interruption), [`nbd`] (a small pipelined client for layouts and
//! latencies), [`fio`] (the load generator), [`peers`] (other servers), [`datastore`] (lamina's command line),
//! [`statistics`], [`report`], [`machine`], [`figures`] (the pages of stored results), and a module per study in
//! [`bars`].

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
