//! Model checking: every order of steps of a small datastore, breadth first, with power cuts at every point.
//!
//! The model has two disks of two logical blocks on six physical blocks, a snapshot, and trees of two levels. The
//! decisions are made by the engine's own code: [`place`], [`Holds`], [`InFlight`], the names of operations, and
//! `Doubts` of replay. The code around them (buffer, write-back, flush, payload, checkpoint, recovery) is modelled,
//! with one step for each section that the engine runs under its locks.
//!
//! Checked in every state: a read returns the last write to its block. Checked after every power cut and recovery: each
//! block has the value that its disk flushed last or a later value, or a mixture of the sectors of such values. A read
//! never fails, and repeated reads return the same value. A block is not allocated while the durable metadata maps it.
//!
//! Not modelled: thick disks (unwritten extents, reservations), hole punching, reads that delay the reuse of freed
//! blocks, reverting, torn batches of the journal (an append is complete or absent), and failing media.
//!
//! `LAMINA_MODEL_STATES` sets how many states each scenario may visit; `make soak` sets it high.

mod crash;
mod metadata;
mod state;
mod step;

use super::*;
use state::ModelState;
use std::collections::HashSet;
use step::{Action, Fault, Rules};

/// States that each scenario visits unless `LAMINA_MODEL_STATES` is set.
const STATES: usize = 120_000;

/// The initial state of a scenario, and the actions that it tries.
struct Scenario {
    name: &'static str,
    begin: fn() -> ModelState,
    allowed: fn(Action) -> bool,
}

fn everything(_: Action) -> bool {
    true
}

/// Write-back and trees: whether blocks that are or were shared may be overwritten in place.
fn sharing(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(..)
            | Discard(..)
            | Plan(_)
            | Go
            | Finish
            | SyncBegin
            | SyncEnd
            | Append
            | Delete(1 | 2)
            | Drop
            | Crash(_)
    )
}

/// The actions of a scenario with one block of one disk: journal, payload, writes that bypass the buffer, checkpoints.
fn journal(action: Action) -> bool {
    use Action::*;
    !matches!(
        action,
        Write(_, 1) | Discard(..) | Permit(_, 1) | Through(_, 1) | Read(_, 1) | Snapshot | Clone | Delete(_) | Drop
    )
}

/// The actions of a scenario with snapshots, clones and deletions.
fn family(action: Action) -> bool {
    use Action::*;
    !matches!(
        action,
        Permit(..) | Through(..) | Read(..) | Write(_, 1) | Discard(_, 1) | Capture | PayloadBegin(_) | FlushLog
    )
}

/// The actions of a scenario with checkpoints between flushes.
fn checkpoints(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(_, 0)
            | Discard(_, 0)
            | Plan(_)
            | Go
            | Finish
            | FlushLog
            | FlushEnd
            | SyncBegin
            | SyncEnd
            | Append
            | Crash(_)
    ) || matches!(action, Capture | CheckpointEnd | PayloadBegin(_) | PayloadEnd(_))
}

/// The actions of a scenario with journalled payload of a clone. The blocks of the clone are shared and must move.
fn payload(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(0, 0) | Discard(0, 0) | Plan(0) | Go | Finish | FlushLog | FlushEnd | SyncBegin | SyncEnd | Append
    ) || matches!(action, PayloadBegin(_) | PayloadEnd(_) | Crash(_))
}

const SCENARIOS: [Scenario; 9] = [
    Scenario { name: "everything, one disk", begin: ModelState::plain, allowed: everything },
    Scenario { name: "everything, a clone", begin: ModelState::shared, allowed: everything },
    Scenario { name: "everything, a torn block", begin: ModelState::torn, allowed: everything },
    Scenario { name: "sharing", begin: ModelState::shared, allowed: sharing },
    Scenario { name: "sharing, nodes apart", begin: ModelState::divided, allowed: sharing },
    Scenario { name: "payload of a clone", begin: ModelState::shared, allowed: payload },
    Scenario { name: "journal", begin: ModelState::torn, allowed: journal },
    Scenario { name: "family", begin: ModelState::plain, allowed: family },
    Scenario { name: "checkpoints", begin: ModelState::plain, allowed: checkpoints },
];

/// An action, and the state before it.
struct Step {
    before: u32,
    action: Action,
}

struct Outcome {
    states: usize,
    /// All sequences of this many actions were tried.
    depth: usize,
    /// The error, and the actions that led to it.
    violation: Option<(String, Vec<Action>)>,
}

fn explore(scenario: &Scenario, fault: Fault, most: usize) -> Outcome {
    let rules = Rules { fault };
    let begin = (scenario.begin)();
    let mut seen: HashSet<u128> = HashSet::from([begin.key()]);
    let mut steps = vec![Step { before: u32::MAX, action: Action::Append }];
    let mut frontier = vec![(0u32, begin)];
    let mut depth = 0;
    let trace = |steps: &[Step], mut at: u32, last: Action| {
        let mut actions = vec![last];
        while at != 0 {
            actions.push(steps[at as usize].action);
            at = steps[at as usize].before;
        }
        actions.reverse();
        actions
    };
    while !frontier.is_empty() {
        let mut next_frontier = Vec::new();
        for (number, state) in frontier {
            let actions = rules.actions(&state).into_iter().filter(|action| (scenario.allowed)(*action));
            let stepped = actions.filter_map(|action| Some((action, rules.step(&state, action).transpose()?)));
            let crashed = rules.crashes(&state).into_iter().map(|(kept, state)| (Action::Crash(kept), state));
            for (action, outcome) in stepped.chain(crashed) {
                let outcome = outcome.and_then(|state| crash::readable(&state).map(|()| state));
                let next = match outcome {
                    Ok(next) => next,
                    Err(why) => {
                        let violation = Some((why, trace(&steps, number, action)));
                        return Outcome { states: seen.len(), depth, violation };
                    }
                };
                if seen.insert(next.key()) {
                    next_frontier.push((steps.len() as u32, next));
                    steps.push(Step { before: number, action });
                }
            }
            if seen.len() >= most {
                return Outcome { states: seen.len(), depth, violation: None };
            }
        }
        frontier = next_frontier;
        depth += 1;
    }
    Outcome { states: seen.len(), depth, violation: None }
}

fn bound() -> usize {
    let asked = std::env::var("LAMINA_MODEL_STATES").ok();
    asked.map_or(STATES, |text| text.parse().expect("LAMINA_MODEL_STATES is a number of states"))
}

#[test]
fn no_order_of_steps_violates_the_invariants() {
    let mut total = 0;
    for scenario in &SCENARIOS {
        let began = std::time::Instant::now();
        let Outcome { states, depth, violation } = explore(scenario, Fault::None, bound());
        let seconds = began.elapsed().as_secs();
        println!("{}: {states} states, all of {depth} steps, {seconds} s", scenario.name);
        if let Some((why, actions)) = violation {
            panic!("{}: {why}\n{actions:#?}", scenario.name);
        }
        total += states;
    }
    println!("{total} states in all");
}

/// Asserts that a search from `begin` with the `allowed` actions finds the fault.
fn finds(fault: Fault, begin: fn() -> ModelState, allowed: fn(Action) -> bool) {
    let scenario = Scenario { name: "a fault", begin, allowed };
    let Outcome { states, violation, .. } = explore(&scenario, fault, 1_000_000);
    let Some((why, actions)) = violation else { panic!("{fault:?} is not found in {states} states") };
    println!("{fault:?} after {states} states: {why}\n{actions:?}");
}

/// The actions that each test of holds needs in addition to those that the test names.
fn writing_back(action: Action) -> bool {
    use Action::*;
    matches!(action, Plan(_) | Go | Finish | Crash(_))
}

#[test]
fn finds_block_holds_ignored() {
    use Action::Write;
    finds(Fault::BlockHoldsIgnored, ModelState::divided, |action| {
        writing_back(action) || matches!(action, Write(_, 0))
    });
}

#[test]
fn finds_node_holds_ignored() {
    finds(Fault::NodeHoldsIgnored, ModelState::shared, sharing);
}

#[test]
fn finds_holds_that_are_not_passed_to_new_nodes() {
    use Action::{Delete, Discard, Drop, Write};
    finds(Fault::NoSpread, ModelState::shared, |action| {
        writing_back(action) || matches!(action, Discard(0, 0) | Write(0, 1) | Delete(1) | Drop)
    });
}

#[test]
fn finds_permits_that_survive_a_flush() {
    finds(Fault::PermitsSurvive, ModelState::torn, journal);
}

#[test]
fn finds_settlements_that_do_not_hold_their_block() {
    finds(Fault::ResolveNotNamed, ModelState::torn, journal);
}

#[test]
fn finds_payload_written_back_before_its_record() {
    finds(Fault::PayloadHomeEarly, ModelState::plain, checkpoints);
}

#[test]
fn finds_holds_that_end_with_the_first_operation() {
    finds(Fault::ReleaseAlways, ModelState::shared, payload);
}

#[test]
fn finds_overwrites_of_blocks_in_flight() {
    finds(Fault::InFlightIgnored, ModelState::plain, payload);
}

#[test]
fn finds_freed_blocks_reused_at_once() {
    finds(Fault::FreedAtOnce, ModelState::plain, sharing);
}

#[test]
fn finds_freed_blocks_reused_while_payload_refers_to_them() {
    finds(Fault::LimboIgnored, ModelState::plain, payload);
}

#[test]
fn finds_mappings_journalled_before_their_data() {
    finds(Fault::GateIgnored, ModelState::shared, sharing);
}

#[test]
fn finds_captured_changes_that_are_replayed() {
    finds(Fault::CapturedReplayed, ModelState::plain, |action| {
        checkpoints(action) && !matches!(action, Action::PayloadBegin(_))
    });
}

#[test]
fn finds_checkpoints_that_drop_unwritten_payload() {
    finds(Fault::CheckpointLeavesPayload, ModelState::plain, checkpoints);
}
