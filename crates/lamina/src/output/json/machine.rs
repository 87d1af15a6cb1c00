//! Replies about machines as JSON.

use crate::output::words;
use control::{Cloned, ClonedMachine, Failure, ImportedMachine, MachineInfo, MachineReply, MachineVerb};
use serde_json::{Value, json};
use vm::agent::Execution;
use vm::definition::{Cdrom, Definition, Disk, Network};
use vm::snapshots::Record;

/// The JSON output for a reply.
pub fn value(verb: &MachineVerb, reply: &MachineReply) -> Value {
    match reply {
        MachineReply::Created(made) | MachineReply::Edited(made) => definition(made),
        MachineReply::Renamed { name, definition: renamed } => {
            let mut value = definition(renamed);
            value["former_name"] = json!(name);
            value
        }
        MachineReply::Imported { machines, failed, dry_run } => json!({
            "machines": machines.iter().map(|machine| imported(machine, *dry_run)).collect::<Vec<Value>>(),
            "failed": failures(failed), "dry_run": dry_run,
        }),
        MachineReply::Exported { machine, archive, capacity, notes } => json!({
            "name": machine, "archive": archive, "capacity": capacity, "notes": notes,
        }),
        MachineReply::BackedUp(done) => {
            let mut value = json!(done.created);
            value["remark"] = json!(done.quiet);
            value
        }
        MachineReply::Restored(restored) => {
            let mut value = definition(&restored.definition);
            value["backup"] = json!(restored.id);
            value["source"] = json!(restored.source);
            value["data"] = json!(restored.data);
            value["new_identity"] = json!(restored.new_identity);
            value["ejected"] = json!(restored.ejected);
            value["live"] = json!(restored.live);
            value["started"] = json!(restored.started);
            value["seconds"] = json!(restored.seconds);
            value
        }
        MachineReply::Each { done, failed } => json!({ words::done(verb): done, "failed": failures(failed) }),
        MachineReply::Machine(info) => machine(info),
        MachineReply::Machines(machines) => {
            let machines = machines.iter().map(|machine| {
                let mut value = match &machine.definition {
                    Ok(known) => definition(known),
                    Err(_) => json!({ "name": machine.name }),
                };
                value["state"] = json!(machine.state);
                value["problem"] = json!(machine.definition.as_ref().err().map(Failure::message));
                value
            });
            json!({ "machines": machines.collect::<Vec<Value>>() })
        }
        MachineReply::SnapshotTaken { machine, record, stun_ms, .. } => {
            let mut value = snapshot(machine, record);
            value["stun_ms"] = json!(stun_ms);
            value["remark"] = json!(words::how_taken(reply));
            value
        }
        MachineReply::Snapshots { machine, records } => json!({ "snapshots": snapshots(machine, records) }),
        MachineReply::SnapshotDeleted(gone) => json!({ "deleted": format!("{}@{}", gone.machine, gone.name) }),
        MachineReply::Reverted { snapshot, state, clock } => json!({
            "name": snapshot.machine, "snapshot": snapshot.name, "state": state,
            "clock_set": clock.as_ref().map(Result::is_ok),
            "clock_problem": clock.as_ref().and_then(|clock| clock.as_ref().err()),
        }),
        MachineReply::Cloned(cloned) => clones(cloned),
        MachineReply::Sent { sent, .. } => json!(sent),
        MachineReply::Frozen { name, image, stop_ms, disks_ms, state_ms } => json!({
            "name": name, "image": image, "stop_ms": stop_ms, "disks_ms": disks_ms, "state_ms": state_ms,
        }),
        MachineReply::Console { socket, log, .. } => json!({ "console": socket, "console_log": log }),
        MachineReply::Screenshot { name, path } => json!({ "name": name, "file": path }),
        MachineReply::KeysSent { name } => json!({ "name": name }),
        MachineReply::Executed { execution, .. } => executed(execution),
    }
}

fn executed(execution: &Execution) -> Value {
    let mut value = json!({
        "ended": false, "exit_code": null, "signal": null, "stdout": "", "stdout_cut": false, "stderr": "",
        "stderr_cut": false, "problem": null,
    });
    match execution {
        Execution::Ended(ended) => {
            value["ended"] = json!(true);
            value["exit_code"] = json!(ended.code);
            value["signal"] = json!(ended.signal);
            value["stdout"] = json!(String::from_utf8_lossy(&ended.output));
            value["stdout_cut"] = json!(ended.output_cut);
            value["stderr"] = json!(String::from_utf8_lossy(&ended.errors));
            value["stderr_cut"] = json!(ended.errors_cut);
        }
        Execution::NotFound(_) => value["problem"] = json!("not_found"),
        Execution::NotRunnable(_) => value["problem"] = json!("not_runnable"),
        Execution::StillRuns { .. } => value["problem"] = json!("still_runs"),
    }
    value
}

fn failures(failed: &[(String, Failure)]) -> Vec<Value> {
    failed.iter().map(|(name, failure)| json!({ "name": name, "error": failure.message() })).collect()
}

fn definition(definition: &Definition) -> Value {
    let disk = |it: &Disk| json!({ "name": it.name, "slot": it.slot, "bus": it.bus, "unit": it.unit });
    let card =
        |it: &Network| json!({ "mac": it.mac, "link": words::link(&it.link), "slot": it.slot, "model": it.model });
    let drive = |it: &Cdrom| json!({ "unit": it.unit, "file": it.file });
    let cdroms: Vec<Value> = definition.cdroms.iter().map(drive).collect();
    let disks: Vec<Value> = definition.disks.iter().map(disk).collect();
    let networks: Vec<Value> = definition.networks.iter().map(card).collect();
    let platform = &definition.platform;
    json!({
        "name": definition.name, "uuid": definition.uuid, "cpus": definition.cpus, "cpu_model": definition.cpu_model,
        "memory": definition.memory,
        "ports": definition.ports, "autostart": definition.autostart, "qemu_memory": definition.qemu_memory, "write_errors": definition.write_errors.name(), "qemu_arguments": definition.arguments,
        "run_as": definition.run_as, "new_identity": definition.new_identity,
        "platform": {
            "chipset": platform.chipset, "firmware": platform.firmware, "secure_boot": platform.secure_boot,
            "cores": platform.cores, "clock": platform.clock, "display": platform.display,
        },
        "boot": definition.boot, "boot_order": definition.boot_devices(), "vnc": definition.vnc, "vnc_tls": definition.vnc_tls, "disks": disks, "cdroms": cdroms, "seed": definition.seed, "networks": networks, "origin": definition.origin,
    })
}

fn imported(machine: &ImportedMachine, dry_run: bool) -> Value {
    let ImportedMachine { plan, snapshots, started } = machine;
    let mut value = definition(&plan.definition);
    for (index, network) in plan.definition.networks.iter().enumerate() {
        value["networks"][index]["mac"] = json!(plan.reported_address(network, dry_run));
    }
    value["source"] = json!(plan.source);
    value["format"] = json!(plan.format);
    value["images"] = json!(plan.disks);
    value["snapshots"] = json!(snapshots);
    value["notes"] = json!(plan.notes);
    value["started"] = json!(started);
    value
}

fn snapshot(machine: &str, record: &Record) -> Value {
    let disks: Vec<String> = record.disks.iter().map(|it| format!("{}@{}", it.disk, it.name)).collect();
    json!({
        "machine": machine, "name": record.name, "created": record.created, "consistency": record.consistency,
        "memory": record.has_memory(), "disks": disks,
    })
}

fn snapshots(machine: &str, records: &[Record]) -> Vec<Value> {
    records.iter().map(|record| snapshot(machine, record)).collect()
}

fn machine(info: &MachineInfo) -> Value {
    let mut value = definition(&info.definition);
    let children = info.children.iter().map(|(at, child)| json!({ "snapshot": at, "name": child }));
    let more = json!({
        "state": info.state, "pid": info.pid, "qemu": info.qemu, "accelerator": info.accelerator,
        "why_not_kvm": info.why_not_kvm, "console": info.console, "vnc_socket": info.vnc,
        "vnc_password": info.vnc_password, "monitor": info.monitor, "agent": info.agent,
        "console_log": info.console_log, "log": info.log,
        "passt": info.passt.as_ref().map(Result::is_ok),
        "why_not_passt": info.passt.as_ref().and_then(|passt| passt.as_ref().err()),
        "snapshots": snapshots(&info.definition.name, &info.snapshots),
        "frozen": info.frozen, "image": info.image, "children": children.collect::<Vec<Value>>(),
        "children_count": info.children.len(),
        "folder": info.folder,
    });
    if let (Some(value), Some(more)) = (value.as_object_mut(), more.as_object()) {
        value.extend(more.clone());
    }
    value
}

fn clones(cloned: &Cloned) -> Value {
    let made = |one: &ClonedMachine| {
        json!({
            "name": one.name, "running_ms": one.running_ms, "without_identity": one.without_identity,
            "same_randomness": one.same_randomness,
        })
    };
    json!({
        "made": cloned.made.iter().map(made).collect::<Vec<Value>>(), "failed": failures(&cloned.failed),
        "way": cloned.kind.name(), "consistency": cloned.consistency, "remark": cloned.quiet,
        "stun_ms": cloned.stun_ms,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use vm::definition::Link;
    use vm::identity::Mac;
    use vm::import::Format;
    use vm::import::plan::Plan;

    #[test]
    fn a_dry_run_reports_no_address_that_the_import_makes_again() {
        let mut definition = Definition::new("web", 1, 64 << 20).unwrap();
        let (kept, made): (Mac, Mac) = ("52:54:00:00:00:01".parse().unwrap(), "52:54:00:00:00:02".parse().unwrap());
        for mac in [kept, made] {
            definition.add_network(mac, Link::None).unwrap();
        }
        let plan = Plan {
            source: "/vms/web.vmx".into(),
            format: Format::Vmx,
            definition,
            disks: Vec::new(),
            nvram: None,
            snapshots: Vec::new(),
            notes: Vec::new(),
            new_addresses: vec![made],
        };
        let machine = ImportedMachine { plan, snapshots: Vec::new(), started: false };
        let addresses = |dry_run| {
            let value = imported(&machine, dry_run);
            json!([value["networks"][0]["mac"], value["networks"][1]["mac"]])
        };
        assert_eq!(addresses(true), json!(["52:54:00:00:00:01", null]));
        assert_eq!(addresses(false), json!(["52:54:00:00:00:01", "52:54:00:00:00:02"]));
    }
}
