//! Replies about machines as JSON.

use crate::output::words;
use control::{Cloned, ClonedMachine, Failure, ImportedMachine, MachineInfo, MachineReply, MachineVerb};
use serde_json::{Value, json};
use vm::definition::{Definition, Disk, Network};
use vm::snapshots::Record;

/// The JSON output for a reply.
pub fn value(verb: &MachineVerb, reply: &MachineReply) -> Value {
    match reply {
        MachineReply::Created(made) => definition(made),
        MachineReply::Imported { machines, failed, dry_run } => json!({
            "machines": machines.iter().map(imported).collect::<Vec<Value>>(), "failed": failures(failed),
            "dry_run": dry_run,
        }),
        MachineReply::Exported { machine, archive, capacity, notes } => json!({
            "name": machine, "archive": archive, "capacity": capacity, "notes": notes,
        }),
        MachineReply::Each { done, failed } => json!({ words::done(verb): done, "failed": failures(failed) }),
        MachineReply::Machine(info) => machine(info),
        MachineReply::Machines(machines) => {
            let machines = machines.iter().map(|machine| {
                let mut value = definition(&machine.definition);
                value["state"] = json!(machine.state);
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
        MachineReply::Reverted { snapshot, state } => {
            json!({ "name": snapshot.machine, "snapshot": snapshot.name, "state": state })
        }
        MachineReply::Cloned(cloned) => clones(cloned),
        MachineReply::Sent { sent, .. } => json!(sent),
        MachineReply::Frozen { name, image, stop_ms, disks_ms, state_ms } => json!({
            "name": name, "image": image, "stop_ms": stop_ms, "disks_ms": disks_ms, "state_ms": state_ms,
        }),
        MachineReply::Console { socket, log, .. } => json!({ "console": socket, "console_log": log }),
        MachineReply::Executed { code, output, errors } => json!({
            "exit_code": code,
            "stdout": String::from_utf8_lossy(output),
            "stderr": String::from_utf8_lossy(errors),
        }),
    }
}

fn failures(failed: &[(String, Failure)]) -> Vec<Value> {
    failed.iter().map(|(name, failure)| json!({ "name": name, "error": failure.message() })).collect()
}

fn definition(definition: &Definition) -> Value {
    let disk = |it: &Disk| json!({ "name": it.name, "slot": it.slot, "bus": it.bus, "unit": it.unit });
    let card =
        |it: &Network| json!({ "mac": it.mac, "link": words::link(&it.link), "slot": it.slot, "model": it.model });
    let disks: Vec<Value> = definition.disks.iter().map(disk).collect();
    let networks: Vec<Value> = definition.networks.iter().map(card).collect();
    let platform = &definition.platform;
    json!({
        "name": definition.name, "uuid": definition.uuid, "cpus": definition.cpus, "memory": definition.memory,
        "platform": {
            "chipset": platform.chipset, "firmware": platform.firmware, "secure_boot": platform.secure_boot,
            "cores": platform.cores, "clock": platform.clock, "display": platform.display,
        },
        "boot": definition.boot, "disks": disks, "networks": networks, "origin": definition.origin,
    })
}

fn imported(machine: &ImportedMachine) -> Value {
    let ImportedMachine { plan, snapshots, started } = machine;
    let mut value = definition(&plan.definition);
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
        "why_not_kvm": info.why_not_kvm, "console": info.console, "monitor": info.monitor, "agent": info.agent,
        "console_log": info.console_log, "log": info.log,
        "snapshots": snapshots(&info.definition.name, &info.snapshots),
        "frozen": info.frozen, "image": info.image, "children": children.collect::<Vec<Value>>(),
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
