//! What was reclaimed of a disk, and what all disks could give back, as text.

use crate::output::human::{count, size};
use crate::output::table::{Align, Table};
use control::Reclaimable;
use disk::{ReclaimMethod, ReclaimPart, ReclaimReport};
use std::io::{self, Write};

fn name(part: &ReclaimPart) -> String {
    match part.partition {
        None => "(none)".into(),
        Some(0) => "(whole disk)".into(),
        Some(number) => number.to_string(),
    }
}

/// Prints a row for each part, the reasons why free maps were not used, and the sums.
pub fn print(out: &mut dyn Write, report: &ReclaimReport) -> io::Result<()> {
    let reclaimed = if report.dry_run { "WOULD RECLAIM" } else { "RECLAIMED" };
    let mut table = Table::new(&[
        ("PARTITION", Align::Left),
        ("CONTENT", Align::Left),
        ("SIZE", Align::Right),
        ("FREE", Align::Right),
        ("FOUND BY", Align::Left),
        (reclaimed, Align::Right),
    ]);
    for part in &report.parts {
        table.row(vec![
            name(part),
            part.content.clone().unwrap_or_else(|| "-".into()),
            size(part.size.unwrap_or(part.length)),
            part.free.map_or_else(|| "-".into(), size),
            match part.method {
                ReclaimMethod::FreeMap => "free map".into(),
                ReclaimMethod::Zeros => "zeros".into(),
            },
            size(part.reclaimed),
        ]);
    }
    table.print(out)?;
    for part in &report.parts {
        let name = name(part);
        if let (Some(reason), Some(_)) = (&part.reason, part.partition) {
            writeln!(out, "{name}: no free map is used: {reason}")?;
        }
        if part.doubted > 0 {
            let units = count(part.doubted, "part");
            writeln!(out, "{name}: {units} of the file system count as in use: {}", part.doubts.join("; "))?;
        }
    }
    let snapshots = match (report.snapshots, &report.origin) {
        (0, None) => None,
        (0, Some(origin)) => Some(origin.clone()),
        (some, None) => Some(count(some, "snapshot")),
        (some, Some(origin)) => Some(format!("{} and {origin}", count(some, "snapshot"))),
    };
    if let Some(snapshots) = snapshots {
        writeln!(out, "blocks that the disk shares with {snapshots} stay there until that is deleted")?;
    }
    let (sum, mapped) = (size(report.reclaimed), size(report.mapped));
    match report.dry_run {
        true => writeln!(out, "{sum} of {mapped} would be given back; nothing was changed"),
        false => writeln!(out, "gave back {sum} of {mapped}"),
    }
}

/// Prints a row for each disk that could be examined, the sums, and the reasons why the others could not.
pub fn print_all(out: &mut dyn Write, disks: &[Reclaimable]) -> io::Result<()> {
    let mut table = Table::new(&[("DISK", Align::Left), ("MAPPED", Align::Right), ("WOULD RECLAIM", Align::Right)]);
    let (mut mapped, mut reclaimed) = (0u64, 0u64);
    for report in disks.iter().filter_map(|disk| disk.report.as_ref()) {
        table.row(vec![report.disk.clone(), size(report.mapped), size(report.reclaimed)]);
        mapped = mapped.saturating_add(report.mapped);
        reclaimed = reclaimed.saturating_add(report.reclaimed);
    }
    table.row(vec!["(datastore)".into(), size(mapped), size(reclaimed)]);
    table.print(out)?;
    for Reclaimable { disk, error, .. } in disks {
        if let Some(error) = error {
            writeln!(out, "{disk}: not examined: {error}")?;
        }
    }
    Ok(())
}
