//! The load during operations on a disk: random 4 KiB writes at queue depth 16, each of them timed.
//!
//! The study's own client sends the load, so that the same clock measures the times of requests and of operations. The
//! latencies of the requests in flight during an operation show the delay that it causes.
//!
//! A verified load tracks its writes: the content of each block is a function of the block's location and of the number
//! of writes to it, and no two requests write the same block at the same time. So the whole disk can be compared with
//! its expected content.

use super::BLOCK;
use crate::error::{Error, Result};
use crate::fio::Endpoint;
use crate::nbd::{Client, Request, Timing};
use crate::process;
use crate::random::Random;
use crate::statistics::ratio;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LOAD_DEPTH: usize = 16;
/// Number of clients of a steady load.
const STEADY_CLIENTS: usize = 4;
/// Bytes per request when a whole disk is written or compared.
const PIECE: u64 = 1 << 20;

/// Expected content of a disk: for every block the number of writes, which determines the block's bytes.
#[derive(Clone, Debug)]
pub(super) struct Versions(Vec<u32>);

impl Versions {
    /// Writes a whole disk for the first time.
    pub(super) fn fill(endpoint: &Endpoint, size: u64) -> Result<Versions> {
        let versions = Versions(vec![1; (size / BLOCK) as usize]);
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        let piece =
            |i: u64| Request::Stamped { offset: i * PIECE, length: PIECE.min(size - i * PIECE) as u32, version: 1 };
        client.run(4, (0..size.div_ceil(PIECE)).map(piece), |_| ())?;
        client.flush()?;
        Ok(versions)
    }

    /// Writes the given ranges of blocks again.
    pub(super) fn rewrite(&mut self, endpoint: &Endpoint, runs: impl IntoIterator<Item = (u64, u64)>) -> Result<()> {
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        let versions = &mut self.0;
        // All blocks of a range are written with the same version, so that one request is sufficient.
        let requests = runs.into_iter().map(|(first, count)| {
            let run = &mut versions[first as usize..(first + count) as usize];
            let version = run.iter().max().map_or(1, |most| most + 1);
            run.fill(version);
            Request::Stamped { offset: first * BLOCK, length: (count * BLOCK) as u32, version }
        });
        client.run(LOAD_DEPTH, requests, |_| ())?;
        client.flush()
    }

    /// Number of blocks whose content is not the expected one.
    pub(super) fn differences(&self, endpoint: &Endpoint) -> Result<u64> {
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        let mut differences = 0;
        let per_piece = (PIECE / BLOCK) as usize;
        for (index, versions) in self.0.chunks(per_piece).enumerate() {
            differences += client.compare(index as u64 * PIECE, versions)?;
        }
        Ok(differences)
    }
}

/// The rate of a load.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    /// As many requests as the server answers.
    Full,
    /// This many requests per second. If a request is late, the next one is sent at once; no request is left out.
    PerSecond(f64),
}

impl Pace {
    /// Returns a function that waits until the next request is due.
    fn waiting(self) -> impl FnMut() {
        let mut due = Instant::now();
        move || {
            if let Self::PerSecond(rate) = self {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                due += Duration::from_secs_f64(1.0 / rate.max(1.0));
            }
        }
    }
}

/// How long the possible rate is measured.
const PROBE: Duration = Duration::from_secs(5);

/// A load that runs until it is stopped.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<(Vec<Timing>, Option<Versions>)>>,
}

impl Load {
    /// Random writes to the first `blocks` of a disk.
    pub(super) fn start(endpoint: &Endpoint, blocks: u64, seed: u64, pace: Pace) -> Result<Load> {
        let write =
            move |random: &mut Random| Request::Write { offset: random.below(blocks) * BLOCK, length: BLOCK as u32 };
        Self::sending(endpoint, LOAD_DEPTH, seed, pace, write)
    }

    /// Sends requests continuously, `depth` of them at a time.
    pub(super) fn busy(
        endpoint: &Endpoint,
        depth: usize,
        seed: u64,
        next: impl Fn(&mut Random) -> Request + Send + 'static,
    ) -> Result<Load> {
        Self::sending(endpoint, depth, seed, Pace::Full, next)
    }

    fn sending(
        endpoint: &Endpoint,
        depth: usize,
        seed: u64,
        pace: Pace,
        next: impl Fn(&mut Random) -> Request + Send + 'static,
    ) -> Result<Load> {
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        Self::spawn(move |stop| {
            let mut random = Random::new(seed);
            let mut timings = Vec::with_capacity(1 << 20);
            let mut wait = pace.waiting();
            let requests = std::iter::from_fn(|| {
                wait();
                let more = !stop.load(Ordering::Relaxed);
                more.then(|| next(&mut random))
            });
            client.run(depth, requests, |timing| timings.push(timing))?;
            Ok((timings, None))
        })
    }

    /// Sends this many writes per second to the first `blocks` of a disk, from [`STEADY_CLIENTS`] clients.
    pub(super) fn steady(endpoint: &Endpoint, blocks: u64, per_second: u32, seed: u64) -> Result<Load> {
        let write =
            move |random: &mut Random| Request::Write { offset: random.below(blocks) * BLOCK, length: BLOCK as u32 };
        Self::paced(&vec![endpoint.clone(); STEADY_CLIENTS], per_second, seed, write)
    }

    /// Sends requests at a fixed rate, with one client at each endpoint, and one request at a time for each client. If
    /// a request is late, the next one is sent at once; no request is left out.
    pub(super) fn paced(
        endpoints: &[Endpoint],
        per_second: u32,
        seed: u64,
        next: impl Fn(&mut Random) -> Request + Send + Sync + 'static,
    ) -> Result<Load> {
        let connect = |endpoint: &Endpoint| Client::connect(&endpoint.socket, &endpoint.export);
        let clients = endpoints.iter().map(connect).collect::<Result<Vec<_>>>()?;
        let count = clients.len() as u32;
        let interval = Duration::from_secs(1) * count / per_second.max(1);
        Self::spawn(move |stop| {
            let run = |number: u32, mut client: Client| {
                let mut random = Random::new(seed + u64::from(number));
                let mut timings = Vec::with_capacity(1 << 16);
                // The times of the clients are spread over the interval, because simultaneous requests would wait for
                // each other.
                let mut due = Instant::now() + interval * number / count;
                let requests = std::iter::from_fn(|| {
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    due += interval;
                    let more = !stop.load(Ordering::Relaxed);
                    more.then(|| next(&mut random))
                });
                client.run(1, requests, |timing| timings.push(timing))?;
                Ok(timings)
            };
            let mut timings = at_once(clients, run)?.concat();
            timings.sort_by_key(|timing| timing.answered);
            Ok((timings, None))
        })
    }

    /// Random writes to a whole disk, tracking its content.
    pub(super) fn verified(endpoint: &Endpoint, mut versions: Versions, seed: u64, pace: Pace) -> Result<Load> {
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        Self::spawn(move |stop| {
            let mut random = Random::new(seed);
            let mut timings = Vec::with_capacity(1 << 20);
            let under_way = RefCell::new(HashSet::new());
            let blocks = versions.0.len() as u64;
            let mut wait = pace.waiting();
            let requests = std::iter::from_fn(|| {
                wait();
                if stop.load(Ordering::Relaxed) {
                    return None;
                }
                let block = loop {
                    let block = random.below(blocks);
                    if under_way.borrow_mut().insert(block) {
                        break block;
                    }
                };
                let version = &mut versions.0[block as usize];
                *version += 1;
                Some(Request::Stamped { offset: block * BLOCK, length: BLOCK as u32, version: *version })
            });
            client.run_told(LOAD_DEPTH, requests, |request, timing| {
                if let Request::Stamped { offset, .. } = request {
                    under_way.borrow_mut().remove(&(offset / BLOCK));
                }
                timings.push(timing);
            })?;
            client.flush()?;
            Ok((timings, Some(versions)))
        })
    }

    fn spawn(
        work: impl FnOnce(&AtomicBool) -> Result<(Vec<Timing>, Option<Versions>)> + Send + 'static,
    ) -> Result<Load> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || work(&seen));
        Ok(Load { stop, thread })
    }

    /// The pace of this share of the possible rate, in percent, and what the loads that `start` begins leave.
    pub(super) fn pace<T>(
        percent: u32,
        start: impl FnOnce() -> Result<Load>,
        end: impl FnOnce(Load) -> Result<(Vec<Timing>, T)>,
    ) -> Result<(Pace, T)> {
        let (rate, left) = Self::rate(percent, start, end)?;
        Ok((Pace::PerSecond(rate), left))
    }

    /// This share of the possible rate, in percent, in requests per second, and what the loads that `start` begins
    /// leave.
    pub(super) fn rate<T>(
        percent: u32,
        start: impl FnOnce() -> Result<Load>,
        end: impl FnOnce(Load) -> Result<(Vec<Timing>, T)>,
    ) -> Result<(f64, T)> {
        let load = start()?;
        process::pause(PROBE)?;
        let (timings, left) = end(load)?;
        let rate = timings.len() as f64 / PROBE.as_secs_f64();
        Ok((rate * f64::from(percent) / 100.0, left))
    }

    /// Stops the load; returns the timing of each request.
    pub(super) fn finish(self) -> Result<Vec<Timing>> {
        self.end().map(|(timings, _)| timings)
    }

    /// Stops a verified load. Returns the timing of each request, and the expected content of the disk.
    pub(super) fn finish_verified(self) -> Result<(Vec<Timing>, Versions)> {
        let (timings, versions) = self.end()?;
        let versions = versions.ok_or_else(|| Error::Answer("the load kept no count of what it wrote".into()))?;
        Ok((timings, versions))
    }

    fn end(self) -> Result<(Vec<Timing>, Option<Versions>)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| Error::Answer("the load ended by a panic".into()))?
    }
}

/// Chooses a read or a write, with equal probability, of one of the first `blocks`.
pub(super) fn mixed(random: &mut Random, blocks: u64) -> Request {
    let (offset, length) = (random.below(blocks) * BLOCK, BLOCK as u32);
    if random.below(2) == 0 { Request::Read { offset, length } } else { Request::Write { offset, length } }
}

/// Runs all clients in parallel, each with its number; returns their results in this order.
pub(super) fn at_once<T: Send>(clients: Vec<Client>, run: impl Fn(u32, Client) -> Result<T> + Sync) -> Result<Vec<T>> {
    let run = &run;
    std::thread::scope(|scope| {
        let begin = |(number, client)| scope.spawn(move || run(number, client));
        let running: Vec<_> = (0..).zip(clients).map(begin).collect();
        let end = |client: std::thread::ScopedJoinHandle<'_, Result<T>>| {
            client.join().map_err(|_| Error::Answer("a client of the load ended by a panic".into()))?
        };
        running.into_iter().map(end).collect()
    })
}

/// Latencies in milliseconds of the requests answered within a window. Requests are ordered by the time of their
/// replies.
pub(super) fn latencies(timings: &[Timing], window: Window) -> Vec<f64> {
    let at = |time: Instant| timings.partition_point(|timing| timing.answered < time);
    timings[at(window.0)..at(window.1)].iter().map(|timing| timing.microseconds() / 1e3).collect()
}

/// A period with or without an operation.
pub(super) type Window = (Instant, Instant);

/// Longest latency in milliseconds of the requests that were in flight during one of the windows.
pub(super) fn worst(timings: &[Timing], windows: &[Window]) -> f64 {
    let mut worst: f64 = 0.0;
    // Replies are in order of time, and requests take far less than a second, so the search ends shortly after the end
    // of a window.
    for (from, to) in windows {
        let first = timings.partition_point(|t| t.answered < *from);
        for timing in timings[first..].iter().take_while(|t| t.sent.saturating_duration_since(*to).as_secs() < 1) {
            if timing.sent <= *to {
                worst = worst.max(timing.microseconds() / 1000.0);
            }
        }
    }
    worst
}

/// Requests answered per second in a window.
pub(super) fn rate(timings: &[Timing], window: Window) -> f64 {
    let inside = |at: Instant| timings.partition_point(|t| t.answered < at);
    let seconds = window.1.duration_since(window.0).as_secs_f64();
    ratio((inside(window.1) - inside(window.0)) as f64, seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_in_flight_during_a_window_count() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let timing = |from: u64, to: u64| Timing { sent: at(from), answered: at(to) };
        let timings = [timing(0, 9), timing(10, 15), timing(14, 21), timing(30, 60)];
        assert_eq!(worst(&timings, &[(at(12), at(20))]), 7.0);
        assert_eq!(worst(&timings, &[(at(22), at(25))]), 0.0);
        assert_eq!(worst(&timings, &[(at(22), at(31)), (at(1), at(2))]), 30.0);
        assert_eq!(rate(&timings, (at(0), at(50))), 60.0);
    }
}
