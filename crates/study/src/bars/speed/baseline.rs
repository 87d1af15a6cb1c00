//! lamina and the baseline alone, in slices that alternate: differences of a few percent are smaller than those between
//! long runs on a machine with other activity.

use super::{BASELINE_SHARE_MIN, Cell, DISK, PROPERTY, import, prepare};
use crate::bars::slices::{self, Slice, share};
use crate::bars::{Setting, say};
use crate::datastore::Serving;
use crate::error::{Error, Result};
use crate::nbd::Client;
use crate::peers::{Images, Server};
use crate::plan::Mode;
use crate::report::{Finding, Outcome, figure, table};
use crate::statistics::median;
use serde_json::{Value, json};

/// Measures the given cells.
pub(super) fn measure(setting: &Setting, cells: &[&Cell]) -> Result<Outcome> {
    let plan = &setting.plan;
    let program = setting.baseline.as_ref();
    let program = program.ok_or_else(|| Error::Usage("--baseline-only needs --baseline".into()))?;
    let images = Images::make(&setting.scratch, plan.disk_size, plan.seed)?;
    let datastores =
        [import(setting, &setting.lamina, "speed", &images)?, import(setting, program, "baseline", &images)?];
    let (mut outcome, mut raw, mut rows) = (Outcome::default(), Vec::new(), Vec::new());
    for &mode in &plan.modes {
        let servers =
            [datastores[0].serve(&Serving::plain(mode), DISK)?.0, datastores[1].serve(&Serving::plain(mode), DISK)?.0];
        for cell in cells {
            let name = format!("{} {}", mode.word(), cell.name);
            say(&name);
            let Sides { rates, processor } = measure_cell(setting, mode, cell, &servers)?;
            let share = share(&rates[0], &rates[1]);
            let what = format!("{name}: share of the baseline");
            outcome.findings.push(Finding::new(PROPERTY, what, share, "").at_least(BASELINE_SHARE_MIN));
            let [ours, baseline] = [median(&rates[0]), median(&rates[1])];
            let [used, used_by_baseline] = processor;
            rows.push(vec![
                name,
                figure(ours),
                figure(baseline),
                figure(share),
                figure(used),
                figure(used_by_baseline),
            ]);
            raw.push(json!({
                "mode": mode, "cell": cell.name, "lamina": rates[0], "baseline": rates[1], "processor_us": processor,
            }));
        }
        for server in servers {
            server.service.stop()?;
        }
    }
    let head = ["cell", "lamina, requests/s", "baseline", "share", "processor time, us/request", "baseline"];
    println!("{}", table(&head, &rows));
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// Requests per second in each round, and the processor time per request, of lamina and of the baseline.
struct Sides {
    rates: [Vec<f64>; 2],
    processor: [f64; 2],
}

fn measure_cell(setting: &Setting, mode: Mode, cell: &Cell, servers: &[Server; 2]) -> Result<Sides> {
    let plan = &setting.plan;
    let slice = Slice {
        pattern: cell.pattern,
        block: cell.block,
        depth: cell.depth,
        flush_each: cell.flush_each,
        size: plan.disk_size,
        seconds: slices::seconds(plan),
    };
    let connect = |server: &Server| Client::connect(&server.endpoint.socket, &server.endpoint.export);
    let mut clients = [connect(&servers[0])?, connect(&servers[1])?];
    let mut rates = [Vec::new(), Vec::new()];
    let mut processor = [Vec::new(), Vec::new()];
    for round in 0..slices::rounds(plan) {
        for turn in 0..servers.len() {
            let side = (turn + round) % servers.len();
            let server = &servers[side];
            prepare(setting, mode, cell, server)?;
            let before = server.service.processor_time()?;
            let rate = slice.run(&mut clients[side], plan.seed + round as u64)?;
            let used = server.service.processor_time()?.saturating_sub(before);
            rates[side].push(rate);
            processor[side].push(used.as_secs_f64() * 1e6 / (rate * slice.duration()));
        }
    }
    Ok(Sides { rates, processor: processor.map(|all| median(&all)) })
}
