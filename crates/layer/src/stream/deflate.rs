//! Compressing grains: on the caller's thread, or on a few threads with the results returned in order.
//!
//! At most `DEPTH_PER_THREAD` grains per thread are under way; a caller that adds more waits for the oldest.

use super::marker::{GRAIN_MARKER_SIZE, Marker};
use crate::{Error, ErrorKind, Result, SECTOR};
use flate2::{Compress, Compression, FlushCompress, Status};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Grains added and not returned yet, per thread.
const DEPTH_PER_THREAD: usize = 4;

/// The most threads of one writer.
pub(super) const THREADS_MAX: usize = 64;

/// A grain in its stored form: marker, data, zeros up to a sector.
pub(super) struct Packed {
    pub(super) grain: u64,
    pub(super) bytes: Vec<u8>,
}

struct Job {
    grain: u64,
    sector: u64,
    data: Vec<u8>,
    done: SyncSender<Result<Packed>>,
}

/// The compressors of one writer.
pub(super) struct Deflaters {
    own: Compress,
    jobs: Option<SyncSender<Job>>,
    pending: VecDeque<Receiver<Result<Packed>>>,
    workers: Vec<JoinHandle<()>>,
}

impl Deflaters {
    /// Compressors at `level` (0 to 9); with less than two threads, the caller's thread compresses.
    pub(super) fn new(level: u32, threads: usize) -> Self {
        let level = level.min(9);
        let threads = threads.min(THREADS_MAX);
        let own = compressor(level);
        let mut new = Self { own, jobs: None, pending: VecDeque::new(), workers: Vec::new() };
        if threads < 2 {
            return new;
        }
        let (sender, receiver) = sync_channel::<Job>(threads * DEPTH_PER_THREAD);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..threads {
            let receiver = Arc::clone(&receiver);
            let worker = std::thread::Builder::new().name("deflate".to_owned()).spawn(move || {
                let mut deflater = compressor(level);
                loop {
                    // The lock is released before the compression begins.
                    let job = receiver.lock().recv();
                    let Ok(job) = job else { break };
                    // Sending fails only if the writer has failed and dropped the receiver.
                    let _ = job.done.send(pack(&mut deflater, job.grain, job.sector, &job.data));
                }
            });
            // With fewer threads than requested, writing is only slower.
            new.workers.extend(worker.ok());
        }
        if !new.workers.is_empty() {
            new.jobs = Some(sender);
        }
        new
    }

    /// Adds a grain; returns the oldest one if enough are under way.
    pub(super) fn push(&mut self, grain: u64, sector: u64, data: &[u8], padded: usize) -> Result<Option<Packed>> {
        let mut data = data.to_vec();
        data.resize(padded, 0);
        let Some(jobs) = &self.jobs else { return pack(&mut self.own, grain, sector, &data).map(Some) };
        let (done, result) = sync_channel(1);
        jobs.send(Job { grain, sector, data, done }).map_err(|_| gone())?;
        self.pending.push_back(result);
        match self.pending.len() > self.workers.len() * DEPTH_PER_THREAD {
            true => self.pop(),
            false => Ok(None),
        }
    }

    /// Waits for the oldest grain under way, and returns it.
    pub(super) fn pop(&mut self) -> Result<Option<Packed>> {
        match self.pending.pop_front() {
            Some(result) => result.recv().map_err(|_| gone())?.map(Some),
            None => Ok(None),
        }
    }
}

impl Drop for Deflaters {
    fn drop(&mut self) {
        self.jobs = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Io, "a thread that compresses has ended")
}

/// A compressor of zlib streams.
fn compressor(level: u32) -> Compress {
    Compress::new(Compression::new(level), true)
}

/// Compresses a grain, and adds its marker and padding.
fn pack(deflater: &mut Compress, grain: u64, sector: u64, data: &[u8]) -> Result<Packed> {
    deflater.reset();
    let mut bytes = Vec::with_capacity(data.len() + data.len() / 64 + 1024);
    bytes.resize(GRAIN_MARKER_SIZE, 0);
    loop {
        let read = deflater.total_in() as usize;
        let status = deflater.compress_vec(&data[read..], &mut bytes, FlushCompress::Finish);
        match status {
            Ok(Status::StreamEnd) => break,
            Ok(_) => bytes.reserve(4096),
            Err(error) => {
                return Err(Error::new(ErrorKind::Io, format!("grain {grain} cannot be compressed: {error}")));
            }
        }
    }
    let size = (bytes.len() - GRAIN_MARKER_SIZE) as u32;
    let marker = Marker::Grain { sector, size }.encode();
    bytes[..GRAIN_MARKER_SIZE].copy_from_slice(&marker[..GRAIN_MARKER_SIZE]);
    bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
    Ok(Packed { grain, bytes })
}
