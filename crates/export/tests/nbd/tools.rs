//! The clients people use.
