//! The space of freed blocks: reads under way that delay the reuse of a block, holes that are punched, and space that
//! is reserved again.

use super::metadata::*;
use super::state::*;
use super::step::{Action, Fault, Rules, Violation};

impl Rules {
    /// Adds what can be done with free blocks, and reads that can begin or end.
    pub fn reclaims(&self, state: &ModelState, out: &mut Vec<Action>) {
        use Action::*;
        match &state.reader {
            Some(_) => out.push(LookEnd),
            None => {
                let disks = (0..DISKS).filter(|disk| state.is_writable(*disk));
                out.extend(disks.flat_map(|disk| (0..LOGICAL).map(move |logical| Look(disk, logical))));
            }
        }
        let free = |block: &usize| !state.taken[*block] && Some(*block) != state.punching;
        match state.punching {
            Some(_) => out.push(Punch),
            None => {
                let read = |block: &usize| self.has(Fault::PunchedUnderReader) && state.awaits_reader[*block];
                let has_content = |block: &usize| ![0, HOLE].contains(&state.cells[*block].visible().0);
                let punched = (0..BLOCKS).filter(|block| (free(block) || read(block)) && has_content(block));
                out.extend(punched.filter(|block| !state.now.entries[*block].unbacked).map(PunchBegin));
            }
        }
        out.extend((0..BLOCKS).filter(|block| free(block) && state.now.entries[*block].unbacked).map(Reserve));
    }

    /// The state after a step that [`Rules::reclaims`] has added; `None` if the engine would wait.
    pub fn reclaim(&self, mut next: ModelState, action: Action) -> Result<Option<ModelState>, Violation> {
        let state = &mut next;
        match action {
            Action::Look(disk, logical) => {
                let Some(block) = state.now.lookup(disk, logical).0 else { return Ok(None) };
                let passing = state.through.is_some_and(|other| (other.disk, other.logical) == (disk, logical));
                // These conditions let the read take the content from memory, or wait for the write.
                let elsewhere = state.is_buffered(disk, logical) || state.now.logged[block].is_some() || passing;
                if elsewhere || state.now.is_unwritten(disk, logical) || state.in_flight.contains(block as u64) {
                    return Ok(None);
                }
                let allowed = state.expected[disk][logical].last().copied().into_iter().collect();
                state.reader = Some(Reader { disk, logical, block, allowed });
            }
            Action::LookEnd => {
                let Some(Reader { disk, logical, block, allowed }) = state.reader.take() else { return Ok(None) };
                let content = state.cells[block].visible();
                if content.0 != content.1 || !allowed.contains(&content.0) {
                    let text = format!("a read of object {disk}, block {logical} finds {content:?}, not {allowed:?}");
                    return Err(text);
                }
                for block in 0..BLOCKS {
                    if std::mem::take(&mut state.awaits_reader[block]) {
                        state.taken[block] = state.limbo[block] || state.punching == Some(block);
                    }
                }
            }
            Action::PunchBegin(block) => {
                state.taken[block] = true;
                state.punching = Some(block);
                self.enqueue(state, Op::Backed { block, backed: false }, 0);
            }
            Action::Punch => {
                let Some(block) = state.punching.take() else { return Ok(None) };
                let pending = state.waiting.iter().any(|waiting| waiting.op == Op::Backed { block, backed: false });
                if pending && !self.has(Fault::PunchedBeforeRecord) {
                    return Ok(None);
                }
                state.cells[block].unflushed.push(Content::of(HOLE));
                state.hole[block] = true;
                state.taken[block] = state.limbo[block] || state.awaits_reader[block];
            }
            Action::Reserve(block) => {
                state.hole[block] = false;
                self.enqueue(state, Op::Backed { block, backed: true }, 0);
            }
            _ => return Ok(None),
        }
        Ok(Some(next))
    }
}
