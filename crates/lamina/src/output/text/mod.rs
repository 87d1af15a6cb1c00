//! Replies as text, with a file for each group of requests.

mod backup;
mod disk;
mod image;
mod job;
mod label;
mod machine;
mod reclaim;
mod salvage;
mod scrub;
mod send;
mod snapshot;
mod space;

use super::human::{count, size};
use super::table::{Align, Table, print_facts};
use ::disk::{CheckReport, DiskInfo, Status};
use control::uri;
use control::{JobRequest, Reply, Request, Serving};
use std::io::{self, Write};

pub use job::print_event;

/// Most names that are listed when many disks are made at once.
const NAMES_TOLD_MAX: usize = 5;

/// Prints the answer to a request.
pub fn print(out: &mut dyn Write, request: &Request, reply: &Reply) -> io::Result<()> {
    match reply {
        Reply::Status { status, serving } => print_status(out, status, serving.as_ref()),
        Reply::Check(report) => print_check(out, report),
        Reply::Scrub(report) => scrub::print(out, report),
        Reply::ScrubState(summary) => scrub::print_state(out, request, summary),
        Reply::Disk(one) => disk::print(out, request, one),
        Reply::Resized(resized) => disk::print_resized(out, resized),
        Reply::Disks(disks) => match request {
            Request::Clone { full, .. } => {
                let kind = if *full { "full clone" } else { "linked clone" };
                writeln!(out, "made {}: {}", count(disks.len() as u64, kind), names(disks))
            }
            _ => disk::print_all(out, disks),
        },
        Reply::Snapshot(one) => snapshot::print(out, one),
        Reply::Snapshots(snapshots) => snapshot::print_all(out, request, snapshots),
        Reply::WouldFree(free) => space::print_would_free(out, free),
        Reply::Space(space) => space::print_all(out, space),
        Reply::Defaults(defaults) => disk::print_defaults(out, defaults),
        Reply::Labels(labels) => label::print_all(out, labels),
        Reply::Deleted(name) => writeln!(out, "deleted {name}"),
        Reply::Diff { extents, bytes } => writeln!(out, "{} in {}", size(*bytes), count(*extents, "changed extent")),
        Reply::Statistics(statistics) => disk::print_statistics(out, statistics),
        Reply::Reclaimed { name, reclaimed } => disk::print_reclaimed(out, request, name, reclaimed),
        Reply::Reclaim(report) => reclaim::print(out, report),
        Reply::Reclaimable(disks) => reclaim::print_all(out, disks),
        Reply::Image(info) => image::print(out, info),
        Reply::ImageCheck(check) => image::print_check(out, check),
        Reply::ImageCreated(level) => image::print_created(out, level),
        Reply::Converted(made) => image::print_converted(out, made),
        Reply::SalvageList(list) => salvage::print_list(out, list),
        Reply::Salvaged(report) => salvage::print(out, report),
        Reply::Settled => writeln!(out, "settled"),
        Reply::Machine(reply) => match request {
            Request::Machine(request) => machine::print(out, &request.verb, reply),
            _ => Ok(()),
        },
        Reply::Job(one) => match request {
            Request::Job(JobRequest::Start(_)) => writeln!(out, "job {} started", one.id),
            Request::Job(JobRequest::Cancel { .. }) if one.ended.is_none() => {
                writeln!(out, "cancelling job {}", one.id)
            }
            _ => job::print(out, one),
        },
        Reply::Jobs(jobs) => job::print_all(out, jobs),
        Reply::JobEnded(end) => match &end.outcome {
            Some((request, reply)) => print(out, request, reply),
            None => job::print(out, &end.job),
        },
        Reply::BackedUp(created) => backup::print_created(out, created),
        Reply::BackupPrepared { id, .. } => writeln!(out, "{id}"),
        Reply::MachineBackedUp(created) => backup::print_machine(out, created, None),
        Reply::Backups(backups) => backup::print_all(out, backups),
        Reply::Verified(verified) => backup::print_verified(out, verified),
        Reply::Restored(restored) => backup::print_restored(out, restored),
        Reply::RestoredLive(restored) => backup::print_live(out, restored),
        Reply::BackupKey { path, id } => writeln!(out, "made key {id} in {}", path.display()),
        Reply::Pruned(pruned) => backup::print_pruned(out, pruned),
        Reply::Sent(sent) => send::print(out, sent),
        Reply::Receptions(receptions) => send::print_all(out, receptions),
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

fn names(disks: &[DiskInfo]) -> String {
    match disks {
        [first, .., last] if disks.len() > NAMES_TOLD_MAX => format!("{} to {}", first.name, last.name),
        _ => disks.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}

fn background(status: &Status) -> String {
    match (status.background_work, status.background_rate) {
        (0, _) => "none".into(),
        (work, 0) => format!("{work} under way, without limit"),
        (work, rate) => format!("{work} under way, at most {}/s together", size(rate)),
    }
}

fn print_status(out: &mut dyn Write, status: &Status, serving: Option<&Serving>) -> io::Result<()> {
    let mut facts = vec![
        ("uuid", status.uuid.clone()),
        ("format version", status.version.to_string()),
        ("file system", status.file_system.name.clone()),
        ("capacity", format!("{} (file system)", size(status.capacity))),
        ("available", size(status.available)),
        ("allocated", size(status.allocated)),
        ("  images", format!("{} (of disks in VMware's formats)", size(status.images))),
        ("  data", size(status.data)),
        ("  reserved", format!("{} (for thick disks)", size(status.reserved))),
        ("  metadata", size(status.metadata)),
        ("  reclaimable", size(status.reclaimable)),
        ("  held", format!("{} (the part of reclaimable that is not usable yet)", size(status.held))),
        ("provisioned", size(status.provisioned)),
        ("over-commit ratio", status.overcommit_ratio.clone()),
        ("disks", status.disks.to_string()),
        ("snapshots", status.snapshots.to_string()),
        ("checksum errors", status.checksum_errors.to_string()),
        ("scrub", scrub::short(&status.scrub)),
        ("background work", background(status)),
        ("I/O", format!("{}, {}", status.engine, status.io_mode)),
    ];
    facts.extend(disk::compression_status(&status.compression).map(|text| ("compression", text)));
    facts.extend(disk::deduplication_status(&status.deduplication).map(|text| ("deduplication", text)));
    facts.extend(status.read_cache.filter(|cache| cache.hits + cache.misses > 0).map(|cache| {
        let held = format!("{} of at most {}", size(cache.resident), size(cache.limit));
        ("read cache", format!("{held}, {}", disk::hit_rate(cache.hits, cache.misses)))
    }));
    if let Some(dirty) = status.dirty {
        let waited = dirty.waited_ms as f64 / 1000.0;
        let text = format!("{} of at most {}, writes waited {waited:.1} s", size(dirty.bytes), size(dirty.bound));
        facts.push(("dirty data", text));
    }
    facts
        .extend(status.waiting.iter().map(|of| ("waiting", format!("disk {}: {}", of.disk, disk::waiting_writes(of)))));
    facts.extend(status.file_system.warnings.iter().map(|warning| ("warning", warning.clone())));
    facts.extend(status.limits.iter().map(label::limit));
    facts.extend(status.growth.iter().flat_map(space::growth_facts));
    facts.extend(status.space.iter().flat_map(|space| space::total_facts(status, space)));
    match serving {
        Some(serving) => {
            let access = if serving.read_only { ", read-only" } else { "" };
            facts.push(("served by", format!("lamina {} (process {}){access}", serving.version, serving.pid)));
            facts.extend(uri::of_export(serving, "").into_iter().map(|uri| ("nbd", uri)));
            facts.extend(serving.receive.map(|address| ("receives", format!("lamina://{address}/"))));
        }
        None => facts.push(("served by", "no server".into())),
    }
    print_facts(out, &facts)
}

fn print_check(out: &mut dyn Write, report: &CheckReport) -> io::Result<()> {
    for warning in &report.warnings {
        writeln!(out, "warning: {warning}")?;
    }
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
    if report.images > 0 {
        writeln!(out, "{} checked, {} in them unreferenced", count(report.images, "image"), size(report.dead))?;
    }
    match report.findings.len() {
        0 => writeln!(out, "clean"),
        found => writeln!(out, "{}, {repaired} repaired", count(found as u64, "problem")),
    }
}
