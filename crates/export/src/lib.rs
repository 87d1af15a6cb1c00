//! Exports of a datastore: protocols through which block clients reach a [`disk::Device`].
//!
//! An export uses a device, and does not depend on disk formats. [`exports`] lists the exports, [`clients`] tracks
//! which clients have them open, [`access`] decides which clients may open them, and [`session`] carries out the
//! requests of one client. A protocol decodes bytes to requests of a session and encodes completions to replies. The
//! only protocol so far is [`nbd`].

#![forbid(unsafe_code)]

pub mod access;
pub mod clients;
pub mod exports;
pub mod nbd;
pub mod session;
