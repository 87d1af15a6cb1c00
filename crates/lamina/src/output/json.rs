//! Replies as JSON. The format is an interface: members are added, but never renamed or removed.

mod machine;

use control::{Change, Event, JobInfo, Reply, Request};
use serde_json::{Value, json};

/// The JSON output for a reply.
pub fn value(request: &Request, reply: &Reply) -> Value {
    match reply {
        Reply::Status { status, serving } => {
            let mut value = json!(status);
            if let Some(members) = value.as_object_mut() {
                members.insert("serving".into(), json!(serving));
            }
            value
        }
        Reply::Check(report) => json!(report),
        Reply::Scrub(report) => {
            let mut value = json!(report.summary);
            if let Some(members) = value.as_object_mut() {
                members.insert("last".into(), json!(report.last));
                members.insert("touched".into(), json!(report.touched));
                members.insert("damage".into(), json!(report.damage));
                members.insert("unlisted".into(), json!(report.unlisted));
            }
            value
        }
        Reply::ScrubState(summary) => json!(summary),
        Reply::Disk(disk) => json!(disk),
        Reply::Resized(resized) => {
            let mut value = json!(resized.disk);
            if let Some(members) = value.as_object_mut() {
                members.insert("reconnected".into(), json!(resized.reconnected));
                members.insert("unaware".into(), json!(resized.unaware));
                if let Some(machine) = &resized.machine {
                    members.insert("machine_sees_it".into(), json!(machine.seen));
                }
            }
            value
        }
        Reply::Disks(disks) => json!({ "disks": disks }),
        Reply::Snapshot(snapshot) => json!(snapshot),
        Reply::Snapshots(snapshots) => json!({ "snapshots": snapshots }),
        Reply::WouldFree(free) => json!(free),
        Reply::Space(space) => json!(space),
        Reply::Defaults(defaults) => json!(defaults),
        Reply::Labels(labels) => json!({ "labels": labels }),
        Reply::Deleted(name) => json!({ "deleted": name }),
        Reply::Diff { extents, bytes } => json!({ "count": extents, "changed": bytes }),
        Reply::Statistics(statistics) => json!(statistics),
        Reply::Reclaimed { name, reclaimed } => {
            let mut value = json!(reclaimed);
            value["name"] = json!(name);
            value
        }
        Reply::Reclaim(report) => json!(report),
        Reply::Reclaimable(disks) => json!({ "disks": disks }),
        Reply::Image(info) => json!(info),
        Reply::ImageCheck(check) => json!(check),
        Reply::ImageCreated(level) => json!(level),
        Reply::Converted(made) => json!(made),
        Reply::SalvageList(list) => json!(list),
        Reply::Salvaged(report) => json!(report),
        Reply::Exports(exports) => json!({ "exports": exports }),
        Reply::Sent(sent) => json!(sent),
        Reply::BackedUp(created) => json!(created),
        Reply::BackupPrepared { id, unfinished } => json!({ "id": id, "unfinished": unfinished }),
        Reply::MachineBackedUp(created) => json!(created),
        Reply::Backups(backups) => json!({ "backups": backups }),
        Reply::Verified(verified) => json!(verified),
        Reply::Restored(restored) => json!(restored),
        Reply::RestoredLive(restored) => json!(restored),
        Reply::BackupKey { path, id } => json!({ "path": path, "id": id }),
        Reply::Pruned(pruned) => json!(pruned),
        Reply::Receptions(receptions) => json!({ "receptions": receptions }),
        Reply::Settled => json!({ "settled": true }),
        Reply::Machine(reply) => match request {
            Request::Machine(request) => machine::value(&request.verb, reply),
            _ => json!(reply),
        },
        Reply::Job(one) => job(one),
        Reply::Jobs(jobs) => json!({ "jobs": jobs.iter().map(job).collect::<Vec<Value>>() }),
        Reply::JobEnded(end) => match &end.outcome {
            Some((request, reply)) => value(request, reply),
            None => job(&end.job),
        },
    }
}

/// The JSON output for an event.
pub fn event(event: &Event) -> Value {
    let mut value = json!(event);
    if let Change::JobStarted { job: one } | Change::JobEnded { job: one } = &event.change {
        value["job"] = job(one);
    }
    value
}

fn job(job: &JobInfo) -> Value {
    let mut value = json!(job);
    value["error"] = json!(job.error.as_ref().map(|error| error.message()));
    value
}
