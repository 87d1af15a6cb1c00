//! Power cuts, recovery, and the contents that clients may find in every state.

use super::metadata::*;
use super::state::*;
use super::step::{Fault, Rules, Violation};
use crate::engine::placement::Doubts;

/// What the medium may hold after a power cut.
fn outcomes(state: &ModelState) -> Vec<[Content; BLOCKS]> {
    let mut out = vec![std::array::from_fn(|block| state.cells[block].durable)];
    for block in 0..BLOCKS {
        let contents = state.cells[block].after_crash();
        out = contents
            .into_iter()
            .flat_map(|content| {
                out.iter().map(move |medium: &[Content; BLOCKS]| {
                    let mut medium = *medium;
                    medium[block] = content;
                    medium
                })
            })
            .collect();
    }
    out
}

impl Rules {
    /// The states after a power cut in this state, each with its number.
    pub fn crashes(&self, state: &ModelState) -> Vec<(u16, Result<ModelState, Violation>)> {
        let mut out = Vec::new();
        let whole = (!state.appending.is_empty()).then(|| [&state.journal[..], &state.appending].concat());
        for journal in [Some(&state.journal[..]), whole.as_deref()].into_iter().flatten() {
            let (found, doubts) = replay(&state.base, journal, state.ordered, self.fault);
            for medium in outcomes(state) {
                out.push(recover(state, &found, &doubts, medium, self.fault));
                // A second power cut while recovery writes payload to its blocks.
                for (block, value) in payload_of(&found, &doubts, &medium, self.fault) {
                    let mut again = medium;
                    again[block] = Content(value, medium[block].1);
                    out.push(recover(state, &found, &doubts, again, self.fault));
                }
            }
        }
        (0..).zip(out).collect()
    }
}

fn recover(
    before: &ModelState,
    found: &Metadata,
    doubts: &Doubts,
    mut medium: [Content; BLOCKS],
    fault: Fault,
) -> Result<ModelState, Violation> {
    let mut now = found.clone();
    for (block, value) in payload_of(found, doubts, &medium, fault) {
        medium[block] = Content::of(value);
        now.note(block, Content::of(value));
    }
    now.logged = [None; BLOCKS];
    if now.objects[SNAPSHOT].kind == Kind::Unsealed {
        now.apply(Op::Seal, &mut Effects::default());
    }
    if !now.is_consistent() {
        return Err("references do not match the trees after recovery".into());
    }
    if !now.has_origin() {
        return Err("the snapshot of a linked clone does not exist after recovery".into());
    }
    let unbacked = |block: usize| now.entries[block].references == 0 && now.entries[block].unbacked;
    if let Some(block) = (0..BLOCKS).find(|block| before.hole[*block] && !unbacked(*block)) {
        return Err(format!("after recovery block {block} counts as backed, and is a hole"));
    }
    let mut next =
        ModelState { now, values: before.values, hole: before.hole, thick: before.thick, ..ModelState::default() };
    for (block, content) in medium.into_iter().enumerate() {
        next.taken[block] = next.now.entries[block].references > 0;
        if next.taken[block] {
            next.cells[block].durable = content;
        }
    }
    for object in 0..TRASH {
        if next.now.objects[object].kind == Kind::None {
            continue;
        }
        for logical in 0..LOGICAL {
            let expected = &before.expected[object][logical];
            let Some(content) = next.now.read(object, logical, |block| medium[block]) else {
                return Err(format!("checksum error after recovery: object {object}, block {logical}"));
            };
            if !expected.contains(&content.0) || !expected.contains(&content.1) {
                return Err(format!(
                    "after recovery object {object}, block {logical} holds {content:?}, and may hold {expected:?}"
                ));
            }
            next.expected[object][logical] = vec![content.0];
        }
    }
    rename_torn(&mut next);
    next.base = next.now.clone();
    Ok(next)
}

/// From now on the mixed content of a torn block is a value of its own.
fn rename_torn(state: &mut ModelState) {
    for block in 0..BLOCKS {
        let content = state.cells[block].durable;
        if content.0 == content.1 {
            continue;
        }
        let value = state.next_value();
        state.cells[block].durable = Content::of(value);
        if state.now.entries[block].sum == content {
            state.now.entries[block].sum = Content::of(value);
        }
        for object in 0..TRASH {
            for logical in 0..LOGICAL {
                if state.now.lookup(object, logical).0 == Some(block) && !state.now.is_unwritten(object, logical) {
                    state.expected[object][logical] = vec![value];
                }
            }
        }
    }
}

/// Checks that a client that reads now finds the last write to each block, and no error.
pub fn readable(state: &ModelState) -> Result<(), Violation> {
    if !state.now.is_consistent() {
        return Err("references do not match the trees".into());
    }
    for object in (0..TRASH).filter(|object| state.now.objects[*object].kind == Kind::Live) {
        for logical in 0..LOGICAL {
            let passing = state.through.is_some_and(|other| (other.disk, other.logical) == (object, logical));
            if passing || object < DISKS && state.is_buffered(object, logical) {
                continue;
            }
            let block = state.now.lookup(object, logical).0;
            if block.is_some_and(|block| state.in_flight.contains(block as u64)) {
                continue;
            }
            let last = state.expected[object][logical].last().copied().unwrap_or(0);
            match state.now.read(object, logical, |block| state.cells[block].visible()) {
                None => return Err(format!("checksum error: object {object}, block {logical}")),
                Some(content) if content != Content::of(last) => {
                    return Err(format!("object {object}, block {logical} reads {content:?}, not {last}"));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}
