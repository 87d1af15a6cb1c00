//! A medium in memory without a local part: the smallest medium on which an engine runs.
//!
//! 1. Its queues complete later, out of order, on a thread of the medium.
//! 2. Its locks are leases, which the medium may revoke ([`MemoryMedium::revoke`]): the former owner is notified and
//!    fenced, and loses its unflushed writes.
//! 3. Files have no local part: they are allocated by their length.

use backend::{
    BLOCK_SIZE, Buffer, Completion, CompletionQueue, Directory, File, InFlight, IoMode, Lock, Queue, QueueKind, Room,
    SharedSlice,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use testkit::Random;

/// The capacity for all files together, in bytes.
const CAPACITY: u64 = 4 << 30;
/// How long an operation waits for later operations that may overtake it.
const LATER: Duration = Duration::from_micros(20);
/// The most operations that wait at a time.
const WAITING_MAX: usize = 16;

const BLOCK: u64 = BLOCK_SIZE as u64;
type Page = [u8; BLOCK_SIZE];

/// The medium. Each of its directories is the session of one owner.
pub struct MemoryMedium {
    pool: Arc<Pool>,
    operations: Sender<Operation>,
}

#[derive(Default)]
struct Pool {
    state: Mutex<MediumState>,
    /// Operations that were performed before an older one.
    overtaken: AtomicU64,
}

#[derive(Default)]
struct MediumState {
    files: Vec<Content>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// Number of changes of any kind so far.
    changes: u64,
    sessions: u64,
    fenced: BTreeSet<u64>,
    leases: u64,
    /// Leases that are held, by the file that they lock.
    held: BTreeMap<usize, Lease>,
    revoked: BTreeSet<u64>,
    watchers: Vec<(u64, Box<dyn FnOnce() + Send>)>,
}

#[derive(Clone, Copy)]
struct Lease {
    number: u64,
    session: u64,
}

#[derive(Default)]
struct Content {
    length: u64,
    pages: BTreeMap<u64, Box<Page>>,
    durable_length: u64,
    /// The flushed content of the pages that changed since the last flush.
    unflushed: BTreeMap<u64, Option<Box<Page>>>,
}

impl Content {
    fn page(&mut self, number: u64) -> &mut Page {
        let Self { pages, unflushed, .. } = self;
        unflushed.entry(number).or_insert_with(|| pages.get(&number).cloned());
        pages.entry(number).or_insert_with(|| Box::new([0; BLOCK_SIZE]))
    }

    fn read(&self, buffer: &mut [u8], offset: u64) {
        for (at, byte_range) in parts(offset, buffer.len()) {
            let out = &mut buffer[byte_range];
            match self.pages.get(&(at / BLOCK)) {
                Some(page) => out.copy_from_slice(&page[(at % BLOCK) as usize..][..out.len()]),
                None => out.fill(0),
            }
        }
    }

    fn write(&mut self, bytes: &[u8], offset: u64) {
        for (at, byte_range) in parts(offset, bytes.len()) {
            let part = &bytes[byte_range];
            self.page(at / BLOCK)[(at % BLOCK) as usize..][..part.len()].copy_from_slice(part);
        }
        self.length = self.length.max(offset + bytes.len() as u64);
    }

    fn zero(&mut self, offset: u64, end: u64) {
        for (at, range) in parts(offset, (end.max(offset) - offset) as usize) {
            if self.pages.contains_key(&(at / BLOCK)) {
                self.page(at / BLOCK)[(at % BLOCK) as usize..][..range.len()].fill(0);
            }
        }
    }

    fn flush(&mut self) {
        self.unflushed.clear();
        self.durable_length = self.length;
    }

    /// Restores the flushed content.
    fn lose_unflushed(&mut self) {
        for (number, before) in std::mem::take(&mut self.unflushed) {
            match before {
                Some(page) => drop(self.pages.insert(number, page)),
                None => drop(self.pages.remove(&number)),
            }
        }
        self.length = self.durable_length;
    }
}

/// The parts of a range that lie in one page each: where in the file, and which bytes of the range.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let part = (length - done).min((BLOCK - at % BLOCK) as usize);
        done += part;
        (part > 0).then(|| (at, done - part..done))
    })
}

impl MediumState {
    fn taken(&self) -> u64 {
        self.names.values().map(|file| self.files[*file].length).sum()
    }

    /// Fails unless there is space for a file of this length.
    fn make_room(&self, file: usize, length: u64) -> io::Result<()> {
        let more = length.saturating_sub(self.files[file].length);
        if more > CAPACITY.saturating_sub(self.taken()) { Err(ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn find(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn create(&mut self, name: &str) -> io::Result<usize> {
        if self.names.contains_key(name) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        self.files.push(Content::default());
        self.names.insert(name.to_owned(), self.files.len() - 1);
        Ok(self.files.len() - 1)
    }
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, MediumState> {
        self.state.lock().unwrap()
    }

    /// Locks the state for a change; fails for a session that lost its lease.
    fn change(&self, session: u64) -> io::Result<MutexGuard<'_, MediumState>> {
        let mut state = self.state();
        if state.fenced.contains(&session) {
            return Err(io::Error::new(ErrorKind::PermissionDenied, "the medium has revoked the lease of this owner"));
        }
        state.changes += 1;
        Ok(state)
    }
}

impl MemoryMedium {
    pub fn new(seed: u64) -> Self {
        let pool = Arc::new(Pool::default());
        let (operations, pushed) = channel();
        let served = Arc::clone(&pool);
        // The thread ends with the last directory.
        std::thread::spawn(move || serve(&pushed, &mut Random::new(seed), &served.overtaken));
        Self { pool, operations }
    }

    /// Opens a session for another owner.
    pub fn connect(&self) -> Arc<dyn Directory> {
        let mut state = self.pool.state();
        state.sessions += 1;
        let (pool, operations) = (Arc::clone(&self.pool), self.operations.clone());
        Arc::new(Session { pool, operations, number: state.sessions })
    }

    /// Revokes the leases of all owners. From then on no operation of theirs changes the medium.
    pub fn revoke(&self) {
        self.lapse().into_iter().for_each(|lost| lost());
    }

    /// As [`Self::revoke`], without notifying the owners: they detect the loss when they call `loss`, or when an
    /// operation is refused. The returned functions notify them.
    pub fn lapse(&self) -> Vec<Box<dyn FnOnce() + Send>> {
        let mut state = self.pool.state();
        for lease in std::mem::take(&mut state.held).into_values() {
            state.fenced.insert(lease.session);
            state.revoked.insert(lease.number);
        }
        state.files.iter_mut().for_each(Content::lose_unflushed);
        state.names = state.durable_names.clone();
        std::mem::take(&mut state.watchers).into_iter().map(|(_, lost)| lost).collect()
    }

    /// Number of changes so far, flushes included, without those refused by a fence.
    pub fn changes(&self) -> u64 {
        self.pool.state().changes
    }

    /// Number of operations of queues that were performed before one that was pushed earlier.
    pub fn overtaken(&self) -> u64 {
        self.pool.overtaken.load(Ordering::Relaxed)
    }
}

struct Session {
    pool: Arc<Pool>,
    operations: Sender<Operation>,
    number: u64,
}

fn check_name(name: &str) -> io::Result<()> {
    let bad = ["", ".", ".."].contains(&name) || name.contains(['/', '\0']);
    if bad { Err(ErrorKind::InvalidInput.into()) } else { Ok(()) }
}

fn check_range(offset: u64, length: u64) -> io::Result<u64> {
    let end = offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
    end.ok_or_else(|| ErrorKind::InvalidInput.into())
}

impl Session {
    fn file(&self, file: usize) -> Arc<dyn File> {
        Arc::new(MemoryFile { pool: Arc::clone(&self.pool), session: self.number, file })
    }

    fn lease(&self, state: &mut MediumState, name: &str, file: usize) -> io::Result<Box<dyn Lock>> {
        if state.held.contains_key(&file) {
            return Err(io::Error::new(ErrorKind::WouldBlock, format!("'{name}' is leased to another owner")));
        }
        state.leases += 1;
        let lease = Lease { number: state.leases, session: self.number };
        state.held.insert(file, lease);
        Ok(Box::new(MemoryLock { pool: Arc::clone(&self.pool), lease, file, name: name.to_owned() }))
    }
}

impl Directory for Session {
    fn open(&self, name: &str, _: IoMode) -> io::Result<Arc<dyn File>> {
        let file = self.pool.state().find(name)?;
        Ok(self.file(file))
    }
    fn create(&self, name: &str, _: IoMode) -> io::Result<Arc<dyn File>> {
        check_name(name)?;
        let file = self.pool.change(self.number)?.create(name)?;
        Ok(self.file(file))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        let removed = self.pool.change(self.number)?.names.remove(name);
        removed.map(|_| ()).ok_or_else(|| ErrorKind::NotFound.into())
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(to)?;
        let mut state = self.pool.change(self.number)?;
        let file = state.find(from)?;
        state.names.remove(from);
        state.names.insert(to.to_owned(), file);
        Ok(())
    }
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.pool.state().names.keys().cloned().collect())
    }
    fn sync(&self) -> io::Result<()> {
        let mut state = self.pool.change(self.number)?;
        state.durable_names = state.names.clone();
        Ok(())
    }
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        check_name(name)?;
        let mut state = self.pool.change(self.number)?;
        let file = match state.find(name) {
            Ok(file) => file,
            Err(_) => state.create(name)?,
        };
        self.lease(&mut state, name, file)
    }
    fn room(&self) -> io::Result<Room> {
        Ok(Room { total: CAPACITY, available: CAPACITY - self.pool.state().taken() })
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        let completions = CompletionQueue::new(depth)?;
        Ok(Box::new(MemoryQueue { completions, operations: self.operations.clone() }))
    }
    fn queue_kind(&self) -> QueueKind {
        QueueKind::Medium
    }
}

struct MemoryLock {
    pool: Arc<Pool>,
    lease: Lease,
    file: usize,
    name: String,
}

impl Lock for MemoryLock {
    fn loss(&self) -> io::Result<Option<String>> {
        let state = self.pool.state();
        if state.revoked.contains(&self.lease.number) {
            return Ok(Some("its lease was revoked".to_owned()));
        }
        let named = state.names.get(&self.name) == Some(&self.file);
        Ok((!named).then(|| format!("its file '{}' is another one", self.name)))
    }
    fn on_loss(&self, lost: Box<dyn FnOnce() + Send>) {
        let mut state = self.pool.state();
        if state.revoked.contains(&self.lease.number) {
            drop(state);
            return lost();
        }
        state.watchers.push((self.lease.number, lost));
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if state.held.get(&self.file).is_some_and(|lease| lease.number == self.lease.number) {
            state.held.remove(&self.file);
        }
        state.watchers.retain(|(lease, _)| *lease != self.lease.number);
    }
}

struct MemoryFile {
    pool: Arc<Pool>,
    session: u64,
    file: usize,
}

impl File for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.pool.state().files[self.file].length)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        check_range(length, 0)?;
        let mut state = self.pool.change(self.session)?;
        state.make_room(self.file, length)?;
        let content = &mut state.files[self.file];
        content.zero(length, content.length);
        content.length = length;
        Ok(())
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        check_range(offset, buffer.len() as u64)?;
        self.pool.state().files[self.file].read(buffer, offset);
        Ok(())
    }
    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        let bytes = slices.concat();
        let end = check_range(offset, bytes.len() as u64)?;
        let mut state = self.pool.change(self.session)?;
        if bytes.is_empty() {
            return Ok(());
        }
        state.make_room(self.file, end)?;
        let content = &mut state.files[self.file];
        content.write(&bytes, offset);
        if durable {
            content.flush();
        }
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        self.pool.change(self.session)?.files[self.file].flush();
        Ok(())
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let end = check_range(offset, length)?;
        let mut state = self.pool.change(self.session)?;
        let content = &mut state.files[self.file];
        content.zero(offset, end.min(content.length));
        Ok(())
    }
}

enum Work {
    Read { offset: u64, buffer: Buffer },
    Write { offset: u64, slices: Vec<SharedSlice>, durable: bool },
    Sync,
}

struct Operation {
    file: Arc<dyn File>,
    work: Work,
    in_flight: InFlight,
}

impl Operation {
    fn perform(self) {
        let Self { file, work, in_flight } = self;
        match work {
            Work::Read { offset, mut buffer } => {
                let result = file.read_at(&mut buffer, offset);
                in_flight.complete(result, Some(buffer));
            }
            Work::Write { offset, slices, durable } => {
                let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
                in_flight.complete(file.write_at(&bytes, offset, durable), None);
            }
            Work::Sync => in_flight.complete(file.sync(), None),
        }
    }
}

/// The thread of the medium.
fn serve(pushed: &Receiver<Operation>, random: &mut Random, overtaken: &AtomicU64) {
    let mut waiting = Vec::new();
    loop {
        if waiting.is_empty() {
            let Ok(operation) = pushed.recv() else { return };
            waiting.push(operation);
        }
        while waiting.len() < WAITING_MAX
            && let Ok(operation) = pushed.recv_timeout(LATER)
        {
            waiting.push(operation);
        }
        let chosen = random.index(waiting.len());
        if chosen > 0 {
            overtaken.fetch_add(1, Ordering::Relaxed);
        }
        waiting.remove(chosen).perform();
    }
}

struct MemoryQueue {
    completions: CompletionQueue,
    operations: Sender<Operation>,
}

impl MemoryQueue {
    fn push(&mut self, file: &Arc<dyn File>, token: u64, work: Work) {
        let operation = Operation { file: Arc::clone(file), work, in_flight: self.completions.begin(token) };
        // If the thread has ended, dropping the operation completes it with an error.
        let _ = self.operations.send(operation);
    }
}

impl Queue for MemoryQueue {
    fn in_flight(&self) -> usize {
        self.completions.in_flight()
    }
    fn read(&mut self, file: &Arc<dyn File>, offset: u64, buffer: Buffer, token: u64) {
        self.push(file, token, Work::Read { offset, buffer });
    }
    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64) {
        self.push(file, token, Work::Write { offset, slices, durable });
    }
    fn sync(&mut self, file: &Arc<dyn File>, token: u64) {
        self.push(file, token, Work::Sync);
    }
    fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        self.completions.poll_readable(descriptor, token);
    }
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        self.completions.wait(completions, timeout)
    }
}
