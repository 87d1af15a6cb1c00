//! The datastore in a simulated world: random operations, faults and power cuts, all from a seed, compared with a model
//! in memory.
//!
//! The engine under test is the real one, on [`backend::simulated`] and without threads, so that a seed decides
//! everything that happens and a failure can be repeated. [`run::SimulationRun`] performs [`operation::Operation`]s on
//! the datastore and on the [`model::Model`] and compares their results; [`scenario`] makes complete runs of them,
//! finds shorter ones that fail as well, and prints how to repeat them.
//!
//! What a run requires, in the terms of the model:
//!
//! 1. Every result is exactly the model's while the machine runs.
//! 2. After a power cut or a kill each sector has the content last made durable there or one written later ([`image`]),
//!    and the found content stays, whatever happens next.
//! 3. Disks, snapshots and clones are those from before the operation that was interrupted or those from after it.
//! 4. `check` finds nothing, at any time.

#![forbid(unsafe_code)]

pub mod image;
pub mod model;
pub mod operation;
pub mod random;
pub mod regime;
pub mod run;
pub mod scenario;
