//! Simulates a datastore: random operations, faults and power cuts, all derived from a seed, compared with a model in
//! memory.
//!
//! The engine under test is the real one, on [`backend::simulated`] and without threads. So the seed determines
//! everything, and a failure can be repeated. [`run::SimulationRun`] carries out [`operation::Operation`]s on the
//! datastore and on the [`model::Model`] and compares the results. [`scenario`] makes complete runs, shortens failing
//! ones, and prints how to repeat them.
//!
//! What a run checks:
//!
//! 1. Without a crash, every result equals that of the model.
//! 2. After a power cut or a kill, each sector has the content that was last durable or a later one ([`image`]). The
//!    content found stays the same in later reads and restarts.
//! 3. The disks, snapshots and clones are those from before or from after the interrupted operation.
//! 4. `check` never finds anything.

#![forbid(unsafe_code)]

pub mod image;
pub mod model;
pub mod operation;
pub mod random;
pub mod regime;
pub mod run;
pub mod scenario;
