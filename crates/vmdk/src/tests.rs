//! Tests of what has no file of its own.
