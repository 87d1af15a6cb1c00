//! Transfers between two datastores, and all kinds of interruptions.

#![allow(clippy::unwrap_used)]

mod breaks;
mod clones;
mod hostile;
mod identities;
mod site;
