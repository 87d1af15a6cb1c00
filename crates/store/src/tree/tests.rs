//! Tests of the tree, from the outside and on plain memory.
//!
//! | file | what it proves |
//! |---|---|
//! | `memory` | the store the tests run on: it asserts the contract of [`NodeStore`](super::NodeStore) at every call |
//! | `model` | random operations on many trees equal ordinary maps; references are exact, nothing leaks |
//! | `shape` | fill, depth and the cost of operations |
//! | `damage` | impossible pages are refused; contradicting trees end in errors, not in panics or loops |

#![allow(clippy::unwrap_used)]

mod damage;
mod growth;
mod memory;
mod model;
mod shape;

use testkit::Random;
