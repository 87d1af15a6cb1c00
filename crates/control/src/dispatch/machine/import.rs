//! Importing machines of other programs.

use super::{Watch, start};
use crate::message::{Failure, ImportedMachine, MachineImport, MachineReply};
use disk::Progress;
use error::{Error, ErrorKind, Result};
use std::path::Path;
use vm::host::Host;
use vm::import::plan::{Plan, plan};
use vm::import::run::{self, How};
use vm::import::{read, sources};

/// Imports all machines at a path. If one machine fails, the others are imported nevertheless; if there is only one
/// machine, its error is returned.
pub fn run(host: &Host, request: &MachineImport, watch: &dyn Watch) -> Result<MachineReply> {
    let how = How { live: request.live, permitted: request.options.permitted.clone(), rate: request.rate };
    let (mut plans, mut failed) = (Vec::new(), Vec::new());
    for source in sources(&request.source)? {
        match plans_of(host, &source, request) {
            Ok(found) => plans.extend(found),
            Err(error) => failed.push((source.display().to_string(), error)),
        }
    }
    if request.options.name.is_some() && plans.len() + failed.len() > 1 {
        let text = format!(
            "'{}' describes several machines, and --name names one: import them one by one",
            request.source.display()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let alone = plans.len() + failed.len() == 1;
    let mut machines = Vec::with_capacity(plans.len());
    for mut plan in plans {
        let name = plan.definition.name.clone();
        match one(host, &mut plan, request, &how, watch) {
            Ok((snapshots, started)) => machines.push(ImportedMachine { plan, snapshots, started }),
            Err(error) => failed.push((name, error)),
        }
    }
    if alone && let Some((_, error)) = failed.pop() {
        return Err(error);
    }
    let failed = failed.iter().map(|(name, error)| (name.clone(), Failure::from(error))).collect();
    Ok(MachineReply::Imported { machines, failed, dry_run: request.dry_run })
}

fn plans_of(host: &Host, source: &Path, request: &MachineImport) -> Result<Vec<Plan>> {
    let found = read(source, &request.options, host.disks())?;
    found.into_iter().map(|foreign| plan(foreign, &request.options)).collect()
}

/// Imports one machine; returns its snapshots, and whether it was started.
fn one(
    host: &Host,
    plan: &mut Plan,
    request: &MachineImport,
    how: &How,
    watch: &dyn Watch,
) -> Result<(Vec<String>, bool)> {
    run::check(host, plan, how)?;
    if request.dry_run {
        return Ok((plan.snapshots.iter().map(|snapshot| snapshot.name.clone()).collect(), false));
    }
    let starts = request.start || request.live;
    if starts {
        // Checked first, because without a server the machine could not be started after its disks were copied.
        host.disks().server()?;
    }
    let progress: &dyn Progress = watch;
    let snapshots = run::run(host, plan, how, progress)?;
    if starts {
        let started = start(host, &plan.definition.name, false);
        started.map_err(|error| error.context("the machine was imported, but not started"))?;
    }
    Ok((snapshots, starts))
}
