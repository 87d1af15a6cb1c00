//! The ways out of a datastore: protocols through which block clients reach a [`disk::Device`].
//!
//! An export knows a device and nothing of formats. [`exports`] says what can be opened, [`clients`] which clients have
//! opened it, [`session`] carries out the requests of one client; a protocol turns a client's bytes into requests of a
//! session and completions into replies. Today there is one, [`nbd`].

#![forbid(unsafe_code)]

pub mod clients;
pub mod exports;
pub mod nbd;
pub mod session;
