//! Replies as text for people.

use super::human::{count, size, time};
use super::table::{Align, Table, print_facts};
use super::tree;
use crate::control::{Reply, Request, Serving};
use crate::serve::uri;
use disk::{CheckReport, DiskInfo, Provisioning, SnapshotInfo, Status};
use std::io::{self, Write};

/// Names told one by one when many disks are made at once.
const NAMES_TOLD_MAX: usize = 5;

/// Bytes of a block, for block counts.
const BLOCK: u64 = backend::BLOCK_SIZE as u64;

/// Prints the answer to a request.
pub fn print(out: &mut dyn Write, request: &Request, reply: &Reply) -> io::Result<()> {
    match reply {
        Reply::Status { status, serving } => print_status(out, status, serving.as_ref()),
        Reply::Check(report) => print_check(out, report),
        Reply::Disk(disk) => print_disk(out, request, disk),
        Reply::Disks(disks) => match request {
            Request::Clone { full, .. } => {
                let kind = if *full { "full clone" } else { "linked clone" };
                writeln!(out, "made {}: {}", count(disks.len() as u64, kind), names(disks))
            }
            _ => print_disks(out, disks),
        },
        Reply::Snapshot(snapshot) => print_snapshot(out, snapshot),
        Reply::Snapshots(snapshots) => match request {
            Request::SnapshotCreate { .. } => {
                let names: Vec<String> = snapshots.iter().map(|s| format!("{}@{}", s.disk, s.name)).collect();
                writeln!(out, "took {}", names.join(", "))
            }
            _ if snapshots.is_empty() => writeln!(out, "no snapshots"),
            _ => tree::print(out, snapshots),
        },
        Reply::Deleted(name) => writeln!(out, "deleted {name}"),
        Reply::Diff { extents, bytes } => writeln!(out, "{} in {}", size(*bytes), count(*extents, "changed extent")),
        Reply::Exports(exports) => {
            let mut table = Table::new(&[("NAME", Align::Left), ("ACCESS", Align::Left), ("URI", Align::Left)]);
            for export in exports {
                let access = if export.read_only { "read-only" } else { "read-write" };
                let uris = if export.uris.is_empty() { "not served".into() } else { export.uris.join(" ") };
                table.row(vec![export.name.clone(), access.into(), uris]);
            }
            table.print(out)
        }
    }
}

fn provisioning(kind: Provisioning) -> &'static str {
    match kind {
        Provisioning::Thin => "thin",
        Provisioning::ZeroedThick => "zeroedthick",
        Provisioning::EagerZeroedThick => "eagerzeroedthick",
    }
}

fn names(disks: &[DiskInfo]) -> String {
    match disks {
        [first, .., last] if disks.len() > NAMES_TOLD_MAX => format!("{} to {}", first.name, last.name),
        _ => disks.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}

fn print_status(out: &mut dyn Write, status: &Status, serving: Option<&Serving>) -> io::Result<()> {
    let mut facts = vec![
        ("uuid", status.uuid.clone()),
        ("format version", status.version.to_string()),
        ("capacity", format!("{} (file system)", size(status.capacity))),
        ("available", size(status.available)),
        ("allocated", size(status.allocated)),
        ("  data", size(status.data)),
        ("  reserved", format!("{} (for thick disks)", size(status.reserved))),
        ("  metadata", size(status.metadata)),
        ("  reclaimable", size(status.reclaimable)),
        ("provisioned", size(status.provisioned)),
        ("over-commit ratio", status.overcommit_ratio.clone()),
        ("disks", status.disks.to_string()),
        ("snapshots", status.snapshots.to_string()),
        ("checksum errors", status.checksum_errors.to_string()),
        ("I/O", format!("{}, {}", status.engine, status.io_mode)),
    ];
    match serving {
        Some(serving) => {
            let access = if serving.read_only { ", read-only" } else { "" };
            facts.push(("served by", format!("lamina {} (process {}){access}", serving.version, serving.pid)));
            facts.extend(uri::of_export(serving, "").into_iter().map(|uri| ("nbd", uri)));
        }
        None => facts.push(("served by", "nobody".into())),
    }
    print_facts(out, &facts)
}

fn print_check(out: &mut dyn Write, report: &CheckReport) -> io::Result<()> {
    for finding in &report.findings {
        match &finding.repaired {
            Some(repair) => writeln!(out, "{}; repaired: {repair}", finding.problem)?,
            None => writeln!(out, "{}", finding.problem)?,
        }
    }
    let repaired = report.findings.iter().filter(|f| f.repaired.is_some()).count();
    writeln!(
        out,
        "{} walked, {} referenced, {} verified, {} leaked",
        count(report.pages, "metadata page"),
        count(report.blocks, "data block"),
        count(report.verified, "checksum"),
        size(report.leaked)
    )?;
    match report.findings.len() {
        0 => writeln!(out, "clean"),
        found => writeln!(out, "{}, {repaired} repaired", count(found as u64, "problem")),
    }
}

/// After a change one line says what is now; `show` tells everything.
fn print_disk(out: &mut dyn Write, request: &Request, disk: &DiskInfo) -> io::Result<()> {
    let DiskInfo { name, .. } = disk;
    match request {
        Request::DiskCreate { .. } => {
            writeln!(out, "created disk {name}: {}, {}", size(disk.capacity), provisioning(disk.provisioning))
        }
        Request::DiskResize { .. } => writeln!(out, "disk {name} has {} now", size(disk.capacity)),
        Request::DiskRename { name: old, .. } => writeln!(out, "disk {old} is {name} now"),
        Request::DiskDetach { .. } => writeln!(out, "disk {name} is independent now"),
        Request::SnapshotRevert { name: snapshot, .. } => writeln!(out, "disk {name} is as it was at {snapshot}"),
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

fn print_disks(out: &mut dyn Write, disks: &[DiskInfo]) -> io::Result<()> {
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

fn print_snapshot(out: &mut dyn Write, snapshot: &SnapshotInfo) -> io::Result<()> {
    let mut facts = vec![
        ("name", format!("{}@{}", snapshot.disk, snapshot.name)),
        ("capacity", format!("{} ({} bytes)", size(snapshot.capacity), snapshot.capacity)),
        ("parent", snapshot.parent.clone().unwrap_or_else(|| "-".into())),
        ("created", time(snapshot.created)),
        ("head stands on it", if snapshot.current { "yes" } else { "no" }.into()),
    ];
    if !snapshot.clones.is_empty() {
        facts.push(("linked clones", snapshot.clones.join(", ")));
    }
    print_facts(out, &facts)
}
