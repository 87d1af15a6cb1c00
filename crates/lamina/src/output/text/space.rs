//! The space of disks and snapshots, and what a deletion would free, as text.

use crate::output::human::{count, size};
use crate::output::table::{Align, Table, print_facts};
use disk::{DatastoreSpace, SpaceUse, WouldFree};
use std::io::{self, Write};

/// Prints a row for each disk, followed by rows for its snapshots, and the sums over the datastore.
pub fn print_all(out: &mut dyn Write, of: &DatastoreSpace) -> io::Result<()> {
    if of.disks.is_empty() {
        return writeln!(out, "no disks");
    }
    let mut columns = vec![("NAME", Align::Left)];
    let sizes = ["CAPACITY", "MAPPED", "STORED", "SHARED", "EXCLUSIVE", "BY SNAPSHOTS", "RECLAIMABLE"];
    columns.extend(sizes.map(|name| (name, Align::Right)));
    let mut table = Table::new(&columns);
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), size);
    let row = |name: String, of: &SpaceUse, rest: [Option<u64>; 2]| {
        // A snapshot in VMware's formats has no figures of its own, because its images are levels of the disk's chain.
        let own = |bytes: u64| if of.stored == 0 && of.exclusive.is_none() { "-".into() } else { size(bytes) };
        let mut cells = vec![name, size(of.provisioned), own(of.mapped), own(of.stored)];
        cells.extend([of.shared, of.exclusive].into_iter().chain(rest).map(known));
        cells
    };
    for disk in &of.disks {
        table.row(row(disk.name.clone(), &disk.space, [disk.used_by_snapshots, Some(disk.reclaimable)]));
        for snapshot in &disk.snapshots {
            table.row(row(format!("{}@{}", disk.name, snapshot.name), &snapshot.space, [None; 2]));
        }
    }
    if let Some(total) = &of.total {
        let mut row = vec!["(datastore)".to_owned()];
        row.extend([total.provisioned, total.mapped, total.stored, total.shared, total.exclusive].map(size));
        row.extend([String::from("-"), String::from("-")]);
        table.row(row);
    }
    table.print(out)
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
