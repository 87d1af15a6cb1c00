//! A hundred linked clones of a machine, with durable disks and definitions, for several disk sizes.
//!
//! No clone is started. The measured time is that of the whole command, including the start of its process. Data of the
//! planned disk size is spread evenly over each disk.

use super::{LAYOUT_DEPTH, Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::plan::Mode;
use crate::report::{Finding, Outcome};
use crate::statistics::{median, ratio};
use serde_json::json;

/// Name of the measured property in the report.
const PROPERTY: &str = "linked machine clones";

/// Clones of one command.
const CLONES: u32 = 100;
/// Limit of the time for all clones of one command.
const SECONDS_MAX: f64 = 1.0;
/// Most time with the slowest disk size, relative to the fastest one.
const RATIO_MAX: f64 = 1.5;
/// Capacities of the parents' disks, in GiB.
const SIZES: [u64; 3] = [1, 16, 64];
/// The capacity to which the limit applies.
const BAR_SIZE: u64 = 16;
const PIECE: u64 = 1 << 20;

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "machines")?;
    datastore.create("first", PIECE)?;
    let (server, _) = datastore.serve(&Serving::plain(Mode::Buffered), "first")?;
    for gib in SIZES {
        let (parent, capacity) = (format!("parent{gib}"), gib << 30);
        let content = plan.disk_size.min(capacity);
        say(&format!("a disk of {gib} GiB with {} MiB of content", content >> 20));
        datastore.verb(&["vm", "create", &parent, "--memory", "64M", "--disk-size", &capacity.to_string()])?;
        spread(&datastore.endpoint(&parent), capacity, content)?;
    }
    setting.scratch.settle()?;
    // The sizes are measured in turn, and the clones are deleted in between, so that only the size differs.
    let mut times = vec![Vec::new(); SIZES.len()];
    for run in 0..plan.runs as usize {
        for turn in 0..SIZES.len() {
            let index = (run + turn) % SIZES.len();
            let parent = format!("parent{}", SIZES[index]);
            let count = CLONES.to_string();
            let words = ["vm", "clone", &parent, "--linked", "--count", &count, "--name-pattern", "clone-%03d"];
            times[index].push(datastore.verb(&words)?.as_secs_f64());
            let mut words = vec!["vm".to_owned(), "delete".to_owned()];
            words.extend((1..=CLONES).map(|number| format!("clone-{number:03}")));
            datastore.verb(&words)?;
        }
    }
    let mut outcome = Outcome::default();
    let medians: Vec<f64> = times.iter().map(|times| median(times)).collect();
    for (gib, middle) in SIZES.iter().zip(&medians) {
        let what = format!("{CLONES} linked clones, disk of {gib} GiB");
        outcome.findings.push(match *gib == BAR_SIZE {
            true => Finding::new(PROPERTY, &what, *middle, "s").at_most(SECONDS_MAX),
            false => Finding::new(PROPERTY, &what, *middle, "s"),
        });
    }
    let slowest = medians.iter().copied().fold(0.0, f64::max);
    let fastest = medians.iter().copied().fold(f64::INFINITY, f64::min);
    let what = "linked clones: slowest size against fastest";
    outcome.findings.push(Finding::new(PROPERTY, what, ratio(slowest, fastest), "").at_most(RATIO_MAX));
    server.service.stop()?;
    outcome.raw = json!({ "clones": CLONES, "sizes_gib": SIZES, "seconds": times });
    Ok(outcome)
}

/// Writes this many bytes in pieces spread evenly over the disk, and makes them durable.
pub fn spread(endpoint: &Endpoint, capacity: u64, content: u64) -> Result<()> {
    let (pieces, places) = (content / PIECE, capacity / PIECE);
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let requests =
        (0..pieces).map(|piece| Request::Write { offset: piece * places / pieces * PIECE, length: PIECE as u32 });
    client.run(LAYOUT_DEPTH, requests, |_| ())?;
    client.flush()
}
