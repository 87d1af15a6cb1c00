//! Snapshots as text.

use crate::output::human::{size, time};
use crate::output::table::print_facts;
use crate::output::tree;
use control::{Request, SnapshotRequest};
use disk::SnapshotInfo;
use std::io::{self, Write};

/// Prints the result of `snapshot create`, or the tree of snapshots.
pub fn print_all(out: &mut dyn Write, request: &Request, snapshots: &[SnapshotInfo]) -> io::Result<()> {
    match request {
        Request::Snapshot(SnapshotRequest::Create { .. }) => {
            let names: Vec<String> = snapshots.iter().map(|s| format!("{}@{}", s.disk, s.name)).collect();
            writeln!(out, "took {}", names.join(", "))
        }
        _ if snapshots.is_empty() => writeln!(out, "no snapshots"),
        _ => tree::print(out, snapshots),
    }
}

/// Prints one snapshot.
pub fn print(out: &mut dyn Write, snapshot: &SnapshotInfo) -> io::Result<()> {
    let mut facts = vec![
        ("name", format!("{}@{}", snapshot.disk, snapshot.name)),
        ("capacity", format!("{} ({} bytes)", size(snapshot.capacity), snapshot.capacity)),
        ("parent", snapshot.parent.clone().unwrap_or_else(|| "-".into())),
        ("created", time(snapshot.created)),
        ("parent of the head", if snapshot.current { "yes" } else { "no" }.into()),
    ];
    if !snapshot.description.is_empty() {
        facts.push(("description", snapshot.description.clone()));
    }
    if !snapshot.clones.is_empty() {
        facts.push(("linked clones", snapshot.clones.join(", ")));
    }
    print_facts(out, &facts)
}
