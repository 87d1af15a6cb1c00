//! A disk is sent over TLS to a second server on this machine. The transfer is compared with a full clone in the first
//! server's datastore. Then the disk is sent again, after a part of it has changed.
//!
//! Both commands return when the new disk is durable, read a source that is in the page cache, and write to the same
//! file system. In a transfer two servers share the processors; in a local clone one server has the processors alone.

use super::{BLOCK, Setting, fill, say, write_blocks};
use crate::datastore::{Datastore, Keys, OverTcp, Serving};
use crate::error::Result;
use crate::peers::Server;
use crate::plan::Mode;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Name of the measured property in the report.
const PROPERTY: &str = "remote clones";

/// Least speed of a remote clone, relative to a local one.
const SPEED_SHARE_MIN: f64 = 0.5;
/// Part of the disk that changes before the second transfer, in percent.
const CHANGED_PERCENT: u64 = 5;
/// Most bytes sent by the second transfer, relative to the changed bytes.
const SENT_SHARE_MAX: f64 = 1.01;
/// Size of a change in bytes.
const CHANGE: u64 = 64 << 10;

const DISK: &str = "disk";

/// A server that receives disks.
pub(super) struct Receiver {
    pub serving: Server,
    address: SocketAddr,
    keys: Keys,
}

impl Receiver {
    /// Serves a datastore with a disk `disk`.
    pub fn start(datastore: &Datastore, keys: Keys, disk: &str) -> Result<Receiver> {
        let over_tcp = Some((OverTcp::Receive, keys.clone()));
        let (serving, _) = datastore.serve(&Serving { over_tcp, ..Serving::plain(Mode::Buffered) }, disk)?;
        Ok(Receiver { serving, address: datastore.address(OverTcp::Receive)?, keys })
    }

    /// Arguments of the command that sends `source` to this receiver.
    pub fn verb(&self, source: &str, name: &str) -> Vec<String> {
        let target = format!("lamina://{}/{name}", self.address);
        let certificate = self.keys.certificate.display().to_string();
        let key = self.keys.key.display().to_string();
        let words = ["disk", "send", source, &target, "--incremental", "--tls-ca", &certificate];
        let tls = ["--tls-cert", &certificate, "--tls-key", &key];
        words.into_iter().chain(tls).map(str::to_owned).collect()
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let keys = Keys::make(&setting.scratch)?;
    let here = Datastore::init(&setting.lamina, &setting.scratch, "here")?;
    let there = Datastore::init(&setting.lamina, &setting.scratch, "there")?;
    here.create(DISK, plan.disk_size)?;
    there.create("some", BLOCK)?;
    let (server, _) = here.serve(&Serving::plain(Mode::Buffered), DISK)?;
    let receiver = Receiver::start(&there, keys, "some")?;
    fill(&server.endpoint, plan.disk_size)?;
    here.snapshot(DISK, "golden")?;

    let send = |snapshot: &str, name: &str| -> Result<(Duration, Value)> {
        let began = std::time::Instant::now();
        let sent = here.ask(&receiver.verb(&format!("{DISK}@{snapshot}"), name))?;
        Ok((began.elapsed(), sent))
    };
    say("clones at another server against clones in the same datastore");
    let mut times = Vec::new();
    let mut raw = Vec::new();
    for run in 0..plan.runs {
        let remote = || -> Result<f64> {
            prepare(setting, &here, &there)?;
            let (time, _) = send("golden", "copy")?;
            there.delete("copy")?;
            Ok(time.as_secs_f64())
        };
        let local = || -> Result<f64> {
            prepare(setting, &here, &there)?;
            let time = here.verb(&["clone", &format!("{DISK}@golden"), "copy", "--full"])?;
            here.delete("copy")?;
            Ok(time.as_secs_f64())
        };
        let (remote, local) = if run % 2 == 0 {
            let first = remote()?;
            (first, local()?)
        } else {
            let first = local()?;
            (remote()?, first)
        };
        times.push((remote, local));
        raw.push(json!({ "remote_s": remote, "local_s": local }));
    }
    let (remote, local): (Vec<f64>, Vec<f64>) = times.into_iter().unzip();
    let mut outcome = Outcome::default();
    let share = ratio(median(&local), median(&remote));
    outcome.findings.extend([
        Finding::new(PROPERTY, "clone at another server", median(&remote), "s"),
        Finding::new(PROPERTY, "full clone in the same datastore", median(&local), "s"),
        Finding::new(PROPERTY, "remote clone: speed against a local one", share, "").at_least(SPEED_SHARE_MIN),
    ]);

    say("a second clone after a change");
    send("golden", "first")?;
    let pieces = plan.disk_size / CHANGE;
    let mut changed = Random::new(plan.seed).order(pieces as u32);
    changed.truncate((pieces * CHANGED_PERCENT / 100) as usize);
    write_blocks(&server.endpoint, changed.iter().map(|piece| u64::from(*piece)), CHANGE)?;
    here.snapshot(DISK, "later")?;
    let (time, sent) = send("later", "second")?;
    let bytes = changed.len() as u64 * CHANGE;
    let data = sent["data"].as_u64().unwrap_or(u64::MAX);
    let wire = sent["wire"].as_u64().unwrap_or(u64::MAX);
    outcome.findings.extend([
        Finding::new(PROPERTY, "second clone: data sent against data changed", data as f64 / bytes as f64, "")
            .at_most(SENT_SHARE_MAX),
        Finding::new(PROPERTY, "second clone: bytes on the wire against data changed", wire as f64 / bytes as f64, ""),
        Finding::new(PROPERTY, "second clone", time.as_secs_f64(), "s"),
    ]);
    outcome.raw = json!({ "runs": raw, "changed": bytes, "second": sent });
    receiver.serving.service.stop()?;
    server.service.stop()?;
    Ok(outcome)
}

/// Waits until the space of the previous clone is returned, so that it does not disturb the next measurement.
fn prepare(setting: &Setting, here: &Datastore, there: &Datastore) -> Result<()> {
    setting.scratch.rest(here.path())?;
    setting.scratch.rest(there.path())?;
    scratch::warm(here.path())
}
