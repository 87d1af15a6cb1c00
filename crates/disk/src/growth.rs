//! How fast a datastore and its disks grow, and when they will be full.
//!
//! The owner of a datastore takes a sample in regular intervals. A sample has, for the datastore, the bytes in use, and
//! for each disk a counter: by how many bytes the disk has grown since its first sample. Samples are thinned with their
//! age, so their number is bounded. They are in one small record of the datastore, whose layout is in
//! `docs/format/growth.md`.
//!
//! 1. Only differences of counters have a meaning. A counter continues after a restart, but does not include growth
//!    from the time in which no process took samples.
//! 2. A rate is given for a window only if the samples cover at least half of it.
//! 3. Samples are statistics: a record that cannot be read is replaced, and a lost record harms no disk. So the record
//!    is written without a flush.
//! 4. The time is always an argument, so that tests control it.

use crate::sealed::{self, Kind};
use backend::Directory;
use error::{IoContext, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Name of the file, in the folder of the datastore.
const FILE: &str = "growth";
/// Kind of the file. The limit is sufficient for some ten thousand disks.
const KIND: Kind = Kind { word: "growth", version: 1, length_max: 64 << 20 };

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
const WEEK: u64 = 7 * DAY;

/// How samples are thinned: up to the age, the first sample of each interval is kept, in seconds.
type Thinning = [(u64, u64); 3];
const OF_DATASTORE: Thinning = [(HOUR, MINUTE), (WEEK, HOUR), (365 * DAY, DAY)];
const OF_DISK: Thinning = [(HOUR, 10 * MINUTE), (DAY, HOUR), (31 * DAY, DAY)];

/// Growth in a window that ends with the last sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthRate {
    /// Bytes by which the datastore or disk has grown; negative if it has shrunk.
    pub bytes: i64,
    /// The time in which the datastore or disk has grown by these bytes, in seconds: at least half of the window.
    pub seconds: u64,
    /// The time until the datastore is full at this rate, in seconds; `None` if the datastore does not grow.
    pub full_in: Option<u64>,
}

/// Growth of a datastore or of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// Time of the last sample, in seconds since 1970.
    pub until: u64,
    /// The rate in the last hour; `None` if there are too few samples, as for the other windows.
    pub hour: Option<GrowthRate>,
    /// The rate in the last 24 hours.
    pub day: Option<GrowthRate>,
    /// The rate in the last 7 days.
    pub week: Option<GrowthRate>,
}

/// A sample: the time in seconds since 1970, and the bytes.
type Sample = (u64, i64);

/// Samples of one counter, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct Series(Vec<Sample>);

impl Series {
    fn last(&self) -> Option<Sample> {
        self.0.last().copied()
    }

    /// Adds a sample. If the clock was set back, samples from the future are removed.
    fn add(&mut self, (now, bytes): Sample, thinning: &Thinning) {
        self.0.retain(|(time, _)| *time < now);
        let interval = |time: u64| {
            let age = now - time;
            let width = thinning.iter().find(|(limit, _)| age <= *limit).map(|(_, width)| *width)?;
            Some((width, time / width))
        };
        let mut before = None;
        self.0.retain(|(time, _)| {
            let own = interval(*time);
            let keep = own.is_some() && own != before;
            before = own;
            keep
        });
        self.0.push((now, bytes));
    }

    /// The growth in the last `window` seconds before the last sample. `left` bytes can be added until the datastore or
    /// disk is full.
    fn rate(&self, window: u64, left: u64) -> Option<GrowthRate> {
        let (end, bytes) = self.last()?;
        let (start, before) = self.0.iter().copied().find(|(time, _)| time.saturating_add(window) >= end)?;
        let seconds = end - start;
        if seconds == 0 || seconds < window / 2 {
            return None;
        }
        let bytes = bytes.saturating_sub(before);
        let full_in = u64::try_from(bytes).ok().filter(|bytes| *bytes > 0).map(|bytes| {
            let time = u128::from(left) * u128::from(seconds) / u128::from(bytes);
            u64::try_from(time).unwrap_or(u64::MAX)
        });
        Some(GrowthRate { bytes, seconds, full_in })
    }

    fn growth(&self, left: u64) -> Option<Growth> {
        let [hour, day, week] = [HOUR, DAY, WEEK].map(|window| self.rate(window, left));
        let (until, _) = self.last()?;
        (hour.is_some() || day.is_some() || week.is_some()).then_some(Growth { until, hour, day, week })
    }

    /// Whether the samples are in order.
    fn is_valid(&self) -> bool {
        self.0.windows(2).all(|pair| pair[0].0 < pair[1].0)
    }
}

/// The record of the samples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GrowthRecord {
    /// Bytes in use of the datastore.
    datastore: Series,
    /// The counter of each disk, by its UUID.
    disks: BTreeMap<String, Series>,
}

fn decode(bytes: &[u8]) -> Result<GrowthRecord> {
    let record: GrowthRecord = KIND.decode(bytes)?;
    match record.datastore.is_valid() && record.disks.values().all(Series::is_valid) {
        true => Ok(record),
        false => Err(KIND.corrupt("has samples out of order")),
    }
}

/// What a disk occupies, as a number whose differences are its growth. Numbers of different kinds cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Whether the disk is native.
    pub native: bool,
    /// The number, in bytes.
    pub bytes: i64,
}

#[derive(Default)]
struct GrowthState {
    record: GrowthRecord,
    /// The last reading of each disk in this process.
    readings: BTreeMap<String, Reading>,
}

/// The samples of a datastore.
pub(crate) struct Samples {
    directory: Arc<dyn Directory>,
    state: Mutex<GrowthState>,
}

impl Samples {
    /// Reads the samples that earlier owners have taken.
    pub fn open(directory: Arc<dyn Directory>) -> Self {
        let read = KIND.read(&*directory, FILE).and_then(|bytes| bytes.as_deref().map(decode).transpose());
        let record = read.unwrap_or_else(|error| {
            tracing::warn!(%error, "earlier growth of the datastore is not known");
            None
        });
        let state = GrowthState { record: record.unwrap_or_default(), readings: BTreeMap::new() };
        Self { directory, state: Mutex::new(state) }
    }

    /// Adds a sample: the bytes in use of the datastore, and a reading of each disk by its UUID. Samples of other disks
    /// are removed, because these disks do not exist any more.
    pub fn add(&self, now: u64, used: u64, disks: BTreeMap<String, Reading>) {
        let mut state = self.state.lock();
        let GrowthState { record, readings } = &mut *state;
        record.datastore.add((now, i64::try_from(used).unwrap_or(i64::MAX)), &OF_DATASTORE);
        record.disks.retain(|uuid, _| disks.contains_key(uuid));
        for (uuid, reading) in &disks {
            // The first reading of a process, or of a disk that has another format now, has nothing to compare with.
            let before = readings.get(uuid).filter(|before| before.native == reading.native);
            let grown = before.map_or(0, |before| reading.bytes.saturating_sub(before.bytes));
            let series = record.disks.entry(uuid.clone()).or_default();
            let counter = series.last().map_or(0, |(_, counter)| counter);
            series.add((now, counter.saturating_add(grown)), &OF_DISK);
        }
        *readings = disks;
    }

    /// Writes the record, unless it is empty.
    pub fn write(&self) -> Result<()> {
        let record = self.state.lock().record.clone();
        if record == GrowthRecord::default() {
            return Ok(());
        }
        let bytes = KIND.encode(&record)?;
        sealed::put_unflushed(&*self.directory, FILE, &bytes).during(|| "recording the growth of the datastore".into())
    }

    /// The growth of the datastore, to which `left` bytes can be added.
    pub fn of_datastore(&self, left: u64) -> Option<Growth> {
        self.state.lock().record.datastore.growth(left)
    }

    /// The growth of a disk, to which `left` bytes can be added.
    pub fn of_disk(&self, uuid: &str, left: u64) -> Option<Growth> {
        self.state.lock().record.disks.get(uuid)?.growth(left)
    }
}

#[cfg(test)]
mod tests;
