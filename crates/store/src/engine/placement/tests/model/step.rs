//! The actions of the model. Each step is what the engine does in one section under its locks.

use super::metadata::*;
use super::state::*;
use super::*;

pub use super::action::{Action, Fault};

/// A description of the error.
pub type Violation = String;

pub struct Rules {
    pub fault: Fault,
}

impl Rules {
    pub fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    pub fn enqueue(&self, state: &mut ModelState, op: Op, gate: u8) {
        let mut effects = Effects::default();
        state.now.apply(op, &mut effects);
        let Effects { freed, unshared: mut held, unshared_nodes, changed_nodes } = effects;
        held.extend(op.names().filter(|_| !(self.has(Fault::ResolveNotNamed) && matches!(op, Op::Resolve { .. }))));
        for block in &held {
            state.holds.hold_block(*block as u64, state.held[*block]);
            state.held[*block] = true;
        }
        if !self.has(Fault::NoSpread) {
            state.holds.spread(&changed_nodes);
        }
        unshared_nodes.into_iter().for_each(|node| state.holds.hold_node(node));
        self.end_watches(state, op, &freed);
        if self.has(Fault::FreedAtOnce) {
            freed.iter().for_each(|block| state.taken[*block] = false);
        }
        let number = state.holds.pushed();
        state.waiting.push_back(Waiting { op, gate, number, joined: false, freed, held });
    }

    /// Appends the first pending operation, if its data is durable. False if there was none to append.
    pub fn append(&self, state: &mut ModelState) -> bool {
        if state.captured == Some(0) {
            state.captured = None;
            state.ordered_next = Some(state.journal.len());
        }
        let ready = |waiting: &Waiting| waiting.gate <= state.synced || self.has(Fault::GateIgnored);
        if !state.waiting.front().is_some_and(ready) {
            return false;
        }
        let Some(waiting) = state.waiting.pop_front() else { return false };
        state.captured = state.captured.map(|left| left - 1);
        state.journal.push(Record { urgent: false, op: waiting.op });
        for block in waiting.held {
            if state.holds.release_block(block as u64, waiting.number) || self.has(Fault::ReleaseAlways) {
                state.held[block] = false;
            }
        }
        state.holds.committed(waiting.number);
        for block in waiting.freed {
            // Payload that is being written to the block may take effect until its write has ended.
            let busy = state.payload_home.is_some() && !self.has(Fault::LimboIgnored);
            state.limbo[block] = busy;
            state.awaits_reader[block] = state.reader.is_some() && !self.has(Fault::ReaderIgnored);
            state.taken[block] = busy || state.awaits_reader[block];
        }
        if waiting.joined {
            self.append(state);
        }
        true
    }

    pub fn placement(&self, state: &ModelState, disk: usize, logical: usize) -> (Placement, usize) {
        let (block, path) = state.now.lookup(disk, logical);
        let Some(block) = block else { return (Placement::New, 0) };
        let shared = |node: &NodeId| {
            state.now.nodes[node.0 as usize].references > 1
                || !self.has(Fault::NodeHoldsIgnored) && state.holds.is_node_held(*node)
        };
        let placement = place(BlockState {
            references: u32::from(state.now.entries[block].references),
            shared_path: path.iter().any(shared) || state.now.entries[block].packed,
            held: state.held[block] && !self.has(Fault::BlockHoldsIgnored),
            in_flight: state.in_flight.contains(block as u64) && !self.has(Fault::InFlightIgnored),
            unwritten: state.now.is_unwritten(disk, logical) && !self.has(Fault::FilledAsOverwrite),
        });
        (placement, block)
    }

    /// Allocates a block; an error if recovery would find the block in use.
    pub fn allocate(state: &mut ModelState) -> Result<Option<usize>, Violation> {
        let usable = |block: &usize| !state.taken[*block] && !state.now.entries[*block].unbacked;
        let Some(block) = (0..BLOCKS).find(usable) else { return Ok(None) };
        let (durable, _) = replay(&state.base, &state.journal, state.ordered, Fault::None);
        if durable.entries[block].references > 0 {
            return Err(format!("block {block} is allocated while the durable metadata maps it"));
        }
        state.taken[block] = true;
        Ok(Some(block))
    }

    /// All actions that are possible in a state, except power cuts.
    pub fn actions(&self, state: &ModelState) -> Vec<Action> {
        use Action::*;
        let mut out = Vec::new();
        let no_batch = state.batch.is_none();
        // Write-back locks the journal from the plan to the announcement.
        let journal_free = state.is_journal_free();
        let unflushed = state.written > state.synced || state.cells.iter().any(|cell| !cell.unflushed.is_empty());
        for disk in (0..DISKS).filter(|disk| state.is_writable(*disk)) {
            for logical in 0..LOGICAL {
                let passing = state.through.is_some_and(|other| (other.disk, other.logical) == (disk, logical));
                if !passing {
                    out.extend([Write(disk, logical), Discard(disk, logical), Read(disk, logical)]);
                }
                if state.through.is_none()
                    && !(disk == 0 && state.closed.is_some())
                    && !state.is_buffered(disk, logical)
                {
                    out.extend([Permit(disk, logical), Through(disk, logical), ThroughPacked(disk, logical)]);
                }
            }
            if no_batch && journal_free && state.oldest(disk).iter().any(Option::is_some) {
                out.extend([Plan(disk), PlanPacked(disk)]);
            }
        }
        match &state.batch {
            Some(batch) if batch.going => out.push(Finish),
            Some(_) => out.push(Go),
            None => {}
        }
        let steps = [
            (ThroughEnd, state.through.is_some()),
            (FlushLog, no_batch && journal_free && state.flush.is_none()),
            (FlushEnd, journal_free && state.flush.as_ref().is_some_and(|flush| state.synced >= flush.wanted)),
            (
                SyncBegin,
                match &state.sync {
                    None => state.through.is_none() && (unflushed || state.checkpoint.is_some()),
                    Some(sync) => sync.half,
                },
            ),
            (SyncEnd, state.sync.as_ref().is_some_and(|sync| !sync.half)),
            (Append, journal_free && (!state.waiting.is_empty() || state.captured == Some(0))),
            (PayloadEnd(false), state.payload_home.is_some()),
            (PayloadEnd(true), state.payload_home.is_some()),
            (Capture, no_batch && journal_free && state.through.is_none() && state.checkpoint.is_none()),
            (CheckpointEnd, journal_free && state.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.synced)),
            (
                Snapshot,
                journal_free
                    && state.through.is_none()
                    && state.closed.is_none()
                    && state.is_writable(0)
                    && state.now.objects[SNAPSHOT].kind == Kind::None
                    && !state.waiting.iter().any(|waiting| matches!(waiting.op, Op::Trash { object: SNAPSHOT })),
            ),
            (
                Clone,
                state.now.objects[SNAPSHOT].kind == Kind::Live
                    && state.now.objects[1].kind == Kind::None
                    && !state.waiting.iter().any(|waiting| matches!(waiting.op, Op::Trash { object: 1 })),
            ),
            (Drop, state.now.objects[TRASH].kind == Kind::Live),
        ];
        out.extend(steps.into_iter().filter(|(_, possible)| *possible).map(|(action, _)| action));
        self.object_changes(state, &mut out);
        self.more_appends(state, &mut out);
        self.reclaims(state, &mut out);
        self.packs(state, &mut out);
        self.shares(state, &mut out);
        self.compares(state, &mut out);
        if state.payload_home.is_none() {
            out.extend((0..BLOCKS).filter(|block| state.now.logged[*block].is_some()).map(PayloadBegin));
        }
        out
    }

    /// The state after an action; `None` if the engine would wait.
    pub fn step(&self, before: &ModelState, action: Action) -> Result<Option<ModelState>, Violation> {
        use Action::*;
        let mut next = before.clone();
        let state = &mut next;
        match action {
            Write(disk, logical) | Discard(disk, logical) => {
                let value = if matches!(action, Write(..)) { state.next_value() } else { 0 };
                if value == 0 && state.expected[disk][logical].last() == Some(&0) {
                    return Ok(None);
                }
                state.open[disk][logical] = Some(value);
                state.write(disk, logical, value);
            }
            Plan(disk) => return self.plan(next, disk, false),
            PlanPacked(disk) => return self.plan(next, disk, true),
            Go => {
                let Some(batch) = &mut state.batch else { return Ok(None) };
                batch.going = true;
                for home in batch.homes.iter().filter(|home| home.placement == Placement::InPlace) {
                    state.announced.get_or_insert(state.journal.len());
                    let op = Op::Overwrite { block: home.block, value: home.value };
                    state.journal.push(Record { urgent: true, op });
                }
                let begun = !std::mem::take(&mut state.appending).is_empty();
                for home in batch.homes.iter().filter(|_| !(begun && self.has(Fault::WritesBeforeAnnouncement))) {
                    state.cells[home.block].unflushed.push(Content::of(home.value));
                }
            }
            Finish => self.finish(state),
            Permit(disk, logical) => {
                let (placement, block) = self.placement(state, disk, logical);
                let journal_free = state.is_journal_free();
                if placement != Placement::InPlace || state.permits[block] || !journal_free {
                    return Ok(None);
                }
                state.journal.push(Record { urgent: true, op: Op::Announce { block } });
                state.permits[block] = true;
            }
            Through(disk, logical) | ThroughPacked(disk, logical) => {
                let (placement, mut block) = self.placement(state, disk, logical);
                let (new, packed) = (placement == Placement::New, matches!(action, ThroughPacked(..)));
                if packed && !new {
                    return Ok(None);
                }
                if new {
                    let Some(free) = Self::allocate(state)? else { return Ok(None) };
                    block = free;
                } else if state.permits[block] {
                    state.in_flight.claim(Run { start: block as u64, blocks: 1 });
                    state.now.logged[block] = None;
                } else {
                    return Ok(None);
                }
                let value = state.next_value();
                state.cells[block].unflushed.push(Content::of(value));
                state.write(disk, logical, value);
                state.through = Some(super::state::Through { disk, logical, block, new, packed, value });
            }
            ThroughEnd => {
                let Some(super::state::Through { disk, logical, block, new, packed, value }) = state.through.take()
                else {
                    return Ok(None);
                };
                state.written += 1;
                let gate = state.written;
                if new {
                    self.map_new(state, packed, (disk, logical), (block, value), gate);
                } else {
                    state.in_flight.release(Run { start: block as u64, blocks: 1 });
                    self.enqueue(state, Op::Checksums { block, value }, gate);
                }
            }
            FlushLog => return self.flush_log(next),
            FlushEnd => {
                let Some(flush) = state.flush.take() else { return Ok(None) };
                while self.append(state) {}
                // From now on a power cut may lose only values written after the flush began.
                for (values, covered) in state.expected.iter_mut().flatten().zip(flush.covers.iter().flatten()) {
                    values.drain(..*covered);
                }
            }
            SyncBegin => self.sync_begin(state),
            SyncEnd => {
                let Some(sync) = state.sync.take() else { return Ok(None) };
                for (cell, covers) in state.cells.iter_mut().zip(sync.covers) {
                    if covers > 0 {
                        cell.durable = cell.unflushed[covers - 1];
                        cell.unflushed.drain(..covers);
                    }
                }
                state.synced = state.synced.max(sync.written);
                if let Some(checkpoint) = state.checkpoint.as_mut().filter(|_| sync.checkpoint) {
                    checkpoint.synced = true;
                }
                if sync.settled > state.settled {
                    state.settled = sync.settled;
                    self.enqueue(state, Op::Synced { position: sync.settled }, 0);
                }
            }
            Append => {
                self.append(state);
            }
            PayloadBegin(block) => {
                let held = state.held[block] && !self.has(Fault::PayloadHomeEarly);
                let Some(value) = state.now.logged[block] else { return Ok(None) };
                if held || state.in_flight.contains(block as u64) {
                    return Ok(None);
                }
                state.in_flight.claim(Run { start: block as u64, blocks: 1 });
                state.cells[block].unflushed.push(Content::of(value));
                state.payload_home = Some((block, value));
            }
            PayloadEnd(late) => {
                let Some((block, value)) = state.payload_home.take() else { return Ok(None) };
                if late && state.cells[block].visible() == Content::of(value) {
                    return Ok(None);
                }
                if late {
                    state.cells[block].unflushed.push(Content::of(value));
                }
                for block in 0..BLOCKS {
                    if std::mem::take(&mut state.limbo[block]) {
                        state.taken[block] = state.awaits_reader[block];
                    }
                }
                if state.in_flight.contains(block as u64) {
                    state.in_flight.release(Run { start: block as u64, blocks: 1 });
                }
                if state.now.logged[block] == Some(value) {
                    state.now.logged[block] = None;
                }
            }
            Capture => {
                state.permits = [false; BLOCKS];
                state.captured = Some(state.waiting.len());
                state.ordered_next = None;
                let base = Metadata { logged: [None; BLOCKS], ..state.now.clone() };
                let (tail, payload) = (state.journal.len(), state.now.logged);
                state.checkpoint = Some(Checkpoint { base, tail, payload, synced: false });
            }
            CheckpointEnd => self.checkpoint_end(state)?,
            Snapshot => {
                state.now.apply(Op::Put, &mut Effects::default());
                state.journal.push(Record { urgent: true, op: Op::Put });
                state.expected[SNAPSHOT] = state.expected[0].clone();
                state.flush.iter_mut().for_each(|flush| flush.covers[SNAPSHOT] = [0; LOGICAL]);
                state.closed = Some(std::mem::take(&mut state.open[0]));
                self.seal_empty(state);
            }
            Clone => {
                state.expected[1] = state.expected[SNAPSHOT].clone();
                state.flush.iter_mut().for_each(|flush| flush.covers[1] = [0; LOGICAL]);
                self.enqueue(state, Op::Clone, 0);
            }
            Delete(_) | Detach | Revert => self.change_object(state, action),
            Drop => self.enqueue(state, Op::Drop, 0),
            Read(disk, logical) => {
                let Some(block) = state.now.lookup(disk, logical).0 else { return Ok(None) };
                let (content, entry) = (state.cells[block].visible(), state.now.entries[block]);
                let settled = state.is_buffered(disk, logical) || state.now.logged[block].is_some();
                if settled || state.in_flight.contains(block as u64) || content == entry.sum || !entry.suspect {
                    return Ok(None);
                }
                self.enqueue(state, Op::Resolve { block, content }, 0);
            }
            AppendBegin | AppendEnd | GoBegin => return Ok(self.append_in_steps(next, action)),
            Look(..) | LookEnd | PunchBegin(_) | Punch | Reserve(_) => return self.reclaim(next, action),
            PackBegin(..) | PackEnd => return self.pack(next, action),
            ShareBegin(..) | ShareEnd => return Ok(self.share(next, action)),
            Repeat(..) | Compare(..) | MapShared => return Ok(self.map_equal(next, action)),
            Crash(_) => return Ok(None),
        }
        Ok(Some(next))
    }

    fn plan(&self, mut next: ModelState, disk: usize, packed: bool) -> Result<Option<ModelState>, Violation> {
        let state = &mut next;
        let mut batch = Batch { disk, going: false, homes: Vec::new(), others: Vec::new() };
        for (logical, value) in state.oldest(disk).into_iter().enumerate() {
            match value {
                Some(0) => batch.others.push(logical),
                Some(value) => {
                    let (placement, mut block) = self.placement(state, disk, logical);
                    if placement == Placement::New {
                        let Some(free) = Self::allocate(state)? else { return Ok(None) };
                        block = free;
                    } else if !state.in_flight.contains(block as u64) {
                        state.in_flight.claim(Run { start: block as u64, blocks: 1 });
                    }
                    batch.homes.push(BlockWrite { logical, placement, block, value, packed });
                }
                None => {}
            }
        }
        for home in batch.homes.iter().filter(|home| home.placement == Placement::InPlace) {
            let checksums =
                |waiting: &Waiting| matches!(waiting.op, Op::Checksums { block, .. } if block == home.block);
            if state.waiting.iter().any(checksums) {
                return Ok(None);
            }
            state.now.logged[home.block] = None;
        }
        state.batch = Some(batch);
        Ok(Some(next))
    }

    /// Maps a new block, or a pack, that was written.
    fn map_new(
        &self,
        state: &mut ModelState,
        packed: bool,
        (disk, logical): (usize, usize),
        (block, value): (usize, Value),
        gate: u8,
    ) {
        let gate = if packed && self.has(Fault::WrittenPackBeforeDurable) { 0 } else { gate };
        let op = match packed {
            true => Op::MapPack { disk, logical, block, value },
            false => Op::Map { disk, logical, block, value },
        };
        self.enqueue(state, op, gate);
        if self.has(Fault::WrittenPackAsPlain) {
            state.now.entries[block].packed = false;
        }
    }

    fn finish(&self, state: &mut ModelState) {
        let Some(batch) = state.batch.take() else { return };
        if !batch.homes.is_empty() {
            state.written += 1;
        }
        let gate = state.written;
        for BlockWrite { logical, placement, block, value, packed } in batch.homes {
            if placement == Placement::InPlace {
                state.now.note(block, Content::of(value));
                // With a deliberate fault, payload that is being written may have claimed the same block.
                if state.in_flight.contains(block as u64) && state.payload_home.is_none_or(|(other, _)| other != block)
                {
                    state.in_flight.release(Run { start: block as u64, blocks: 1 });
                }
            } else if placement == Placement::Fill {
                state.in_flight.release(Run { start: block as u64, blocks: 1 });
                self.enqueue(state, Op::Written { disk: batch.disk, logical, block, value }, gate);
            } else {
                self.map_new(state, packed, (batch.disk, logical), (block, value), gate);
            }
            let entry = &mut state.oldest_mut(batch.disk)[logical];
            *entry = entry.filter(|now| *now != value);
        }
        state.announced = None;
        for logical in batch.others {
            self.discard(state, batch.disk, logical, 0);
            let entry = &mut state.oldest_mut(batch.disk)[logical];
            *entry = entry.filter(|now| *now != 0);
        }
        self.seal_empty(state);
    }

    pub fn seal_empty(&self, state: &mut ModelState) {
        if state.closed.is_some_and(|layer| layer.iter().all(Option::is_none)) {
            state.closed = None;
            self.enqueue(state, Op::Seal, 0);
        }
    }

    fn flush_log(&self, mut next: ModelState) -> Result<Option<ModelState>, Violation> {
        let state = &mut next;
        let mut covers = [[0; LOGICAL]; 3];
        for (object, covers) in covers.iter_mut().enumerate() {
            for (logical, cover) in covers.iter_mut().enumerate() {
                let passing = state.through.is_some_and(|other| (other.disk, other.logical) == (object, logical));
                let written = state.expected[object][logical].len();
                *cover = written.saturating_sub(1 + usize::from(passing));
            }
        }
        for disk in 0..DISKS {
            if !state.is_writable(disk) {
                continue;
            }
            for _ in 0..2 {
                let layer = std::mem::take(state.oldest_mut(disk));
                for (logical, value) in layer.into_iter().enumerate() {
                    let Some(value) = value else { continue };
                    let (block, path) = state.now.lookup(disk, logical);
                    let alone = |block: usize| {
                        state.now.entries[block].references == 1
                            && !state.now.entries[block].packed
                            && path.iter().all(|node| state.now.nodes[node.0 as usize].references == 1)
                    };
                    let gate = state.synced;
                    let op = match block {
                        _ if value == 0 => {
                            self.discard(state, disk, logical, gate);
                            continue;
                        }
                        Some(block) if alone(block) => {
                            if state.now.is_unwritten(disk, logical) {
                                self.enqueue(state, Op::Written { disk, logical, block, value }, gate);
                                let last = state.waiting.back_mut();
                                last.into_iter().for_each(|last| last.joined = !self.has(Fault::JoinsIgnored));
                            }
                            Op::OverwriteData { block, value }
                        }
                        _ => {
                            let Some(block) = Self::allocate(state)? else { return Ok(None) };
                            Op::MapData { disk, logical, block, value }
                        }
                    };
                    self.enqueue(state, op, gate);
                }
                if disk == 0 {
                    self.seal_empty(state);
                }
            }
        }
        state.flush = Some(Flush { wanted: state.written, covers });
        Ok(Some(next))
    }

    fn sync_begin(&self, state: &mut ModelState) {
        let half = state.sync.take();
        let lane_idle = state.batch.is_none();
        let drained = state.checkpoint.as_ref().is_some_and(|checkpoint| {
            let left = |block: usize| {
                checkpoint.payload[block].is_some() && checkpoint.payload[block] == state.now.logged[block]
            };
            !checkpoint.synced && lane_idle && (self.has(Fault::CheckpointLeavesPayload) || !(0..BLOCKS).any(left))
        });
        if half.is_none() {
            state.permits = [false; BLOCKS];
        }
        let now_half = self.has(Fault::PermitsSurvive) && half.is_none();
        let settled = state.journal.len().min(state.announced.unwrap_or(usize::MAX));
        let covers = std::array::from_fn(|block| state.cells[block].unflushed.len());
        state.sync = Some(Sync { settled, written: state.written, covers, checkpoint: drained, half: now_half });
    }

    fn checkpoint_end(&self, state: &mut ModelState) -> Result<(), Violation> {
        while self.append(state) {}
        let Some(checkpoint) = state.checkpoint.take() else { return Ok(()) };
        let Some(ordered) = state.ordered_next.take() else {
            return Err("changes captured by a checkpoint did not become durable".into());
        };
        let tail = checkpoint.tail;
        state.base = checkpoint.base;
        state.journal.drain(..tail);
        state.ordered = if self.has(Fault::CapturedReplayed) { 0 } else { ordered - tail };
        let rebase = |at: &mut usize| *at = at.saturating_sub(tail);
        for record in &mut state.journal {
            if let Op::Synced { position } = &mut record.op {
                rebase(position);
            }
        }
        for waiting in &mut state.waiting {
            if let Op::Synced { position } = &mut waiting.op {
                rebase(position);
            }
        }
        rebase(&mut state.settled);
        state.announced.iter_mut().for_each(rebase);
        state.sync.iter_mut().for_each(|sync| rebase(&mut sync.settled));
        Ok(())
    }
}
