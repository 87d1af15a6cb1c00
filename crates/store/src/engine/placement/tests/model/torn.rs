//! Appends in two steps, between which a power cut leaves the batch complete or torn.
//!
//! Other threads run between the steps, except those that need the journal.

use super::metadata::*;
use super::state::*;
use super::step::{Action, Fault, Rules};
use super::*;

impl Rules {
    /// Adds the appends that can begin or end.
    pub fn more_appends(&self, state: &ModelState, out: &mut Vec<Action>) {
        let (begun, planned) = (!state.appending.is_empty(), state.batch.as_ref().is_some_and(|batch| !batch.going));
        let ready = state.waiting.front().is_some_and(|waiting| waiting.gate <= state.synced);
        match (begun, planned) {
            (true, false) => out.push(Action::AppendEnd),
            (false, false) if ready && state.captured != Some(0) => out.push(Action::AppendBegin),
            (false, true) => out.push(Action::GoBegin),
            _ => {}
        }
    }

    /// The state after a step of an append; `None` if there is nothing to append.
    pub fn append_in_steps(&self, mut next: ModelState, action: Action) -> Option<ModelState> {
        let state = &mut next;
        let early = self.has(Fault::DoneBeforeDurable);
        match action {
            Action::AppendBegin if early => {
                self.append(state);
                state.appending.extend(state.journal.pop());
            }
            Action::AppendBegin => {
                for waiting in &state.waiting {
                    state.appending.push(Record { urgent: false, op: waiting.op });
                    if !waiting.joined {
                        break;
                    }
                }
            }
            Action::AppendEnd if early => state.journal.append(&mut state.appending),
            Action::AppendEnd => {
                state.appending.clear();
                self.append(state);
            }
            _ => {
                let homes = &state.batch.as_ref()?.homes;
                let overwrites = homes.iter().filter(|home| home.placement == Placement::InPlace);
                let op = |home: &BlockWrite| Op::Overwrite { block: home.block, value: home.value };
                state.appending.extend(overwrites.map(|home| Record { urgent: true, op: op(home) }));
                if state.appending.is_empty() {
                    return None;
                }
                // The overwrites count as announced from before the append, so that a flush of the data files that ends
                // meanwhile does not settle them.
                state.announced.get_or_insert(state.journal.len());
                if self.has(Fault::WritesBeforeAnnouncement) {
                    for home in homes {
                        state.cells[home.block].unflushed.push(Content::of(home.value));
                    }
                }
            }
        }
        Some(next)
    }
}
