//! Code that the tests of several crates share, as a dev-dependency only: seeded random numbers, content that
//! identifies its location, a simple NBD client, running the built program, and file systems for tests.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only tests use this crate")]
#![allow(clippy::unwrap_used, clippy::new_without_default, reason = "a test fails by a panic")]

pub mod authority;
pub mod environment;
pub mod fleet;
pub mod guest;
pub mod history;
pub mod machines;
pub mod mounted;
pub mod nbd;
pub mod newest;
pub mod pattern;
pub mod process;
pub mod protocol;
mod random;
pub mod s3;
pub mod split;
mod steps;

pub use random::Random;
pub use steps::{Steps, steps};
