//! What the tests of several crates share, a dev-dependency only: numbers from a seed, content that tells where it
//! belongs, a plain NBD client, the built program run as a user runs it, and file systems of a test's own.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "read beside the tests")]
#![allow(clippy::unwrap_used, clippy::new_without_default, reason = "a test fails by a panic")]

pub mod authority;
pub mod fleet;
pub mod history;
pub mod machines;
pub mod mounted;
pub mod nbd;
pub mod newest;
pub mod pattern;
pub mod process;
pub mod protocol;
mod random;
mod steps;

pub use random::Random;
pub use steps::{Steps, steps};
