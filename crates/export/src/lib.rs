//! Exports of a datastore: protocols through which block clients reach a [`disk::Device`].
//!
//! An export uses a device and does not know disk formats. [`exports`] lists what can be opened, [`clients`] tracks
//! which clients have it open, [`access`] decides which clients may open what, and [`session`] carries out the requests
//! of one client. A protocol decodes bytes to requests of a session and encodes completions to replies; [`nbd`] is the
//! only one so far.

#![forbid(unsafe_code)]

pub mod access;
pub mod clients;
pub mod exports;
pub mod nbd;
pub mod session;
