//! What long work tells its owner step by step.

use std::ops::ControlFlow;

/// A step of a piece of long work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// How much of the work is done, in a unit of the work.
    pub done: u64,
    /// All of the work, in the same unit; an estimate that may change.
    pub total: u64,
    /// Bytes read and written since the last step.
    pub moved: u64,
}

/// Told of each step, without a lock that requests need; may wait there to limit the rate. Answers whether to go on.
pub type Watch<'a> = &'a mut dyn FnMut(Step) -> ControlFlow<()>;
