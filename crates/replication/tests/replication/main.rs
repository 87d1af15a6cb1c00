//! Two datastores, a sender and a receiver between them, and everything that can come between those.

#![allow(clippy::unwrap_used)]

mod breaks;
mod clones;
mod hostile;
mod identities;
mod site;
