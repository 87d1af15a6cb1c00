//! Disks as text.

use crate::control::{DiskRequest, Request, SnapshotRequest};
use crate::output::human::{size, time};
use crate::output::table::{Align, Table, print_facts};
use disk::{DiskInfo, Provisioning};
use std::io::{self, Write};

/// Bytes of a block, for block counts.
const BLOCK: u64 = backend::BLOCK_SIZE as u64;

fn provisioning(kind: Provisioning) -> &'static str {
    match kind {
        Provisioning::Thin => "thin",
        Provisioning::ZeroedThick => "zeroedthick",
        Provisioning::EagerZeroedThick => "eagerzeroedthick",
    }
}

/// After a change one line says what is now; `show` tells everything.
pub fn print(out: &mut dyn Write, request: &Request, disk: &DiskInfo) -> io::Result<()> {
    let DiskInfo { name, .. } = disk;
    match request {
        Request::Disk(DiskRequest::Create { .. }) => {
            writeln!(out, "created disk {name}: {}, {}", size(disk.capacity), provisioning(disk.provisioning))
        }
        Request::Disk(DiskRequest::Resize { .. }) => writeln!(out, "disk {name} has {} now", size(disk.capacity)),
        Request::Disk(DiskRequest::Rename { name: old, .. }) => writeln!(out, "disk {old} is {name} now"),
        Request::Disk(DiskRequest::Detach { .. }) => writeln!(out, "disk {name} is independent now"),
        Request::Snapshot(SnapshotRequest::Revert { name: snapshot, .. }) => {
            writeln!(out, "disk {name} is as it was at {snapshot}")
        }
        _ => print_facts(out, &disk_facts(disk)),
    }
}

fn disk_facts(disk: &DiskInfo) -> Vec<(&'static str, String)> {
    let blocks = |blocks: u64| format!("{blocks} ({})", size(blocks.saturating_mul(BLOCK)));
    let mut facts = vec![
        ("name", disk.name.clone()),
        ("uuid", disk.uuid.clone()),
        ("capacity", format!("{} ({} bytes)", size(disk.capacity), disk.capacity)),
        ("provisioning", provisioning(disk.provisioning).into()),
        ("format", disk.format.clone()),
    ];
    facts.extend(disk.blocks_allocated.map(|n| ("blocks allocated", blocks(n))));
    facts.extend(disk.blocks_to_be_zeroed.map(|n| ("blocks to be zeroed", blocks(n))));
    facts.extend(disk.exclusive.map(|n| ("exclusive", size(n))));
    facts.push(("snapshots", disk.snapshots.to_string()));
    facts.extend(disk.parent_snapshot.clone().map(|s| ("stands on", s)));
    facts.extend(disk.origin.clone().map(|s| ("linked clone of", s)));
    facts.push(("clients", disk.clients.to_string()));
    facts.push(("created", time(disk.created)));
    facts
}

pub fn print_all(out: &mut dyn Write, disks: &[DiskInfo]) -> io::Result<()> {
    let mut table = Table::new(&[
        ("NAME", Align::Left),
        ("CAPACITY", Align::Right),
        ("PROVISIONING", Align::Left),
        ("SNAPSHOTS", Align::Right),
        ("CLIENTS", Align::Right),
        ("ORIGIN", Align::Left),
    ]);
    for disk in disks {
        table.row(vec![
            disk.name.clone(),
            size(disk.capacity),
            provisioning(disk.provisioning).into(),
            disk.snapshots.to_string(),
            disk.clients.to_string(),
            disk.origin.clone().unwrap_or_else(|| "-".into()),
        ]);
    }
    table.print(out)
}
