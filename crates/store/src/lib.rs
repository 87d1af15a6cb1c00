//! The native store.
pub mod error;
pub use error::{Error, ErrorKind, IoContext, Result};
