//! The space of disks and snapshots, and what a deletion would free, as text.

use crate::output::human::{count, difference, size, span};
use crate::output::table::{Align, Table, print_facts};
use disk::{
    CompressedSpace, DatastoreSpace, DiskSpace, Growth, GrowthRate, Reduction, SpaceUse, Status, TotalSpace, WouldFree,
};
use std::io::{self, Write};

/// Seconds of a day, for rates.
const DAY: i128 = 86_400;

/// The growth rate from which the time to full is computed, and its period. It is the rate of the last day, if that
/// rate is known.
fn usual_rate(growth: &Growth) -> Option<(GrowthRate, &'static str)> {
    let day = growth.day.map(|rate| (rate, "24 h"));
    day.or_else(|| growth.week.map(|rate| (rate, "7 days"))).or_else(|| growth.hour.map(|rate| (rate, "hour")))
}

fn full_in(rate: &GrowthRate) -> String {
    rate.full_in.map_or_else(|| "-".into(), span)
}

/// Growth for each day, and the time to full, or `-` where they are not known.
fn growth_cells(growth: Option<&Growth>) -> [String; 2] {
    let Some((rate, _)) = growth.and_then(usual_rate) else { return ["-".into(), "-".into()] };
    let by_day = i128::from(rate.bytes) * DAY / i128::from(rate.seconds.max(1));
    let by_day = difference(i64::try_from(by_day).unwrap_or(if by_day < 0 { i64::MIN } else { i64::MAX }));
    [format!("{by_day}/day"), full_in(&rate)]
}

/// The growth of a datastore, and the time to full.
pub fn growth_facts(growth: &Growth) -> Vec<(&'static str, String)> {
    let windows = [(growth.hour, "hour"), (growth.day, "24 h"), (growth.week, "7 days")];
    let known = windows.into_iter().filter_map(|(rate, window)| Some((rate?, window)));
    let told: Vec<String> =
        known.map(|(rate, window)| format!("{} in the last {window}", difference(rate.bytes))).collect();
    let mut facts = vec![("growth", told.join(", "))];
    if let Some((rate, window)) = usual_rate(growth) {
        let text = match rate.full_in {
            Some(seconds) => format!("{}, if it grows as in the last {window}", span(seconds)),
            None => format!("never, if it changes as in the last {window}"),
        };
        facts.push(("full in", text));
    }
    facts
}

/// Compressed data, its space and its ratio.
fn compressed(of: CompressedSpace) -> [String; 3] {
    let CompressedSpace { packed, packs, compression } = of;
    let cells = compression.map(|ratio| [size(packed), size(packs), ratio.to_string()]);
    cells.unwrap_or_else(|| ["-", "-", "-"].map(String::from))
}

/// The lines of a reduction, from the capacity to the stored bytes. Each names what is subtracted or added.
fn reduction_facts(of: &Reduction, whose: &str) -> Vec<(&'static str, String)> {
    let less = |bytes: u64, what: &str| format!("{}{} {what}", if bytes > 0 { "-" } else { "" }, size(bytes));
    let mut facts = vec![
        ("all capacity", format!("{} of {whose}", size(of.capacity))),
        ("  not mapped", less(of.unmapped, "never written, discarded or zero")),
        ("mapped", size(of.mapped)),
        ("  within a disk", less(of.within_disks, "that a head and its snapshots map several times")),
    ];
    if of.between_disks > 0 {
        facts.push(("  between disks", less(of.between_disks, "that several disks map")));
    }
    if of.packs > 0 {
        let estimate = match of.packs_examined < of.packs {
            true => format!(" (estimated from {} of {} packs)", of.packs_examined, of.packs),
            false => String::new(),
        };
        facts.push(("  compression", less(of.compression, "by which compressed data is smaller")));
        let loss = format!("+{} in packs that contains no data in use{estimate}", size(of.packing_loss));
        facts.push(("  packing loss", loss));
    }
    let ratio = of.ratio.map(|ratio| format!(", {ratio} times less than mapped")).unwrap_or_default();
    facts.push(("stored", format!("{}{ratio}", size(of.stored))));
    if of.zeros > 0 {
        facts.push(("  zeros", format!("{} of this of thick disks, not written yet", size(of.zeros))));
    }
    facts
}

/// Prints why the data of a disk takes the space that it takes, below its table.
fn print_reduction(out: &mut dyn Write, of: &DiskSpace) -> io::Result<()> {
    let Some(reduction) = &of.reduction else { return Ok(()) };
    let mut facts =
        reduction_facts(reduction, &format!("the head and {}", count(reduction.states.saturating_sub(1), "snapshot")));
    facts.extend(
        of.shared_with_disks
            .filter(|shared| *shared > 0)
            .map(|shared| ("  other disks", format!("{} of this is used by other disks too", size(shared)))),
    );
    writeln!(out)?;
    print_facts(out, &facts)
}

/// What the disks of a datastore use, and how much more they may need. `status` has the space that is available.
pub fn total_facts(status: &Status, of: &TotalSpace) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Some(reduction) = &of.reduction {
        facts.extend(reduction_facts(reduction, &format!("{} heads and snapshots", reduction.states)));
    }
    facts.push(("by snapshots", format!("{} that deleting all snapshots would free", size(of.used_by_snapshots))));
    if let Some(need) = of.may_need {
        let verdict = match need.saturating_sub(status.available.saturating_add(status.reclaimable)) {
            0 => "for which there is enough".into(),
            missing => format!("{} more than there is", size(missing)),
        };
        let if_all = "if clients write all blocks and nothing is compressed";
        facts.push(("may need", format!("{} {if_all}, {verdict}", size(need))));
    }
    let saved = of.reduction.map_or(0, |of| of.compression.saturating_sub(of.packing_loss));
    if let Some(reduction) = of.reduction.filter(|_| saved > 0) {
        let now = reduction.stored.saturating_add(saved) as f64 / reduction.stored.max(1) as f64;
        let text = format!("data takes {now:.2} times less now; new data takes its full size until it is compressed");
        facts.push(("compressed", text));
    }
    facts
}

/// Prints a row for each disk, followed by rows for its snapshots, and the sums over the datastore. For one disk, also
/// prints why its data takes the space that it takes.
pub fn print_all(out: &mut dyn Write, of: &DatastoreSpace) -> io::Result<()> {
    if of.disks.is_empty() {
        return writeln!(out, "no disks");
    }
    let mut columns = vec![("NAME", Align::Left)];
    let sizes = ["CAPACITY", "MAPPED", "STORED", "SHARED", "EXCLUSIVE", "BY SNAPSHOTS", "RECLAIMABLE"];
    columns.extend(sizes.map(|name| (name, Align::Right)));
    // The columns of compression are shown if anything is compressed.
    let mut all = of
        .disks
        .iter()
        .flat_map(|disk| std::iter::once(&disk.space).chain(disk.snapshots.iter().map(|snapshot| &snapshot.space)));
    let any_packed = all.any(|space| space.compressed.packed > 0);
    if any_packed {
        columns.extend(["COMPRESSED", "IN", "RATIO"].map(|name| (name, Align::Right)));
    }
    let any_growth = of.disks.iter().any(|disk| disk.growth.is_some());
    if any_growth {
        columns.extend(["GROWTH", "FULL IN"].map(|name| (name, Align::Right)));
    }
    let mut table = Table::new(&columns);
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), size);
    let row = |name: String, of: &SpaceUse, rest: [Option<u64>; 2], growth: Option<&Growth>| {
        // A snapshot in VMware's formats has no figures of its own, because its images are levels of the disk's chain.
        let own = |bytes: u64| if of.stored == 0 && of.exclusive.is_none() { "-".into() } else { size(bytes) };
        let mut cells = vec![name, size(of.provisioned), own(of.mapped), own(of.stored)];
        cells.extend([of.shared, of.exclusive].into_iter().chain(rest).map(known));
        let packed = compressed(of.compressed);
        cells.extend(packed.into_iter().filter(|_| any_packed));
        cells.extend(growth_cells(growth).into_iter().filter(|_| any_growth));
        cells
    };
    for disk in &of.disks {
        table.row(row(
            disk.name.clone(),
            &disk.space,
            [disk.used_by_snapshots, Some(disk.reclaimable)],
            disk.growth.as_ref(),
        ));
        for snapshot in &disk.snapshots {
            table.row(row(
                format!("{}@{}", disk.name, snapshot.name),
                &snapshot.space,
                [None, snapshot.reclaimable],
                None,
            ));
        }
    }
    if let Some(total) = &of.total {
        let mut row = vec!["(datastore)".to_owned()];
        row.extend([total.provisioned, total.mapped, total.stored, total.shared, total.exclusive].map(size));
        row.extend([total.used_by_snapshots, total.reclaimable].map(size));
        let packed = compressed(total.compressed);
        row.extend(packed.into_iter().filter(|_| any_packed));
        row.extend(["-", "-"].map(String::from).into_iter().filter(|_| any_growth));
        table.row(row);
    }
    table.print(out)?;
    match (&of.total, of.disks.as_slice()) {
        (None, [disk]) => print_reduction(out, disk),
        _ => Ok(()),
    }
}

/// Prints what a deletion would free.
pub fn print_would_free(out: &mut dyn Write, free: &WouldFree) -> io::Result<()> {
    let mut facts = vec![("would delete", free.deletes.join(", "))];
    let names = [("with its snapshots", &free.with_disks), ("hands over", &free.hands_over)];
    facts
        .extend(names.into_iter().filter(|(_, names)| !names.is_empty()).map(|(what, names)| (what, names.join(", "))));
    facts.push(("frees", format!("{} ({} bytes)", size(free.freed), free.freed)));
    facts.push(("  data", format!("{} ({})", size(free.data), count(free.data_blocks, "block"))));
    facts.push(("  metadata", format!("{} (usable for metadata only)", size(free.metadata))));
    facts.push(("  images", size(free.images)));
    if free.reserved > 0 {
        facts.push(("reserved", format!("{} of thick disks become usable for other disks", size(free.reserved))));
    }
    if free.held > 0 {
        facts.push(("held", format!("{} of earlier deletions and discards are not usable yet", size(free.held))));
    }
    if free.images_merged > 0 {
        facts.push(("merges", format!("{} into others", count(free.images_merged, "image"))));
    }
    if free.images_kept > 0 {
        facts.push(("keeps", format!("{} that other states of the disk need", count(free.images_kept, "image"))));
    }
    facts.extend(free.estimate.clone().map(|why| ("estimate", why)));
    print_facts(out, &facts)?;
    writeln!(out, "nothing was deleted")
}
