//! A minimal second protocol over the session core: one line per request and reply. The protocol uses only public
//! interfaces.
//!
//! ```text
//! read OFFSET LENGTH | write OFFSET TEXT | zero OFFSET LENGTH | discard OFFSET LENGTH | flush
//! NUMBER ok [TEXT] | NUMBER failed WHY
//! ```
#![allow(clippy::unwrap_used, missing_docs)]

use backend::{Buffer, Queue, SharedSlice, portable};
use disk::OnFull;
use disk::device::{Allocation, Device, DirtyExtent, FlushTicket, ReadPlan, Segment, StatusExtent, Verdict};
use disk::full::SpaceWait;
use error::{Error, ErrorKind, Result};
use export::exports::{ExportName, Exports};
use export::session::{Operation, Reply, Session};
use parking_lot::{Condvar, Mutex};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Serves one client to its end. Counts in `waits` how often the session waits.
fn serve(mut socket: UnixStream, exports: &dyn Exports, waits: &AtomicU64) {
    socket.set_nonblocking(true).unwrap();
    let mut session = Session::new(exports.open("memory", false).unwrap(), exports);
    let (mut received, mut number, mut ended) = (Vec::new(), 0, false);
    loop {
        let mut bytes = [0; 4096];
        match socket.read(&mut bytes) {
            Ok(0) => ended = true,
            Ok(count) => received.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        while let Some(end) = received.iter().position(|byte| *byte == b'\n')
            && session.has_room(0, 0)
        {
            number += 1;
            let line: Vec<u8> = received.drain(..=end).collect();
            let operation = decode(std::str::from_utf8(&line).unwrap(), &mut session);
            session.submit(number, operation);
        }
        session.end_batch();
        if ended {
            session.refuse_waiting();
        }
        while let Some(done) = session.completed() {
            let reply = match done.outcome {
                Ok(Reply::Done) => format!("{} ok\n", done.tag),
                Ok(Reply::Read(plan)) => {
                    let text = String::from_utf8(plan.slices().concat()).unwrap();
                    session.recycle(plan);
                    format!("{} ok {text}\n", done.tag)
                }
                Err(error) => format!("{} failed {error}\n", done.tag),
            };
            socket.write_all(reply.as_bytes()).unwrap();
        }
        match session.under_way() {
            0 if ended => return,
            0 if received.contains(&b'\n') => {}
            // No request is in progress, so the session waits for the socket alone.
            0 => wait_readable(&socket),
            _ => {
                waits.fetch_add(1, Ordering::Relaxed);
                session.wait((!ended).then(|| socket.as_fd())).unwrap();
            }
        }
    }
}

fn wait_readable(socket: &UnixStream) {
    rustix::event::poll(&mut [rustix::event::PollFd::new(socket, rustix::event::PollFlags::IN)], None).unwrap();
}

fn decode(line: &str, session: &mut Session<'_, u64>) -> Operation {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    match words[0] {
        "read" => Operation::Read { offset: number(1), length: number(2) as usize },
        "write" => {
            let mut payload = session.buffer(number(1), words[2].len());
            payload.bytes_mut().copy_from_slice(words[2].as_bytes());
            Operation::Write { offset: number(1), data: payload.into_data(), fua: false }
        }
        "zero" => Operation::Zero { offset: number(1), length: number(2), allocate: false, fua: false },
        "discard" => Operation::Discard { offset: number(1), length: number(2), fua: false },
        _ => Operation::Flush,
    }
}

/// A disk of letters in memory. Its flushes take some time, or as long as the test requires.
struct Memory {
    letters: Mutex<Vec<u8>>,
    /// The content that the last flush made durable.
    durable: Mutex<Vec<u8>>,
    /// Flushes wait while this is set.
    held: Mutex<bool>,
    changed: Condvar,
    /// Changes fail for lack of space while this is set.
    full: Mutex<bool>,
    space: Arc<SpaceWait>,
    /// Number of flushes that have read the content which they make durable.
    begun: Mutex<u32>,
    began: Condvar,
    /// How often the session has waited.
    waits: AtomicU64,
}

impl Memory {
    fn change(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        if *self.full.lock() {
            return Err(Error::new(ErrorKind::NoSpace, "the disk is full"));
        }
        let mut letters = self.letters.lock();
        let place = letters.get_mut(offset as usize..offset as usize + bytes.len());
        place.ok_or_else(|| Error::new(ErrorKind::Invalid, "beyond the end"))?.copy_from_slice(bytes);
        Ok(())
    }
    fn hold(&self, held: bool) {
        *self.held.lock() = held;
        self.changed.notify_all();
    }
    fn await_flush(&self, number: u32) {
        let mut begun = self.begun.lock();
        while *begun < number {
            self.began.wait(&mut begun);
        }
    }
}

impl Device for Memory {
    fn name(&self) -> &str {
        "memory"
    }
    fn capacity(&self) -> u64 {
        self.letters.lock().len() as u64
    }
    fn read_only(&self) -> bool {
        false
    }
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let letters = self.letters.lock();
        let bytes = letters.get(offset as usize..offset as usize + length);
        let bytes = bytes.ok_or_else(|| Error::new(ErrorKind::Invalid, "beyond the end"))?;
        let segments = vec![Segment::Memory(SharedSlice::from(Buffer::copy_of(bytes)))];
        Ok(ReadPlan { segments, skip: 0, length, offset, guard: None })
    }
    fn finish_read(&self, _plan: &mut ReadPlan) -> Result<Verdict> {
        Ok(Verdict::Good)
    }
    fn write(&self, offset: u64, data: SharedSlice, _fua: bool) -> Result<()> {
        self.change(offset, &data)
    }
    fn space_wait(&self) -> Option<&Arc<SpaceWait>> {
        Some(&self.space)
    }
    fn discard(&self, offset: u64, length: u64, _fua: bool) -> Result<()> {
        self.letters.lock()[offset as usize..(offset + length) as usize].fill(b'-');
        Ok(())
    }
    fn write_zeroes(&self, offset: u64, length: u64, _allocate: bool, _fua: bool) -> Result<()> {
        self.change(offset, &vec![b'-'; length as usize])
    }
    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        let covered = self.letters.lock().clone();
        *self.begun.lock() += 1;
        self.began.notify_all();
        std::thread::sleep(Duration::from_millis(2));
        let mut held = self.held.lock();
        while *held {
            self.changed.wait(&mut held);
        }
        *self.durable.lock() = covered;
        Ok(())
    }
    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }
    fn resize(&self, _capacity: u64) -> Result<()> {
        Ok(())
    }
    fn status(&self, _offset: u64, length: u64, _limit: usize) -> Result<Vec<StatusExtent>> {
        Ok(vec![StatusExtent { length, allocation: Allocation::Data }])
    }
    fn dirty_bases(&self) -> Vec<String> {
        Vec::new()
    }
    fn changed_since(&self, _base: &str, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<DirtyExtent>> {
        Ok(Vec::new())
    }
}

struct One(Arc<Memory>);

impl Exports for One {
    fn names(&self) -> Vec<ExportName> {
        Vec::new()
    }
    fn open(&self, _name: &str, _read_only: bool) -> Result<Arc<dyn Device>> {
        Ok(Arc::clone(&self.0) as Arc<dyn Device>)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(portable::PortableQueue::new(portable::Workers::new(), depth)?))
    }
}

/// Releases the waiting flushes when this value is dropped.
struct Release<'a>(&'a Memory);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.hold(false);
    }
}

/// Runs a session over a pair of sockets concurrently with `client`.
fn with_session(client: impl FnOnce(&Memory, &mut UnixStream, &mut dyn FnMut() -> String)) {
    with_policy(OnFull::Error, client);
}

/// As [`with_session`], on a disk with this policy.
fn with_policy(policy: OnFull, client: impl FnOnce(&Memory, &mut UnixStream, &mut dyn FnMut() -> String)) {
    let memory = Arc::new(Memory {
        letters: Mutex::new(vec![b'.'; 64]),
        durable: Mutex::new(Vec::new()),
        held: Mutex::new(false),
        changed: Condvar::new(),
        begun: Mutex::new(0),
        began: Condvar::new(),
        waits: AtomicU64::new(0),
        full: Mutex::new(false),
        space: SpaceWait::alone("memory", policy),
    });
    let exports = One(Arc::clone(&memory));
    let (mut near, far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| serve(far, &exports, &memory.waits));
        let mut lines = BufReader::new(near.try_clone().unwrap());
        let mut reply = || {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        // Dropping `_release`, also after a failure of the test, lets the session end.
        let _release = Release(&memory);
        client(&memory, &mut near, &mut reply);
        near.shutdown(std::net::Shutdown::Write).unwrap();
    });
}

#[test]
fn every_request_gets_one_reply() {
    with_session(|memory, near, reply| {
        let requests = "write 3 hello\nread 0 10\nzero 4 2\ndiscard 7 1\nread 2 8\nflush\nread 60 5\n";
        near.write_all(requests.as_bytes()).unwrap();
        let mut replies: Vec<String> = (0..7).map(|_| reply()).collect();
        replies.sort();
        let wanted = ["1 ok", "2 ok ...hello..", "3 ok", "4 ok", "5 ok .h--l-..", "6 ok", "7 failed beyond the end"];
        assert_eq!(replies, wanted);
        assert_eq!(&memory.durable.lock()[2..10], b".h--l-..");
    });
}

#[test]
fn a_flush_delays_no_other_request() {
    with_session(|memory, near, reply| {
        // A request arrives during a slow flush, so the session hands later flushes over to another thread.
        near.write_all(b"write 0 aaaa\nflush\n").unwrap();
        assert_eq!([reply(), reply()], ["1 ok", "2 ok"]);
        memory.hold(true);
        near.write_all(b"flush\nread 0 4\n").unwrap();
        assert_eq!(reply(), "4 ok aaaa");
        memory.await_flush(2);
        near.write_all(b"write 0 bbbb\n").unwrap();
        assert_eq!(reply(), "5 ok");
        // A flush that is requested during another flush covers the requests that completed before it, so it needs a
        // device flush of its own.
        near.write_all(b"flush\nread 0 4\n").unwrap();
        assert_eq!(reply(), "7 ok bbbb");
        memory.hold(false);
        assert_eq!(reply(), "3 ok");
        assert_eq!(reply(), "6 ok");
        assert_eq!(&memory.durable.lock()[..4], b"bbbb");
    });
}

#[test]
fn a_session_ends_when_its_flush_has_completed() {
    with_session(|memory, near, reply| {
        near.write_all(b"write 0 aaaa\nflush\n").unwrap();
        assert_eq!([reply(), reply()], ["1 ok", "2 ok"]);
        memory.hold(true);
        near.write_all(b"write 0 cccc\nflush\n").unwrap();
        assert_eq!(reply(), "3 ok");
        near.shutdown(std::net::Shutdown::Write).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        memory.hold(false);
        assert_eq!(reply(), "4 ok");
        assert_eq!(&memory.durable.lock()[..4], b"cccc");
    });
}

#[test]
fn a_write_that_waits_for_space_delays_no_other_request() {
    with_policy(OnFull::Wait(None), |memory, near, reply| {
        near.write_all(b"write 4 kept\n").unwrap();
        assert_eq!(reply(), "1 ok");
        *memory.full.lock() = true;
        near.write_all(b"write 0 aaaa\nzero 8 2\nread 0 8\nflush\ndiscard 4 2\n").unwrap();
        let mut replies: Vec<String> = (0..3).map(|_| reply()).collect();
        replies.sort();
        assert_eq!(replies, ["4 ok ....kept", "5 ok", "6 ok"]);
        assert_eq!(&memory.durable.lock()[..4], b"....", "a flush does not cover a write that is not acknowledged");
        let waiting = memory.space.waiting().unwrap();
        assert_eq!((waiting.writes, waiting.bytes, waiting.reason.as_str()), (2, 6, "the disk is full"));
        // Requests that arrive later are served as well.
        near.write_all(b"read 4 4\n").unwrap();
        assert_eq!(reply(), "7 ok --pt");
        *memory.full.lock() = false;
        assert_eq!([reply(), reply()], ["2 ok", "3 ok"], "in the order of their arrival");
        assert_eq!(memory.space.waiting(), None);
        near.write_all(b"read 0 10\n").unwrap();
        assert_eq!(reply(), "8 ok aaaa--pt--");
    });
}

#[test]
fn a_session_in_which_only_a_write_waits_for_space_sleeps() {
    with_policy(OnFull::Wait(None), |memory, near, reply| {
        *memory.full.lock() = true;
        near.write_all(b"write 0 aaaa\nread 0 4\n").unwrap();
        assert_eq!(reply(), "2 ok ....");
        let before = memory.waits.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(300));
        let waits = memory.waits.load(Ordering::Relaxed) - before;
        assert!(waits < 30, "the session waited {waits} times, and tried the write at most 7 times");
        *memory.full.lock() = false;
        assert_eq!(reply(), "1 ok");
    });
}

#[test]
fn a_write_waits_for_space_no_longer_than_the_policy_says() {
    let limit = Duration::from_secs(1);
    with_policy(OnFull::Wait(Some(limit)), |memory, near, reply| {
        *memory.full.lock() = true;
        let began = std::time::Instant::now();
        near.write_all(b"write 0 aaaa\n").unwrap();
        assert_eq!(reply(), "1 failed the disk is full");
        assert!(began.elapsed() >= limit);
        assert_eq!(memory.space.waiting(), None);
    });
    with_policy(OnFull::Error, |memory, near, reply| {
        *memory.full.lock() = true;
        near.write_all(b"write 0 aaaa\nread 0 4\n").unwrap();
        assert_eq!([reply(), reply()], ["1 failed the disk is full", "2 ok ...."]);
    });
}

#[test]
fn no_write_waits_for_space_once_the_client_has_gone() {
    with_policy(OnFull::Wait(None), |memory, near, reply| {
        *memory.full.lock() = true;
        near.write_all(b"write 0 aaaa\nread 0 4\n").unwrap();
        assert_eq!(reply(), "2 ok ....");
        near.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(reply(), "1 failed the disk is full");
        assert_eq!(memory.space.waiting(), None);
    });
}
