//! Changes of disks and snapshots as a whole: deletions, detachments, reverts.

use super::metadata::*;
use super::state::*;
use super::step::{Action, Fault, Rules};

impl Rules {
    /// Adds the changes that are possible.
    pub fn object_changes(&self, state: &ModelState, out: &mut Vec<Action>) {
        let of_kind = |object: usize, kind: Kind| state.now.objects[object].kind == kind;
        if state.is_writable(1) && state.now.objects[1].linked {
            out.push(Action::Detach);
        }
        let still = state.batch.is_none() && state.through.is_none() && state.closed.is_none();
        if !still || !of_kind(TRASH, Kind::None) {
            return;
        }
        // A snapshot with a linked clone is not deleted, and a disk that a client reads is neither deleted nor
        // reverted.
        let used = |object: usize| match object {
            SNAPSHOT => of_kind(1, Kind::Live) && state.now.objects[1].linked,
            disk => state.reader.as_ref().is_some_and(|reader| reader.disk == disk),
        };
        let unused = (0..TRASH).filter(|object| of_kind(*object, Kind::Live) && !used(*object));
        out.extend(unused.map(Action::Delete));
        if of_kind(0, Kind::Live) && of_kind(SNAPSHOT, Kind::Live) && !used(0) {
            out.push(Action::Revert);
        }
    }

    pub fn change_object(&self, state: &mut ModelState, action: Action) {
        match action {
            Action::Delete(object) => {
                if object < DISKS {
                    state.open[object] = Layer::default();
                }
                let op = Op::Trash { object };
                if self.has(Fault::DeletionOvertakesDetach) {
                    state.now.apply(op, &mut Effects::default());
                    state.journal.push(Record { urgent: true, op });
                } else {
                    self.enqueue(state, op, 0);
                }
            }
            Action::Revert => {
                if !self.has(Fault::RevertKeepsBuffer) {
                    state.open[0] = Layer::default();
                }
                let [disk, _, snapshot] = &mut state.expected;
                disk.iter_mut().zip(snapshot).for_each(|(values, of_snapshot)| values.extend(of_snapshot.iter()));
                self.enqueue(state, Op::Revert, 0);
            }
            _ => self.enqueue(state, Op::Detach, 0),
        }
    }
}
