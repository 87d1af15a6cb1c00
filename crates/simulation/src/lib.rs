//! The datastore in a simulated world: random operations, faults and power cuts, all from a seed, judged against a
//! model kept in memory.
//!
//! The engine under test is the real one, on [`backend::simulated`] and without threads, so that a seed decides
//! everything that happens and a failure can be repeated. [`run::SimulationRun`] carries out [`operation::Operation`]s
//! on the datastore and on the [`model::Model`] and compares what both answer; [`scenario`] makes whole runs of them,
//! finds shorter ones that fail as well, and says how to repeat them.
//!
//! What a run demands, in the terms of the model:
//!
//! 1. Every answer is exactly the model's while the machine stands.
//! 2. After a power cut or a kill each sector holds what was last made durable there or something written later
//!    ([`image`]), and what was found stays so, whatever happens next.
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
