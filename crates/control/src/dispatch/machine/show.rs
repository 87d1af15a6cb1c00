//! Information about machines and their state.

use crate::message::{Failure, MachineActivity, MachineInfo, MachineMemory, MachineReply, MachineSummary};
use error::Result;
use vm::definition::Vnc;
use vm::host::Host;
use vm::instant::freeze;
use vm::machine::{Machine, MachineState, MemoryRecord};
use vm::qemu::passt;
use vm::snapshots;

fn activity(machine: &Machine) -> Result<MachineActivity> {
    Ok(match machine.glance()? {
        MachineState::Stopped if freeze::frozen(machine)?.is_some() => MachineActivity::Frozen,
        MachineState::Stopped => MachineActivity::Stopped,
        MachineState::Running => MachineActivity::Running,
        MachineState::Paused => MachineActivity::Paused,
        MachineState::Other => MachineActivity::Busy,
    })
}

/// All machines.
pub fn all(host: &Host) -> Result<MachineReply> {
    let mut machines = Vec::new();
    for machine in host.machines().list()? {
        let definition = match machine.read_definition() {
            // The machine was deleted after it was listed.
            Err(_) if !machine.folder().exists() => continue,
            definition => definition.map_err(|error| Failure::from(&error)),
        };
        machines.push(MachineSummary { name: machine.name(), definition, state: activity(&machine)? });
    }
    Ok(MachineReply::Machines(machines))
}

/// One machine.
pub fn one(host: &Host, name: &str) -> Result<MachineReply> {
    let machine = host.machines().get(name)?;
    let definition = machine.definition()?;
    let state = activity(&machine)?;
    let process = machine.process()?;
    let snapshots = snapshots::list(&machine)?;
    let children = host.children(&machine)?;
    let frozen = freeze::frozen(&machine)?;
    let memory = match &process {
        Some(_) => machine.memory().ok(),
        None => None,
    };
    let image = match (&frozen, &memory) {
        (Some(id), _) | (None, Some(MemoryRecord::Image(id))) => Some(id.clone()),
        _ => None,
    };
    // The machine is shown even if no usable QEMU is found.
    let features = host.features();
    let (accelerator, why_not_kvm) = match &features {
        Ok(features) => (features.accelerator.name().to_owned(), features.why_not_kvm.clone()),
        Err(error) => ("none".to_owned(), Some(error.to_string())),
    };
    let passt = passt::has_user(&definition).then(|| match (&process, &features) {
        (Some(_), _) if machine.uses_passt() => Ok(()),
        (_, Ok(features)) => match (passt::find(features, &definition), &process) {
            (Ok(_), Some(_)) => Err("it did not start, or the guest continues from a state without it".to_owned()),
            (found, _) => found.map(drop).map_err(str::to_owned),
        },
        (_, Err(error)) => Err(error.to_string()),
    });
    let disks = host.disks().all()?;
    let present = definition.disks.iter().filter_map(|disk| Some((disk.name.clone(), disks.get(&disk.name)?.capacity)));
    let run = machine.run();
    Ok(MachineReply::Machine(Box::new(MachineInfo {
        state,
        pid: process.as_ref().map(vm::qemu::process::Process::pid),
        qemu: features.as_ref().ok().map(|features| features.version.clone()),
        accelerator,
        why_not_kvm,
        console: process.is_some().then(|| run.console()),
        vnc: (process.is_some() && definition.vnc == Some(Vnc::Unix)).then(|| run.vnc()),
        vnc_password: matches!(definition.vnc, Some(Vnc::Tcp(_))).then(|| vm::screen::password_file(&machine)),
        monitor: process.is_some().then(|| run.monitor()),
        agent: process.is_some().then(|| run.agent()),
        console_log: run.console_log(),
        log: run.errors(),
        capacities: present.collect(),
        memory: memory.map(|memory| match memory {
            MemoryRecord::Private => MachineMemory::Private,
            MemoryRecord::Own(_) => MachineMemory::OwnFile,
            MemoryRecord::Image(_) => MachineMemory::Shared,
        }),
        passt,
        snapshots,
        frozen,
        image,
        children,
        folder: machine.folder().to_path_buf(),
        definition,
    })))
}
