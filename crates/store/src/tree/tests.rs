//! Tests of the tree through its public functions, on a store in memory.
//!
//! | file | what it proves |
//! |---|---|
//! | `memory` | the store of the tests: it asserts the contract of [`NodeStore`](super::NodeStore) at every call |
//! | `model` | random operations on many trees equal ordinary maps; reference counts are exact, no page leaks |
//! | `freed` | the count of what dropping trees would free equals what dropping them frees |
//! | `distinct` | what a set of trees maps, each block counted once |
//! | `packed` | blocks are mapped to packs in every tree that maps them, and overwritten, without a change of content |
//! | `shared` | blocks are replaced by others with the same content in every tree that maps them, and overwritten |
//! | `shape` | fill, depth and the cost of operations |
//! | `damage` | invalid pages are refused; inconsistent trees cause errors, not panics or endless loops |

#![allow(clippy::unwrap_used)]

mod damage;
mod distinct;
mod freed;
mod growth;
mod mapped_packs;
mod memory;
mod model;
mod packed;
mod shape;
mod shared;

use testkit::Random;
