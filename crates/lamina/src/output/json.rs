//! Replies as JSON. The shape is an interface: members are added, never renamed or removed.

use control::Reply;
use serde_json::{Value, json};

/// What `--json` prints for a reply.
pub fn value(reply: &Reply) -> Value {
    match reply {
        Reply::Status { status, serving } => {
            let mut value = json!(status);
            if let Some(members) = value.as_object_mut() {
                members.insert("serving".into(), json!(serving));
            }
            value
        }
        Reply::Check(report) => json!(report),
        Reply::Disk(disk) => json!(disk),
        Reply::Resized(resized) => {
            let mut value = json!(resized.disk);
            if let Some(members) = value.as_object_mut() {
                members.insert("reconnected".into(), json!(resized.reconnected));
                members.insert("unaware".into(), json!(resized.unaware));
            }
            value
        }
        Reply::Disks(disks) => json!({ "disks": disks }),
        Reply::Snapshot(snapshot) => json!(snapshot),
        Reply::Snapshots(snapshots) => json!({ "snapshots": snapshots }),
        Reply::Deleted(name) => json!({ "deleted": name }),
        Reply::Diff { extents, bytes } => json!({ "count": extents, "changed": bytes }),
        Reply::Statistics(statistics) => json!(statistics),
        Reply::Reclaimed { name, reclaimed } => {
            let disk::Reclaimed { freed, returned, moved } = reclaimed;
            json!({ "name": name, "freed": freed, "returned": returned, "moved": moved })
        }
        Reply::Image(info) => json!(info),
        Reply::ImageCheck(check) => json!(check),
        Reply::ImageCreated(level) => json!(level),
        Reply::Converted(made) => json!(made),
        Reply::SalvageList(list) => json!(list),
        Reply::Salvaged(report) => json!(report),
        Reply::Exports(exports) => json!({ "exports": exports }),
        Reply::Sent(sent) => json!(sent),
        Reply::Receptions(receptions) => json!({ "receptions": receptions }),
        Reply::Settled => json!({ "settled": true }),
    }
}
