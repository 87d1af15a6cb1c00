//! Sessions without sockets: the client's bytes are given in advance, and the server's bytes are recorded.

use connections::Peer;
use connections::transport::{Transport, Wait};
use export::clients::Clients;
use export::exports::Exports;
use export::nbd::{Terms, serve};
use parking_lot::Mutex;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use testkit::protocol::{Client, Mode, OPT_EXTENDED, OPT_GO, OPT_SET_META, OPT_STRUCTURED_REPLY};

/// After this number of calls to the transport, a session counts as endless.
const CALLS_MAX: usize = 1 << 20;

/// An option as it is sent by a client.
pub fn option(code: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(code.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

/// A request as it is sent by a client.
pub fn encode(mode: Mode, command: u16, flags: u16, cookie: u64, offset: u64, length: u64, payload: &[u8]) -> Vec<u8> {
    let extended = mode == Mode::Extended;
    let mut out = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 }.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(command.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    if extended {
        out.extend(length.to_be_bytes());
    } else {
        out.extend((length as u32).to_be_bytes());
    }
    out.extend(payload);
    out
}

/// The bytes that a client sends before its first request on export `vm`.
pub fn opening(mode: Mode, contexts: &[&str]) -> Vec<u8> {
    let mut out = 3u32.to_be_bytes().to_vec();
    match mode {
        Mode::Simple => {}
        Mode::Structured => out.extend(option(OPT_STRUCTURED_REPLY, &[])),
        Mode::Extended => out.extend(option(OPT_EXTENDED, &[])),
    }
    if mode != Mode::Simple && !contexts.is_empty() {
        out.extend(option(OPT_SET_META, &Client::meta_data("vm", contexts)));
    }
    out.extend(option(OPT_GO, &Client::info_data("vm", &[])));
    out
}

/// A client that sends its bytes in batches. Each batch is sent after the replies to the previous batch.
pub struct Script {
    batches: Vec<Vec<u8>>,
    batch: usize,
    at: usize,
    /// Largest number of bytes that one call transfers; 0 for no limit.
    cut: usize,
    calls: usize,
    heard: Arc<Mutex<Vec<u8>>>,
    offered: Arc<AtomicUsize>,
}

impl Script {
    /// The first batch contains the whole handshake.
    pub fn new(batches: Vec<Vec<u8>>, cut: usize) -> Self {
        Self { batches, batch: 0, at: 0, cut, calls: 0, heard: Arc::default(), offered: Arc::default() }
    }

    fn most(&self) -> usize {
        if self.cut == 0 { usize::MAX } else { self.cut }
    }

    fn count(&mut self) {
        self.calls += 1;
        assert!(self.calls < CALLS_MAX, "the session does not end");
    }
}

impl Transport for Script {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        self.count();
        self.offered.fetch_max(into.iter().map(|slice| slice.len()).sum(), Ordering::Relaxed);
        while self.batches.get(self.batch).is_some_and(|batch| self.at == batch.len()) {
            // The server waits for input only if no request is in progress and every reply is sent. Then the next batch
            // begins.
            if wait == Wait::No && self.batch + 1 < self.batches.len() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            (self.batch, self.at) = (self.batch + 1, 0);
        }
        let Some(batch) = self.batches.get(self.batch) else { return Ok(0) };
        let left = &batch[self.at..];
        let mut left = &left[..left.len().min(self.most())];
        let before = left.len();
        for slice in into {
            let part = slice.len().min(left.len());
            slice[..part].copy_from_slice(&left[..part]);
            left = &left[part..];
        }
        self.at += before - left.len();
        Ok(before - left.len())
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.count();
        let mut heard = self.heard.lock();
        let (before, mut allowed) = (heard.len(), self.most());
        for slice in slices {
            let part = slice.len().min(allowed);
            heard.extend_from_slice(&slice[..part]);
            allowed -= part;
        }
        Ok(heard.len() - before)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Result of a session.
pub struct Outcome {
    /// All bytes that the server sent.
    pub heard: Vec<u8>,
    /// Most memory that the server offered for receiving at once.
    pub offered: usize,
    /// The protocol violation that the server reports, if any.
    pub fault: Option<error::Error>,
}

/// Runs a session to its end.
pub fn run(exports: &dyn Exports, terms: &Terms, script: Script) -> Outcome {
    let (heard, offered) = (Arc::clone(&script.heard), Arc::clone(&script.offered));
    let result = serve(Box::new(script), exports, terms, &mut Clients::default().arrive(Peer::Unknown));
    let heard = std::mem::take(&mut *heard.lock());
    Outcome { heard, offered: offered.load(Ordering::Relaxed), fault: result.err() }
}

/// A transport that returns the recorded bytes of a server, and discards the bytes that the client writes.
struct Recorded {
    heard: Vec<u8>,
    at: usize,
}

impl Read for Recorded {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = (&self.heard[self.at..]).read(into)?;
        self.at += count;
        Ok(count)
    }
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A client that has read the replies to [`opening`] and continues with the replies to its requests. Returns the
/// numbers of the contexts in the order of `contexts`.
pub fn listen(heard: Vec<u8>, mode: Mode, contexts: &[&str]) -> (Client, Vec<u32>) {
    let mut client = Client::new(Box::new(Recorded { heard, at: 0 }));
    client.greet(3);
    client.choose(mode);
    let mut ids = Vec::new();
    if mode != Mode::Simple && !contexts.is_empty() {
        let chosen = client.set_meta("vm", contexts);
        ids.extend(contexts.iter().map(|name| chosen[*name]));
    }
    assert_eq!(client.go("vm"), testkit::protocol::REP_ACK);
    (client, ids)
}

/// Prints the seed if the test panics.
pub struct Seed {
    pub what: &'static str,
    pub mode: Mode,
    pub seed: u64,
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: seed {} with {:?} headers", self.what, self.seed, self.mode);
        }
    }
}

/// Calls `work` with every seed, on two threads. A seed that takes longer than `patience` ends the process.
pub fn every_seed(what: &str, seeds: std::ops::Range<u64>, work: impl Fn(u64) + Sync) {
    const THREADS: u64 = 2;
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(300);
    let (finished, ends) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (finished, seeds, work) = (finished.clone(), seeds.clone(), &work);
            scope.spawn(move || {
                for seed in seeds.skip(thread as usize).step_by(THREADS as usize) {
                    work(seed);
                    if seed % 512 < THREADS {
                        let _ = finished.send(seed);
                    }
                }
            });
        }
        drop(finished);
        loop {
            match ends.recv_timeout(PATIENCE) {
                Ok(_) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    eprintln!("{what}: no session has ended for {PATIENCE:?}");
                    std::process::abort();
                }
            }
        }
    });
}
