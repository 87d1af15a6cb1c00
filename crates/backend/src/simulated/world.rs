//! The state shared by all handles of a simulated disk, under one lock: files, names, space, and requested faults.
//!
//! 1. Every operation that changes something calls [`World::begin`] once, before the change. Only these calls count
//!    operations.
//! 2. `used` is the space of the live content of all files that can be reached by name or by handle.
//! 3. A file stays in `files` while a name, a handle, or a durable name that a power cut could restore refers to it; a
//!    flush of the names removes the references of the last kind.

use super::content::{Content, PAGE, Ranges, pages_touched};
use super::unflushed::{Change, Fate, Persistence, Random};
use super::{FAULTS, Fault, Pace, SimulatedOptions};
use crate::Room;
use crate::file::flush_failed;
use crate::validate::check_name;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

pub(super) type FileId = u64;

/// How an operation ends.
pub(super) enum Verdict {
    Proceed,
    /// The operation fails.
    Fail,
    /// The power is cut during the operation.
    Cut,
}

enum NameChange {
    Create { name: String, id: FileId },
    Remove { name: String },
    Rename { from: String, to: String, id: FileId },
}

#[derive(Default)]
pub(super) struct FileState {
    /// The content that reads return.
    pub(super) live: Content,
    persistence: Persistence,
    pub(super) unreadable: Ranges,
    /// Whether another process has the file mapped, so that its pages stay in the page cache.
    mapped: bool,
    named: bool,
    handles: usize,
    locked: bool,
}

impl FileState {
    pub(super) fn flip_bit(&mut self, offset: u64, bit: u8) {
        self.live.flip_bit(offset, bit);
        self.persistence.flip_bit(offset, bit);
    }

    fn reachable(&self) -> bool {
        self.named || self.handles > 0
    }
}

pub(super) struct World {
    pub(super) options: SimulatedOptions,
    pub(super) random: Random,
    pub(super) operations: u64,
    pub(super) cut_after: Option<u64>,
    pub(super) failing: BTreeSet<u64>,
    pub(super) failing_syncs: u32,
    /// The error of failed flushes.
    pub(super) sync_error: Errno,
    /// Requests of each kind that fail, counted from the next one.
    pub(super) failing_requests: [Range<u64>; FAULTS],
    pub(super) off: bool,
    /// Whether operations that change nothing still succeed while `off` is set.
    pub(super) readable: bool,
    pub(super) pace: Option<Pace>,
    /// Bytes by which the reported free space exceeds the actual free space.
    pub(super) overstated: u64,
    /// The error of requests for which there is no space.
    refusal: Errno,
    cached_reads: u64,
    used: u64,
    files: BTreeMap<FileId, FileState>,
    next_id: FileId,
    names: BTreeMap<String, FileId>,
    durable_names: BTreeMap<String, FileId>,
    name_changes: Vec<NameChange>,
}

/// The error for a lack of space: that of a full file system, or of a used-up quota.
fn refusal(seed: u64) -> Errno {
    if seed.is_multiple_of(2) { Errno::NOSPC } else { Errno::DQUOT }
}

impl World {
    pub(super) fn new(seed: u64, options: SimulatedOptions) -> Self {
        Self {
            options,
            random: Random::new(seed),
            operations: 0,
            cut_after: None,
            failing: BTreeSet::new(),
            failing_syncs: 0,
            sync_error: Errno::IO,
            failing_requests: Default::default(),
            off: false,
            readable: false,
            pace: None,
            overstated: 0,
            refusal: refusal(seed),
            cached_reads: 0,
            used: 0,
            files: BTreeMap::new(),
            next_id: 0,
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            name_changes: Vec::new(),
        }
    }

    /// One outcome of cutting the power now.
    pub(super) fn crash(&mut self) -> World {
        (self.off, self.readable) = (true, false);
        let mut random = self.random.fork();
        let fate = Fate::draw(&mut random);
        let mut names = self.durable_names.clone();
        let kept = match fate.keep {
            0 => 0,
            100 => self.name_changes.len(),
            _ => random.below(self.name_changes.len() as u64 + 1) as usize,
        };
        for change in &self.name_changes[..kept] {
            change.apply(&mut names);
        }
        let mut after = World::new(random.next(), self.options.clone());
        after.next_id = self.next_id;
        for &id in names.values() {
            let Some(file) = self.files.get(&id) else { continue };
            let live = file.persistence.after_cut(fate, &mut random);
            after.used += live.space().total() * PAGE;
            let state = FileState {
                persistence: Persistence::settled(live.clone()),
                live,
                unreadable: file.unreadable.clone(),
                named: true,
                ..FileState::default()
            };
            after.files.insert(id, state);
        }
        after.durable_names = names.clone();
        after.names = names;
        after
    }

    /// Takes the machine away from a process that is killed: its handles and locks are gone, and its requests reach
    /// nothing any more. The page cache stays.
    pub(super) fn kill(&mut self) -> World {
        let dead = World { off: true, ..World::new(0, self.options.clone()) };
        let mut after = std::mem::replace(self, dead);
        for id in after.files.keys().copied().collect::<Vec<_>>() {
            after.change_reach(id, |file| (file.handles, file.locked) = (0, false));
        }
        after
    }

    /// Counts a request of this kind; returns whether it fails.
    pub(super) fn does_fail(&mut self, fault: Fault) -> bool {
        let failing = &mut self.failing_requests[fault as usize];
        let Range { start, end } = failing.clone();
        *failing = start.saturating_sub(1)..end.saturating_sub(1);
        start == 0 && end > 0
    }

    /// As [`World::begin`], for a kind of requests that can be made to fail separately.
    fn begin_request(&mut self, fault: Fault) -> io::Result<Verdict> {
        let verdict = self.begin()?;
        Ok(if !matches!(verdict, Verdict::Cut) && self.does_fail(fault) { Verdict::Fail } else { verdict })
    }

    /// The simulated machine in its present state, with a new seed and new options.
    pub(super) fn reseeded(self, seed: u64, options: SimulatedOptions) -> World {
        World { random: Random::new(seed), refusal: refusal(seed), options, ..self }
    }

    /// Counts an operation and decides how it ends.
    pub(super) fn begin(&mut self) -> io::Result<Verdict> {
        if self.off {
            return Err(no_power());
        }
        if self.cut_after.is_some_and(|count| self.operations >= count) {
            self.off = true;
            return Ok(Verdict::Cut);
        }
        let number = self.operations;
        self.operations += 1;
        Ok(if self.failing.remove(&number) { Verdict::Fail } else { Verdict::Proceed })
    }

    /// As [`World::begin`], for flushes.
    fn begin_sync(&mut self) -> io::Result<Verdict> {
        let verdict = self.begin_request(Fault::Sync)?;
        if self.failing_syncs > 0 && !matches!(verdict, Verdict::Cut) {
            self.failing_syncs -= 1;
            return Ok(Verdict::Fail);
        }
        Ok(verdict)
    }

    pub(super) fn check_power(&self) -> io::Result<()> {
        if self.off && !self.readable { Err(no_power()) } else { Ok(()) }
    }

    pub(super) fn file(&mut self, id: FileId) -> io::Result<&mut FileState> {
        self.check_power()?;
        self.files.get_mut(&id).ok_or_else(|| Errno::STALE.into())
    }

    pub(super) fn named(&mut self, name: &str) -> io::Result<&mut FileState> {
        let id = *self.names.get(name).ok_or(Errno::NOENT)?;
        self.files.get_mut(&id).ok_or_else(|| Errno::NOENT.into())
    }

    /// Whether the page cache answers this read of a file.
    pub(super) fn is_cached(&mut self, id: FileId) -> bool {
        self.cached_reads += 1;
        !self.cached_reads.is_multiple_of(3) || self.files.get(&id).is_some_and(|file| file.mapped)
    }

    // Names.

    pub(super) fn open(&mut self, name: &str) -> io::Result<FileId> {
        self.check_power()?;
        check_name(name)?;
        let id = *self.names.get(name).ok_or(Errno::NOENT)?;
        self.file(id)?.handles += 1;
        Ok(id)
    }

    /// A new file, with one handle.
    pub(super) fn create(&mut self, name: &str) -> io::Result<FileId> {
        self.check_power()?;
        check_name(name)?;
        if self.names.contains_key(name) {
            return Err(Errno::EXIST.into());
        }
        let verdict = self.begin()?;
        let id = self.next_id;
        self.next_id += 1;
        let change = NameChange::Create { name: name.to_owned(), id };
        // The file is inserted even if the power is cut in this operation: the name may survive, and refers to it.
        self.files.insert(id, FileState::default());
        self.change_names(change, verdict)?;
        self.file(id)?.handles = 1;
        Ok(id)
    }

    pub(super) fn remove(&mut self, name: &str) -> io::Result<()> {
        self.check_power()?;
        check_name(name)?;
        if !self.names.contains_key(name) {
            return Err(Errno::NOENT.into());
        }
        let verdict = self.begin()?;
        self.change_names(NameChange::Remove { name: name.to_owned() }, verdict)
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.check_power()?;
        check_name(from)?;
        check_name(to)?;
        let id = *self.names.get(from).ok_or(Errno::NOENT)?;
        let verdict = self.begin()?;
        self.change_names(NameChange::Rename { from: from.to_owned(), to: to.to_owned(), id }, verdict)
    }

    fn change_names(&mut self, change: NameChange, verdict: Verdict) -> io::Result<()> {
        match verdict {
            Verdict::Fail => return Err(Errno::IO.into()),
            Verdict::Cut => {
                self.name_changes.push(change);
                return Err(no_power());
            }
            Verdict::Proceed => {}
        }
        let mut touched: Vec<FileId> = Vec::new();
        match &change {
            NameChange::Create { id, .. } => touched.push(*id),
            NameChange::Remove { name } => touched.extend(self.names.get(name)),
            NameChange::Rename { to, id, .. } => {
                touched.extend(self.names.get(to));
                touched.push(*id);
            }
        }
        change.apply(&mut self.names);
        self.name_changes.push(change);
        for id in touched {
            let named = self.names.values().any(|other| *other == id);
            self.change_reach(id, |file| file.named = named);
        }
        Ok(())
    }

    pub(super) fn list(&self) -> io::Result<Vec<String>> {
        self.check_power()?;
        Ok(self.names.keys().cloned().collect())
    }

    pub(super) fn sync_names(&mut self) -> io::Result<()> {
        match self.begin_sync()? {
            Verdict::Proceed => {}
            Verdict::Fail => return Err(flush_failed(self.sync_error.into())),
            Verdict::Cut => return Err(no_power()),
        }
        self.name_changes.clear();
        self.durable_names = self.names.clone();
        self.files.retain(|_, file| file.reachable());
        Ok(())
    }

    pub(super) fn lock(&mut self, name: &str) -> io::Result<FileId> {
        let id = match self.open(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.create(name)?,
            other => other?,
        };
        let file = self.file(id)?;
        if file.locked {
            self.close(id);
            let text = format!("{name} is locked by another owner");
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        file.locked = true;
        Ok(id)
    }

    /// Whether a name refers to this file.
    pub(super) fn leads_to(&self, name: &str, id: FileId) -> io::Result<bool> {
        self.check_power()?;
        Ok(self.names.get(name) == Some(&id))
    }

    pub(super) fn unlock(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(&id) {
            file.locked = false;
        }
        self.close(id);
    }

    /// Releases a handle.
    pub(super) fn close(&mut self, id: FileId) {
        self.change_reach(id, |file| file.handles = file.handles.saturating_sub(1));
    }

    /// Changes the names or handles that refer to a file, and counts the space of the file as used or free accordingly.
    fn change_reach(&mut self, id: FileId, change: impl FnOnce(&mut FileState)) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let was_reachable = file.reachable();
        change(file);
        if was_reachable && !file.reachable() {
            self.used -= file.live.space().total() * PAGE;
            // No power cut can restore a name of the file once the changes of names are flushed.
            if self.name_changes.is_empty() && !self.durable_names.values().any(|other| *other == id) {
                self.files.remove(&id);
            }
        }
    }

    pub(super) fn room(&self) -> io::Result<Room> {
        self.check_power()?;
        let available = self.options.capacity.saturating_sub(self.used) + self.overstated;
        Ok(Room { total: self.options.capacity, available })
    }

    // Contents.

    /// Writes the bytes; `durable` as in `File::write_at`.
    pub(super) fn write(&mut self, id: FileId, offset: u64, bytes: Arc<[u8]>, durable: bool) -> io::Result<()> {
        let verdict = self.begin_request(Fault::Write)?;
        self.check_space(id, offset, bytes.len() as u64)?;
        let change = Change::Write { offset, bytes: Arc::clone(&bytes), forced: false };
        match verdict {
            Verdict::Proceed if durable => {
                let max = self.options.unflushed_max;
                self.change_live(id, &change)?.push_durable(offset, bytes, max);
                Ok(())
            }
            Verdict::Fail => {
                let mut random = self.random.fork();
                for (offset, part) in change.survivors(Fate { keep: 0, tear: 100 }, &mut random) {
                    self.record(id, Change::Write { offset, bytes: part.into(), forced: false })?;
                }
                Err(Errno::IO.into())
            }
            verdict => self.finish(id, change, verdict),
        }
    }

    pub(super) fn set_length(&mut self, id: FileId, length: u64) -> io::Result<()> {
        let verdict = self.begin()?;
        self.finish(id, Change::SetLength(length), verdict)
    }

    pub(super) fn reserve(&mut self, id: FileId, offset: u64, length: u64) -> io::Result<()> {
        let verdict = self.begin_request(Fault::Reserve)?;
        self.check_space(id, offset, length)?;
        self.finish(id, Change::Reserve { offset, length }, verdict)
    }

    pub(super) fn punch(&mut self, id: FileId, offset: u64, length: u64) -> io::Result<()> {
        let verdict = self.begin_request(Fault::Punch)?;
        self.finish(id, Change::Punch { offset, length }, verdict)
    }

    pub(super) fn zero_range(&mut self, id: FileId, offset: u64, length: u64) -> io::Result<()> {
        let verdict = self.begin_request(Fault::Punch)?;
        self.check_space(id, offset, length)?;
        self.finish(id, Change::ZeroRange { offset, length }, verdict)
    }

    pub(super) fn sync(&mut self, id: FileId) -> io::Result<()> {
        let verdict = self.begin_sync()?;
        let mut random = self.random.fork();
        let Some(file) = self.files.get_mut(&id) else { return Err(Errno::STALE.into()) };
        match verdict {
            Verdict::Proceed => {
                file.persistence.flush();
                Ok(())
            }
            Verdict::Fail => {
                let fate = Fate::draw(&mut random);
                file.persistence.flush_failed(fate, &mut random);
                if random.percent(50) {
                    // Half of the time the page cache has lost the data, too.
                    let before = file.live.space().total();
                    file.live = file.persistence.durable().clone();
                    self.used = self.used + file.live.space().total() * PAGE - before * PAGE;
                }
                Err(flush_failed(self.sync_error.into()))
            }
            Verdict::Cut => Err(no_power()),
        }
    }

    /// Drops data that a failed flush did not write from the page cache. Data that waits for its first flush stays.
    pub(super) fn forget_cached(&mut self, id: FileId) -> io::Result<()> {
        let file = self.file(id)?;
        if file.mapped {
            return Ok(());
        }
        let before = file.live.space().total();
        file.live = file.persistence.with_unflushed();
        let after = file.live.space().total();
        self.used = self.used + after * PAGE - before * PAGE;
        Ok(())
    }

    /// A write-back fails whose pages stay in the page cache.
    pub(super) fn lose_writes(&mut self, name: &str) -> io::Result<()> {
        let mut random = self.random.fork();
        let file = self.named(name)?;
        file.persistence.flush_failed(Fate { keep: 0, tear: 0 }, &mut random);
        file.mapped = true;
        Ok(())
    }

    fn finish(&mut self, id: FileId, change: Change, verdict: Verdict) -> io::Result<()> {
        match verdict {
            Verdict::Proceed => self.record(id, change),
            Verdict::Fail => Err(Errno::IO.into()),
            Verdict::Cut => {
                let max = self.options.unflushed_max;
                if let Some(file) = self.files.get_mut(&id) {
                    file.persistence.push(change, max);
                }
                Err(no_power())
            }
        }
    }

    /// Applies a change that is visible now and not durable yet.
    fn record(&mut self, id: FileId, change: Change) -> io::Result<()> {
        let max = self.options.unflushed_max;
        self.change_live(id, &change)?.push(change, max);
        Ok(())
    }

    fn change_live(&mut self, id: FileId, change: &Change) -> io::Result<&mut Persistence> {
        let Some(file) = self.files.get_mut(&id) else { return Err(Errno::STALE.into()) };
        let before = file.live.space().total();
        change.apply(&mut file.live);
        self.used = self.used + file.live.space().total() * PAGE - before * PAGE;
        if let Change::Write { offset, bytes, .. } = change {
            file.unreadable.remove(*offset..*offset + bytes.len() as u64);
        }
        Ok(&mut file.persistence)
    }

    fn check_space(&self, id: FileId, offset: u64, length: u64) -> io::Result<()> {
        let Some(file) = self.files.get(&id) else { return Err(Errno::STALE.into()) };
        let missing = file.live.space().missing(pages_touched(offset, length)).saturating_mul(PAGE);
        if missing > self.options.capacity.saturating_sub(self.used) && missing > 0 {
            return Err(self.refusal.into());
        }
        Ok(())
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, FileId>) {
        match self {
            Self::Create { name, id } => {
                names.insert(name.clone(), *id);
            }
            Self::Remove { name } => {
                names.remove(name);
            }
            Self::Rename { from, to, id } => {
                names.remove(from);
                names.insert(to.clone(), *id);
            }
        }
    }
}

fn no_power() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the simulated machine has no power")
}
