//! Rates compared with qcow2. Every side has a disk of 1 TiB. The sides are measured in turn, in slices of a few
//! seconds and in a rotating order, until each was measured for the planned time.
//!
//! Every write is a first write. When a side has used its share of the available space, its disk is replaced by an
//! empty one between two slices. qcow2 allocates a whole cluster for each write, so its share is the largest. Rates
//! that include a flush after each slice are also reported.

use super::places::Places;
use super::{CAPACITY, JOURNALS, Journal, PROPERTY};
use crate::bars::{Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::nbd::Client;
use crate::peers::{self, Server};
use crate::plan::Mode;
use crate::report::Finding;
use crate::statistics::{largest, percentile, ratio};
use crate::{process, volume};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longest slice.
const SLICE_MAX_S: f64 = 10.0;
/// Least number of slices per side.
const SLICES_MIN: f64 = 4.0;
/// Part of the available space that all sides may use together, in percent.
const ROOM_PERCENT: u64 = 60;
/// Most bytes that a first write allocates, and the side's share of the available space. lamina allocates a block and
/// metadata; qcow2 allocates a cluster of 64 KiB, or less with subclusters.
const LAMINA: Share = Share { each: 6 << 10, parts: 2 };
const QCOW2: Share = Share { each: 68 << 10, parts: 4 };
const QCOW2_EXTENDED: Share = Share { each: 10 << 10, parts: 2 };
const PARTS: u64 = 10;
/// Least rate, as a multiple of qcow2's rate.
const RATIO_MIN: f64 = 1.0;
const DISK: &str = "scattered";

#[derive(Clone, Copy)]
struct Share {
    each: u64,
    parts: u64,
}

enum Kind {
    Lamina(Box<Datastore>),
    Qcow2 { image: PathBuf, options: Option<&'static str> },
}

struct Side {
    name: String,
    kind: Kind,
    server: Option<Server>,
    places: Places,
    /// Number of writes after which the side's disk is replaced by an empty one.
    most: u64,
    renewed: u64,
    seconds: f64,
    /// Total duration of the flushes after the slices, in seconds.
    flushing: f64,
    latencies: Vec<f64>,
}

impl Side {
    fn new(name: &str, kind: Kind, share: Share, room: u64) -> Side {
        let most = room * share.parts / PARTS / share.each;
        let (places, latencies) = (Places::new(0, most), Vec::new());
        Side { name: name.into(), kind, server: None, places, most, renewed: 0, seconds: 0.0, flushing: 0.0, latencies }
    }

    /// Creates and serves an empty disk.
    fn renew(&mut self, setting: &Setting) -> Result<()> {
        let mode = setting.plan.mode();
        match &self.kind {
            Kind::Lamina(datastore) => {
                if self.server.is_none() {
                    datastore.create(DISK, CAPACITY)?;
                    self.server = Some(datastore.serve(&Serving::plain(mode), DISK)?.0);
                } else {
                    datastore.delete(DISK)?;
                    datastore.create(DISK, CAPACITY)?;
                }
            }
            Kind::Qcow2 { image, options } => {
                if let Some(server) = self.server.take() {
                    server.service.stop()?;
                    setting.scratch.remove(image)?;
                }
                peers::create_qcow2(image, CAPACITY, *options)?;
                self.server = Some(peers::start_named(&setting.scratch, &self.name, image, "qcow2", mode, true)?);
            }
        }
        self.places = Places::new(setting.plan.seed + self.renewed, self.most);
        self.renewed += 1;
        setting.scratch.settle()
    }

    fn slice(&mut self, seconds: f64, before: f64) -> Result<()> {
        let Some(server) = &self.server else { return Ok(()) };
        let mut client = Client::connect(&server.endpoint.socket, &server.endpoint.export)?;
        let time = Duration::from_secs_f64(seconds.min(before - self.seconds).max(0.0));
        let taken = self.places.write_first(&mut client, time, &mut self.latencies)?;
        self.seconds += taken.as_secs_f64();
        let began = Instant::now();
        client.flush()?;
        self.flushing += began.elapsed().as_secs_f64();
        Ok(())
    }

    fn rate(&self) -> f64 {
        ratio(self.latencies.len() as f64, self.seconds)
    }

    /// The rate including the flush after each slice.
    fn flushed_rate(&self) -> f64 {
        ratio(self.latencies.len() as f64, self.seconds + self.flushing)
    }
}

fn lamina(setting: &Setting, (name, size): Journal, room: u64) -> Result<Side> {
    let word = name.replace(' ', "-");
    let path = setting.scratch.path(&word);
    let datastore = Datastore::init_at(&setting.lamina, &setting.scratch, &word, path, size)?;
    Ok(Side::new(&format!("lamina, {name}"), Kind::Lamina(Box::new(datastore)), LAMINA, room))
}

/// Runs this part of the study.
pub(super) fn measure(setting: &Setting, findings: &mut Vec<Finding>) -> Result<Value> {
    let plan = &setting.plan;
    let room = volume::room(setting.scratch.root())? / 100 * ROOM_PERCENT;
    let mut sides = Vec::new();
    if !plan.peers_only {
        for journal in JOURNALS {
            sides.push(lamina(setting, journal, room)?);
        }
    }
    let image = |name: &str| setting.scratch.path(&format!("{name}.qcow2"));
    let (plain, extended) = (image("plain"), image("extended"));
    sides.push(Side::new("qcow2", Kind::Qcow2 { image: plain, options: None }, QCOW2, room));
    let options = Some("extended_l2=on,cluster_size=128k");
    sides.push(Side::new("qcow2-ext", Kind::Qcow2 { image: extended, options }, QCOW2_EXTENDED, room));
    let slice = SLICE_MAX_S.min(plan.lasting / SLICES_MIN);
    say(&format!("scattered writes over 1 TiB, {:.0} s for each of {} sides", plan.lasting, sides.len()));
    for round in 0.. {
        // If only a rounding error of the time remains, no further slice is measured.
        let late = |side: &Side| plan.lasting - side.seconds < slice / 100.0;
        if sides.iter().all(late) {
            break;
        }
        for turn in 0..sides.len() {
            let number = (turn + round) % sides.len();
            let side = &mut sides[number];
            if late(side) {
                continue;
            }
            process::go_on()?;
            if side.server.is_none() || side.places.used_up() {
                side.renew(setting)?;
            }
            setting.scratch.settle()?;
            side.slice(slice, plan.lasting)?;
        }
    }
    let raw = sides.iter().map(described).collect();
    judge(plan.mode(), &sides, findings);
    for side in sides {
        if let Some(server) = side.server {
            server.service.stop()?;
        }
        let data = match side.kind {
            Kind::Lamina(datastore) => datastore.path().to_path_buf(),
            Kind::Qcow2 { image, .. } => image,
        };
        // Frees the space, because the measurement of stops needs it.
        if fs::exists(&data).unwrap_or(false) {
            setting.scratch.remove(&data)?;
        }
    }
    Ok(Value::Array(raw))
}

fn described(side: &Side) -> Value {
    json!({
        "side": side.name, "writes": side.latencies.len(), "seconds": side.seconds, "rate": side.rate(), "flushing_seconds": side.flushing,
        "p99_us": percentile(&side.latencies, 0.99), "longest_us": largest(&side.latencies), "disks": side.renewed,
    })
}

fn judge(mode: Mode, sides: &[Side], findings: &mut Vec<Finding>) {
    for side in sides {
        let name = format!("{} {}", mode.word(), side.name);
        findings.push(Finding::new(PROPERTY, format!("{name}: writes"), side.rate(), "/s"));
        findings.push(Finding::new(
            PROPERTY,
            format!("{name}: with a flush behind each slice"),
            side.flushed_rate(),
            "/s",
        ));
        findings.push(Finding::new(PROPERTY, format!("{name}: p99"), percentile(&side.latencies, 0.99) / 1e3, "ms"));
        findings.push(Finding::new(PROPERTY, format!("{name}: longest"), largest(&side.latencies) / 1e3, "ms"));
        if matches!(side.kind, Kind::Lamina(_)) {
            for other in sides.iter().filter(|other| matches!(other.kind, Kind::Qcow2 { .. })) {
                let what = format!("{name}: multiple of {}", other.name);
                findings.push(Finding::new(PROPERTY, what, ratio(side.rate(), other.rate()), "").at_least(RATIO_MIN));
            }
        }
    }
}
