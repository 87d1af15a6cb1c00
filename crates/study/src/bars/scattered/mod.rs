//! Random 4 KiB writes at queue depth 16 over a thin disk of 1 TiB, with the default journal and the smallest,
//! against qcow2 under the same load ([`rates`]); and how soon a datastore is open again after a stop and after a kill
//! under that load, and in the middle of deleting a thick disk of 500 GiB and of discarding 200 GiB ([`stops`]).

mod places;
mod rates;
mod stops;

use super::Setting;
use crate::error::Result;
use crate::report::Outcome;
use serde_json::json;

const PROPERTY: &str = "scattered writes";
const GIB: u64 = 1 << 30;
/// Capacity of the disk that is written to.
const CAPACITY: u64 = 1 << 40;
/// Requests in flight.
const DEPTH: usize = 16;

/// A journal's name in reports, and its size as `lamina init` takes it.
type Journal = (&'static str, Option<&'static str>);

const JOURNALS: [Journal; 2] = [("default journal", None), ("journal of 4 MiB", Some("4M"))];

/// Measures it.
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
    if raw.is_empty() {
        return Err(super::no_cell(&setting.plan, &["rates", "stops"]));
    }
    outcome.raw = raw.into();
    Ok(outcome)
}
