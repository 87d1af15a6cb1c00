//! Full clones of a stopped and of a running machine, compared with `cp` of the same data.
//!
//! Half of the disk is empty, and its content is in pieces between holes. A clone command returns when the clone is
//! durable, so the time of `cp` includes a flush. Both commands read a source that is in the page cache.

use super::vm_linked::spread;
use super::{Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::plan::Mode;
use crate::process;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// Name of the measured property in the report.
const PROPERTY: &str = "full machine clones";

/// Least speed of a clone, relative to the speed of cp.
const COPY_SHARE_MIN: f64 = 0.9;
const PARENT: &str = "parent";
const CLONE: &str = "clone";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "machines")?;
    datastore.create("first", 1 << 20)?;
    let (server, _) = datastore.serve(&Serving::plain(Mode::Buffered), "first")?;
    let capacity = plan.disk_size * 2;
    datastore.verb(&["vm", "create", PARENT, "--memory", "64M", "--disk-size", &capacity.to_string()])?;
    spread(&datastore.endpoint(PARENT), capacity, plan.disk_size)?;
    let (raw, copy) = (setting.scratch.path("disk.raw"), setting.scratch.path("copy.raw"));
    process::run(Command::new("nbdcopy").arg(datastore.endpoint(PARENT).uri()).arg(&raw))?;
    let prepare = || -> Result<()> {
        setting.scratch.rest(datastore.path())?;
        scratch::warm(&raw)?;
        scratch::warm(datastore.path())
    };
    let clone = || -> Result<Duration> {
        prepare()?;
        let time = datastore.verb(&["vm", "clone", PARENT, CLONE, "--full"])?;
        datastore.verb(&["vm", "delete", CLONE])?;
        Ok(time)
    };
    let cp = || -> Result<Duration> {
        prepare()?;
        let began = Instant::now();
        process::run(Command::new("cp").arg("--sparse=auto").arg(&raw).arg(&copy))?;
        process::run(Command::new("sync").arg(&copy))?;
        let time = began.elapsed();
        setting.scratch.remove(&copy)?;
        Ok(time)
    };
    let mut outcome = Outcome::default();
    let mut samples = Vec::new();
    for hot in [false, true] {
        let how = if hot { "hot" } else { "cold" };
        say(&format!("{how} full clones against cp"));
        if hot {
            datastore.verb(&["vm", "start", PARENT])?;
        }
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for run in 0..plan.runs {
            if run % 2 == 0 {
                ours.push(clone()?.as_secs_f64());
                theirs.push(cp()?.as_secs_f64());
            } else {
                theirs.push(cp()?.as_secs_f64());
                ours.push(clone()?.as_secs_f64());
            }
        }
        let share = ratio(median(&theirs), median(&ours));
        outcome.findings.extend([
            Finding::new(PROPERTY, format!("{how} full clone"), median(&ours), "s"),
            Finding::new(PROPERTY, format!("cp and flush, beside {how} clones"), median(&theirs), "s"),
            Finding::new(PROPERTY, format!("{how} full clone: speed against cp"), share, "").at_least(COPY_SHARE_MIN),
        ]);
        samples.push(json!({ "hot": hot, "clone_s": ours, "cp_s": theirs }));
    }
    datastore.verb(&["vm", "stop", "--force", PARENT])?;
    server.service.stop()?;
    outcome.raw = json!({ "content": plan.disk_size, "capacity": capacity, "runs": samples });
    Ok(outcome)
}
