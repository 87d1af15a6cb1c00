//! The ways out of a datastore: protocols through which block clients reach a [`disk::Device`].
//!
//! An export knows a device and nothing of formats. Today there is one protocol, [`nbd`].

#![forbid(unsafe_code)]

pub mod nbd;
