//! Time until a datastore is open again, after a clean stop and after a SIGKILL: under scattered writes, during a
//! discard of 200 GiB of a thick disk and of a disk with scattered blocks, and during the deletion of a thick disk of
//! 500 GiB.
//!
//! After each restart, flushed blocks are compared with their expected content. Requests may fail only because of the
//! kill. At the end, `check` verifies all data and metadata. If the work folder's file system has no space for the
//! thick disk, a sparse file system of 2 TiB is used.

use super::places::Places;
use super::{CAPACITY, DEPTH, GIB, Journal, PROPERTY};
use crate::bars::{Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::{Error, Result};
use crate::nbd::{Client, Request};
use crate::peers::Server;
use crate::report::Finding;
use crate::statistics::{largest, percentile, ratio};
use crate::volume::{self, Volume};
use crate::{process, scratch};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Capacity of the thick disk.
const THICK: u64 = 500 * GIB;
/// Number of bytes that are discarded of each disk.
const DISCARDED: u64 = 200 * GIB;
/// Number of bytes of a single discard.
const PIECE: u64 = GIB;
const VOLUME: u64 = 2 << 40;
/// Free space that a file system needs so that the disks can be created on it directly.
const ROOM_MIN: u64 = THICK + 100 * GIB;
/// Limit of the time for opening.
const OPEN_MAX_S: f64 = 2.0;
/// Duration of the load before each stop, as a part of the planned time, and the bounds of this duration.
const LOAD_PART: f64 = 0.1;
const LOAD_MIN_S: f64 = 1.0;
const LOAD_MAX_S: f64 = 30.0;
/// Part of the real space that written blocks may occupy, in percent, and the bytes that are allocated per block.
const ROOM_PERCENT: u64 = 40;
const WRITE_BYTES: u64 = 6 << 10;
/// All space counts as returned when a deleted thick disk occupies no more than this.
const LEFT_MAX: u64 = 4 * GIB;
/// Longest time for which the return of space is observed.
const GIVEN_BACK_TIME_MAX: Duration = Duration::from_secs(120);
const WIDE: &str = "wide";
const THICK_DISK: &str = "thick";

/// The way in which a run of the server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// With SIGTERM, when the work is complete.
    Stop,
    /// With SIGKILL, this long after the work began.
    Kill(Duration),
}

struct Bench<'a> {
    setting: &'a Setting,
    datastore: Datastore,
    server: Option<Server>,
    places: Places,
    latencies: Vec<f64>,
    opened: Vec<(String, f64)>,
    lost: u64,
}

/// Measures the times with one journal size.
pub(super) fn measure(setting: &Setting, journal: Journal, findings: &mut Vec<Finding>) -> Result<Value> {
    let (name, size) = journal;
    let room = volume::room(setting.scratch.root())?;
    // The volume is created before the datastore, so that it is dropped, and unmounted, after the server has ended.
    let volume = if room >= ROOM_MIN { None } else { Some(Volume::new(&setting.scratch, "volume", VOLUME)?) };
    let folder: PathBuf = volume.as_ref().map_or(setting.scratch.root(), Volume::path).join("stops");
    let datastore = Datastore::init_at(&setting.lamina, &setting.scratch, "stops", folder, size)?;
    datastore.create(WIDE, CAPACITY)?;
    let most = room / 100 * ROOM_PERCENT / WRITE_BYTES;
    let mut bench = Bench {
        setting,
        datastore,
        server: None,
        places: Places::new(setting.plan.seed, most),
        latencies: Vec::new(),
        opened: Vec::new(),
        lost: 0,
    };
    let done = bench.go_through(name);
    if let Some(server) = bench.server.take() {
        server.service.stop()?;
    }
    let (created, given_back) = done?;
    let check = bench.datastore.text(&["check"])?;
    let Bench { datastore, latencies, opened, lost, .. } = bench;
    setting.scratch.remove(datastore.path())?;
    drop(volume);
    for (what, seconds) in &opened {
        findings.push(Finding::new(PROPERTY, format!("{name}: open after {what}"), *seconds, "s").at_most(OPEN_MAX_S));
    }
    findings.push(Finding::new(PROPERTY, format!("{name}: flushed blocks lost"), lost as f64, "").at_most(0.0));
    findings.push(Finding::new(PROPERTY, format!("{name}: p99 of writes meanwhile"), millis(&latencies, 0.99), "ms"));
    findings.push(Finding::new(PROPERTY, format!("{name}: longest write meanwhile"), largest(&latencies) / 1e3, "ms"));
    findings.push(Finding::new(PROPERTY, format!("{name}: creating a thick disk of 500 GiB"), created, "s"));
    findings.push(Finding::new(PROPERTY, format!("{name}: space of the thick disk given back"), given_back, "GiB/s"));
    Ok(json!({
        "journal": name, "opened": opened, "lost": lost, "writes": latencies.len(),
        "create_s": created, "given_back_gib_s": given_back,
        "p99_us": percentile(&latencies, 0.99), "longest_us": largest(&latencies), "check": check.trim(),
    }))
}

fn millis(latencies: &[f64], share: f64) -> f64 {
    percentile(latencies, share) / 1e3
}

impl Bench<'_> {
    /// Measures every kind of work, with a stop after the work and with a kill during the work. Returns the seconds for
    /// creating the thick disk, and the rate in GiB per second at which its space is returned.
    fn go_through(&mut self, name: &str) -> Result<(f64, f64)> {
        let load = (self.setting.plan.lasting * LOAD_PART).clamp(LOAD_MIN_S, LOAD_MAX_S);
        let load = Duration::from_secs_f64(load);
        self.serve("making it")?;
        self.opened.clear();
        let nothing = |_: &Datastore| Ok(());
        say(&format!("{name}: stops and kills under writes"));
        self.life("writes and a stop", load, End::Stop, nothing)?;
        self.life("writes and a kill", load, End::Kill(load / 2), nothing)?;
        say(&format!("{name}: a thick disk of 500 GiB"));
        let before = scratch::allocated(self.datastore.path())?;
        let created = self.datastore.create_as(THICK_DISK, THICK, "zeroedthick")?.as_secs_f64();
        say(&format!("{name}: discarding 200 GiB of the thick disk"));
        let kill = End::Kill(Duration::from_millis(100));
        self.life("a kill in a discard of 200 GiB, thick", load, kill, |ds| discard(ds, THICK_DISK))?;
        self.life("a discard of 200 GiB, thick, and a stop", load, End::Stop, |ds| discard(ds, THICK_DISK))?;
        say(&format!("{name}: discarding 200 GiB of the scattered disk"));
        // Flushed blocks in the first part of the disk are discarded with that part. Blocks that are written from now
        // on are compared.
        self.life("a kill in a discard of 200 GiB, scattered", load, kill, |ds| discard(ds, WIDE))?;
        self.life("a discard of 200 GiB, scattered, and a stop", load, End::Stop, |ds| discard(ds, WIDE))?;
        say(&format!("{name}: deleting the thick disk"));
        let delete = |ds: &Datastore| ds.delete(THICK_DISK);
        self.life("a kill in deleting 500 GiB", load, End::Kill(Duration::from_millis(300)), delete)?;
        // A deletion that was acknowledged is completed after the kill.
        let listed = self.datastore.ask(&["disk", "list"])?;
        let disks = listed["disks"].as_array().map(Vec::as_slice).unwrap_or_default();
        if disks.iter().any(|disk| disk["name"] == THICK_DISK) {
            self.datastore.delete(THICK_DISK)?;
        }
        self.life("deleting 500 GiB and a stop", load, End::Stop, nothing)?;
        let left = before + self.places.sent() * WRITE_BYTES + LEFT_MAX;
        let path = self.datastore.path();
        let (all, time) = (scratch::allocated(path)?, Duration::from_secs_f64(self.setting.plan.lasting));
        let (rest, taken) = scratch::wait_allocated(path, left, time.min(GIVEN_BACK_TIME_MAX))?;
        let given_back = ratio(all.saturating_sub(rest) as f64 / GIB as f64, taken.as_secs_f64());
        self.life("giving space back and a stop", load, End::Stop, nothing)?;
        Ok((created, given_back))
    }

    fn serve(&mut self, after: &str) -> Result<()> {
        let (server, time) = self.datastore.serve(&Serving::plain(self.setting.plan.mode()), WIDE)?;
        self.opened.push((after.into(), time.as_secs_f64()));
        self.server = Some(server);
        Ok(())
    }

    /// Runs scattered writes, with `act` in parallel, and ends the server. Then reopens the datastore and compares
    /// flushed blocks.
    fn life(
        &mut self,
        what: &str,
        load: Duration,
        end: End,
        act: impl FnOnce(&Datastore) -> Result<()> + Send,
    ) -> Result<()> {
        process::go_on()?;
        let Some(server) = self.server.take() else { return Ok(()) };
        let endpoint = server.endpoint.clone();
        let killed = AtomicBool::new(false);
        let flushed = AtomicBool::new(false);
        let (places, latencies) = (&mut self.places, &mut self.latencies);
        let datastore = &self.datastore;
        let half = load / 2;
        let kept = std::thread::scope(|scope| {
            // The writes of the first half are flushed. A kill may lose the writes of the second half.
            let writer = scope.spawn(|| {
                let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
                places.write(&mut client, half, latencies)?;
                client.flush()?;
                let kept = places.sent();
                flushed.store(true, Ordering::SeqCst);
                let rest = places.write(&mut client, half, latencies).and_then(|_| client.flush());
                excused(rest, &killed).map(|()| kept)
            });
            // `act` begins when the second half begins.
            while !flushed.load(Ordering::SeqCst) && !writer.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            let actor = scope.spawn(|| excused(act(datastore), &killed));
            let ended = match end {
                End::Kill(after) => {
                    std::thread::sleep(after);
                    killed.store(true, Ordering::SeqCst);
                    server.service.kill().map(|()| None)
                }
                End::Stop => Ok(Some(server)),
            };
            let panicked = || Error::Answer("a thread of the load panicked".into());
            let acted = actor.join().map_err(|_| panicked())?;
            let kept = writer.join().map_err(|_| panicked())?;
            let server = ended?;
            acted.and(kept).and_then(|kept| server.map_or(Ok(()), |server| server.service.stop()).map(|()| kept))
        })?;
        if end != End::Stop {
            self.places.go_back(kept);
        }
        self.serve(what)?;
        // Blocks before this offset may have been discarded, so they are not compared.
        self.lost += self.places.lost(&self.datastore.endpoint(WIDE), kept, DISCARDED)?;
        Ok(())
    }
}

/// An error that the kill has caused is ignored. A request that the server refuses is always an error.
fn excused(result: Result<()>, killed: &AtomicBool) -> Result<()> {
    match result {
        Err(Error::Io { .. } | Error::Answer(_) | Error::Command { .. }) if killed.load(Ordering::SeqCst) => Ok(()),
        other => other,
    }
}

/// Discards the first part of a disk.
fn discard(datastore: &Datastore, disk: &str) -> Result<()> {
    let endpoint = datastore.endpoint(disk);
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let pieces = (0..DISCARDED / PIECE).map(|piece| Request::Trim { offset: piece * PIECE, length: PIECE as u32 });
    client.run(DEPTH, pieces, |_| ())?;
    client.flush()
}
