//! Migration of a thick disk to thin and to native, while the disk is in use under random writes.
//!
//! See [`super::consolidate`] for the measurements. A load below the full one is a share of the rate that both formats
//! can serve: after the migration, the disk has to serve it in its new format.

use super::consolidate::{Work, watched};
use super::load::{Load, Pace, Versions};
use super::{Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::report::Outcome;
use serde_json::Value;

const TARGETS: [&str; 2] = ["thin", "native"];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for target in TARGETS.into_iter().filter(|target| plan.wants(target)) {
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, &format!("migrate-{target}"))?;
        let disk = "disk";
        datastore.create_vmdk(disk, plan.disk_size, "eagerzeroedthick", None)?;
        let (server, _) = datastore.serve(&Serving::plain(plan.mode()), disk)?;
        let limit = match plan.load {
            100 => None,
            percent => Some(rate_of(setting, &datastore, target, percent)?),
        };
        say(&format!("filling a thick disk, to be moved to {target}"));
        let versions = Versions::fill(&datastore.endpoint(disk), plan.disk_size)?;
        setting.scratch.rest(datastore.path())?;
        say(&format!("moving the thick disk to {target} under load"));
        let what = format!("thick to {target}");
        let verb = ["disk", "migrate", disk, "--format", target];
        let work = Work { datastore: &datastore, verb: &verb, what: &what, bytes: plan.disk_size, limit };
        raw.push(watched(setting, &work, disk, versions, &mut outcome)?);
        server.service.stop()?;
        setting.scratch.remove(datastore.path())?;
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// The given share of the random writes that a full disk of the target format serves, per second.
fn rate_of(setting: &Setting, datastore: &Datastore, target: &str, percent: u32) -> Result<f64> {
    let (disk, size) = ("target", setting.plan.disk_size);
    say(&format!("measuring a {target} disk"));
    match target {
        "native" => datastore.create(disk, size)?,
        provisioning => datastore.create_vmdk(disk, size, provisioning, None)?,
    }
    let endpoint = datastore.endpoint(disk);
    let versions = Versions::fill(&endpoint, size)?;
    setting.scratch.rest(datastore.path())?;
    let start = || Load::verified(&endpoint, versions, setting.plan.seed, Pace::Full);
    let (rate, _) = Load::rate(percent, start, Load::finish_verified)?;
    datastore.delete(disk)?;
    Ok(rate)
}
