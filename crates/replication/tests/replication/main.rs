//! Transfers between two datastores, and everything that can interrupt them.

#![allow(clippy::unwrap_used)]

mod breaks;
mod clones;
mod hostile;
mod identities;
mod site;
