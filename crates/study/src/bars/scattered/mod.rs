//! Random 4 KiB writes at queue depth 16 over a thin disk of 1 TiB, with the default journal and the smallest one,
//! compared with qcow2 under the same load ([`rates`]). Also the time until a datastore is open again ([`stops`]) after
//! a stop and after a kill: under that load, during the deletion of a thick disk of 500 GiB, and during a discard of
//! 200 GiB. And the times of requests of other clients while such writes fill the smallest journal ([`pressure`]).

mod places;
mod pressure;
mod rates;
mod stops;

use super::Setting;
use crate::error::Result;
use crate::report::Outcome;
use serde_json::json;

const PROPERTY: &str = "scattered writes";
const GIB: u64 = 1 << 30;
/// Capacity of the disk that is written.
const CAPACITY: u64 = 1 << 40;
/// Requests in flight.
const DEPTH: usize = 16;

/// Name of a journal in reports, and its size as in `lamina init`.
type Journal = (&'static str, Option<&'static str>);

const JOURNALS: [Journal; 2] = [("default journal", None), ("journal of 4 MiB", Some("4M"))];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    if setting.plan.wants("rates") {
        raw.push(json!({ "rates": rates::measure(setting, &mut outcome.findings)? }));
    }
    if setting.plan.wants("stops") {
        for journal in JOURNALS {
            raw.push(json!({ "stops": stops::measure(setting, journal, &mut outcome.findings)? }));
        }
    }
    if setting.plan.wants("pressure") {
        raw.push(json!({ "pressure": pressure::measure(setting, &mut outcome.findings)? }));
    }
    if raw.is_empty() {
        return Err(super::no_cell(&setting.plan, &["rates", "stops", "pressure"]));
    }
    outcome.raw = raw.into();
    Ok(outcome)
}
