//! Model checking: every order of steps of a small datastore, breadth first, with power cuts at every point.
//!
//! The model has two disks of two logical blocks on six physical blocks, a snapshot, and trees of two levels. The
//! decisions are made by the engine's own code: [`place`], [`Holds`], [`InFlight`], the names of operations, and
//! `Doubts` of replay. The code around them (buffer, write-back, flush, payload, checkpoint, recovery) is modelled,
//! with one step for each section that the engine runs under its locks.
//!
//! Checked in every state: a read returns the last write to its block. A read that began before this write returns the
//! value at the beginning of the read, or a later value. Checked after every power cut and recovery: each block has the
//! value that its disk flushed last or a later value, or a mixture of the sectors of such values. A read never fails,
//! and repeated reads return the same value. A block is not allocated while the durable metadata maps it. A block does
//! not count as backed while its hole may be punched. The snapshot of a linked clone exists.
//!
//! Not modelled: reservations of thick disks, free space, and failing media.
//!
//! `LAMINA_MODEL_STATES` sets how many states each scenario may visit. With 0, as in `make soak`, there is no limit:
//! the search begins again and again, each time with twice as many states.

mod action;
mod crash;
mod equal;
mod metadata;
mod objects;
mod packing;
mod reclaim;
mod sharing;
mod state;
mod step;
mod thick;
mod torn;

use super::*;
use rustc_hash::FxHashSet;
use state::ModelState;
use step::{Action, Fault, Rules};

/// States that each scenario visits unless `LAMINA_MODEL_STATES` is set: about a minute of one core in all. Of the
/// planted faults below, the one that is found last is found after 150,000 states.
const STATES: usize = 400_000;
/// The number of states of the first search if `LAMINA_MODEL_STATES` is 0.
const FIRST: usize = 2_000_000;
/// Steps that a search can number.
const STEPS: usize = u32::MAX as usize;

/// The initial state of a scenario, and the actions that it tries.
struct Scenario {
    name: &'static str,
    begin: fn() -> ModelState,
    allowed: fn(Action) -> bool,
}

/// Every action, except those that scenarios of their own explore: appends in two steps, and the space of freed blocks.
fn everything(action: Action) -> bool {
    use Action::*;
    !matches!(
        action,
        AppendBegin
            | AppendEnd
            | GoBegin
            | Look(..)
            | LookEnd
            | PunchBegin(_)
            | Punch
            | Reserve(_)
            | PackBegin(..)
            | PackEnd
            | PlanPacked(_)
            | ThroughPacked(..)
            | ShareBegin(..)
            | ShareEnd
            | Repeat(..)
            | Compare(..)
            | MapShared
    )
}

/// The actions of a scenario with appends that a power cut may tear. A write that bypasses the buffer needs no journal,
/// so it can run during an append.
fn torn_appends(action: Action) -> bool {
    use Action::*;
    sharing(action) && action != Append
        || matches!(action, AppendBegin | AppendEnd | GoBegin | Through(_, 0) | ThroughEnd)
}

/// The actions of a scenario with reads of blocks that are freed, punched and used again.
fn freed_blocks(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(0, _)
            | Discard(0, _)
            | Plan(0)
            | Go
            | Finish
            | SyncBegin
            | SyncEnd
            | Append
            | Look(0, _)
            | LookEnd
            | PunchBegin(_)
            | Punch
            | Reserve(_)
            | Crash(_)
    )
}

/// The actions of a scenario with a linked clone that is detached, and a disk that is reverted.
fn origin(action: Action) -> bool {
    use Action::*;
    sharing(action) && !matches!(action, Write(_, 1) | Discard(_, 1)) || matches!(action, Detach | Revert)
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
    everything(action)
        && !matches!(
            action,
            Write(_, 1) | Discard(..) | Permit(_, 1) | Through(_, 1) | Read(_, 1) | Snapshot | Clone | Delete(_) | Drop
        )
}

/// The actions of a scenario with snapshots, clones and deletions.
fn family(action: Action) -> bool {
    use Action::*;
    everything(action)
        && !matches!(
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

/// The actions of a scenario with a thick disk: write-back and payload for blocks that were never written.
fn thick_disk(action: Action) -> bool {
    use Action::*;
    payload(action) && !matches!(action, Write(..) | Discard(..))
        || matches!(action, Write(0, _) | Discard(0, _) | Snapshot | Delete(2) | Drop)
}

const SCENARIOS: [Scenario; 26] = [
    Scenario { name: "everything, one disk", begin: ModelState::plain, allowed: everything },
    Scenario { name: "everything, a clone", begin: ModelState::shared, allowed: everything },
    Scenario { name: "everything, a torn block", begin: ModelState::torn, allowed: everything },
    Scenario { name: "sharing", begin: ModelState::shared, allowed: sharing },
    Scenario { name: "sharing, nodes apart", begin: ModelState::divided, allowed: sharing },
    Scenario { name: "payload of a clone", begin: ModelState::shared, allowed: payload },
    Scenario { name: "journal", begin: ModelState::torn, allowed: journal },
    Scenario { name: "family", begin: ModelState::plain, allowed: family },
    Scenario { name: "checkpoints", begin: ModelState::plain, allowed: checkpoints },
    Scenario { name: "torn appends, one disk", begin: ModelState::plain, allowed: torn_appends },
    Scenario { name: "torn appends, a clone", begin: ModelState::shared, allowed: torn_appends },
    Scenario { name: "reads of freed blocks", begin: ModelState::plain, allowed: freed_blocks },
    Scenario { name: "detach and revert", begin: ModelState::linked, allowed: origin },
    Scenario { name: "packing, one disk", begin: ModelState::plain, allowed: packing::packing },
    Scenario { name: "packing, blocks shared", begin: ModelState::divided, allowed: packing::packing },
    Scenario { name: "equal blocks of one disk", begin: sharing::equal_written, allowed: sharing::sharing },
    Scenario { name: "equal blocks, nodes apart", begin: sharing::equal_divided, allowed: sharing::sharing },
    Scenario { name: "equal blocks with permits", begin: sharing::equal, allowed: sharing::permitted },
    Scenario { name: "equal blocks after payload", begin: sharing::equal_after_payload, allowed: sharing::sharing },
    Scenario { name: "equal blocks, one packed", begin: sharing::equal_packed, allowed: sharing::shared_packs },
    Scenario { name: "packing a shared block", begin: sharing::one_block, allowed: sharing::shared_packs },
    Scenario { name: "equal writes", begin: equal::overwritten, allowed: equal::writing },
    Scenario { name: "equal writes, blocks shared", begin: ModelState::divided, allowed: equal::writing },
    Scenario { name: "equal writes with permits", begin: equal::one_block, allowed: equal::permitted },
    Scenario { name: "equal writes and packs", begin: equal::one_pack, allowed: equal::packed },
    Scenario { name: "a thick disk", begin: ModelState::thick, allowed: thick_disk },
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

/// The states on the path to one step of a search. The search stores only actions, because states are large, and
/// repeats the actions on the path. Consecutive steps have most of their path in common.
struct Path {
    /// Each with the number of the step that led to it.
    states: Vec<(u32, ModelState)>,
}

impl Path {
    /// The state after step `number`.
    fn reach(&mut self, rules: &Rules, steps: &[Step], number: u32) -> &ModelState {
        let (mut missing, mut at) = (Vec::new(), number);
        let known = loop {
            match self.states.iter().rposition(|(known, _)| *known == at) {
                Some(known) => break known,
                None => missing.push(at),
            }
            at = steps[at as usize].before;
        };
        self.states.truncate(known + 1);
        for number in missing.into_iter().rev() {
            let next = again(rules, &self.states[self.states.len() - 1].1, steps[number as usize].action);
            self.states.push((number, next));
        }
        &self.states[self.states.len() - 1].1
    }
}

/// Repeats an action of the search.
fn again(rules: &Rules, state: &ModelState, action: Action) -> ModelState {
    let next = match action {
        Action::Crash(kept) => rules.crashes(state).swap_remove(usize::from(kept)).1.ok(),
        action => rules.step(state, action).ok().flatten(),
    };
    next.expect("the action was possible when the search found it")
}

fn explore(scenario: &Scenario, fault: Fault, most: usize) -> Outcome {
    let rules = Rules { fault };
    let begin = (scenario.begin)();
    let mut seen: FxHashSet<u128> = FxHashSet::from_iter([begin.key()]);
    let mut steps = vec![Step { before: u32::MAX, action: Action::Append }];
    let mut path = Path { states: vec![(0, begin)] };
    let mut frontier = vec![0u32];
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
        for number in frontier {
            let state = path.reach(&rules, &steps, number);
            let actions = rules.actions(state).into_iter().filter(|action| (scenario.allowed)(*action));
            let stepped = actions.filter_map(|action| Some((action, rules.step(state, action).transpose()?)));
            let crashed = rules.crashes(state).into_iter().map(|(kept, state)| (Action::Crash(kept), state));
            for (action, outcome) in stepped.chain(crashed) {
                // Most actions lead to a state that was reached and checked before.
                let checked = match outcome {
                    Ok(next) if !seen.insert(next.key()) => continue,
                    Ok(next) => crash::readable(&next),
                    Err(why) => Err(why),
                };
                if let Err(why) = checked {
                    let violation = Some((why, trace(&steps, number, action)));
                    return Outcome { states: seen.len(), depth, violation };
                }
                next_frontier.push(steps.len() as u32);
                steps.push(Step { before: number, action });
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

/// The limits on the number of states of the searches: one limit, or, if `LAMINA_MODEL_STATES` is 0, limits that
/// double.
fn limits() -> impl Iterator<Item = usize> {
    let asked = std::env::var("LAMINA_MODEL_STATES").ok();
    let asked = asked.map_or(STATES, |text| text.parse().expect("LAMINA_MODEL_STATES is a number of states"));
    let first = if asked == 0 { FIRST } else { asked };
    std::iter::successors(Some(first), move |limit| (asked == 0 && *limit < STEPS / 4).then_some(limit * 2))
}

#[test]
fn no_order_of_steps_violates_the_invariants() {
    for limit in limits() {
        let (mut total, began) = (0, std::time::Instant::now());
        for scenario in &SCENARIOS {
            let began = std::time::Instant::now();
            let Outcome { states, depth, violation } = explore(scenario, Fault::None, limit);
            let seconds = began.elapsed().as_secs();
            println!("{}: {states} states, all of {depth} steps, {seconds} s", scenario.name);
            if let Some((why, actions)) = violation {
                panic!("{}: {why}\n{actions:#?}", scenario.name);
            }
            total += states;
        }
        println!("{total} states in all, {} s", began.elapsed().as_secs());
    }
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

#[test]
fn finds_deletions_that_overtake_a_detachment() {
    use Action::{Append, Crash, Delete, Detach};
    finds(Fault::DeletionOvertakesDetach, ModelState::linked, |action| {
        matches!(action, Detach | Delete(2) | Append | Crash(_))
    });
}

#[test]
fn finds_reverts_that_keep_buffered_writes() {
    use Action::{Revert, Write};
    finds(Fault::RevertKeepsBuffer, ModelState::linked, |action| {
        writing_back(action) || matches!(action, Write(0, 0) | Revert)
    });
}

/// The actions that free a block of disk 0 and write another one, without power cuts.
fn freeing(action: Action) -> bool {
    use Action::*;
    matches!(action, Plan(0) | Go | Finish | Append | Discard(0, _) | Write(0, 1) | Look(0, 0) | LookEnd)
}

#[test]
fn finds_blocks_reused_under_a_reader() {
    finds(Fault::ReaderIgnored, ModelState::plain, freeing);
}

#[test]
fn finds_holes_punched_under_a_reader() {
    use Action::{Punch, PunchBegin, Write};
    finds(Fault::PunchedUnderReader, ModelState::plain, |action| {
        freeing(action) && !matches!(action, Write(..)) || matches!(action, PunchBegin(_) | Punch)
    });
}

#[test]
fn finds_holes_punched_before_their_record() {
    finds(Fault::PunchedBeforeRecord, ModelState::plain, freed_blocks);
}

#[test]
fn finds_appended_changes_that_take_effect_before_they_are_durable() {
    finds(Fault::DoneBeforeDurable, ModelState::plain, torn_appends);
}

#[test]
fn finds_overwrites_that_do_not_wait_for_their_announcement() {
    finds(Fault::WritesBeforeAnnouncement, ModelState::plain, torn_appends);
}

#[test]
fn finds_unwritten_blocks_that_are_overwritten_as_if_they_had_content() {
    finds(Fault::FilledAsOverwrite, ModelState::thick, thick_disk);
}

#[test]
fn finds_payload_that_is_appended_apart_from_the_record_of_its_block() {
    finds(Fault::JoinsIgnored, ModelState::thick, thick_disk);
}

#[test]
fn finds_payload_that_is_left_out_because_of_a_checksum() {
    finds(Fault::PayloadLeftForChecksum, ModelState::plain, journal);
}
