//! Results of a salvage as text.

use crate::output::human::{count, size};
use crate::output::table::{Align, Table};
use disk::salvage::{ByteRange, SalvageList, SalvageReport};
use std::io::{self, Write};

/// Prints what can be extracted.
pub fn print_list(out: &mut dyn Write, list: &SalvageList) -> io::Result<()> {
    let columns = [("NAME", Align::Left), ("CAPACITY", Align::Right), ("LOST", Align::Right), ("RECORD", Align::Left)];
    let mut table = Table::new(&columns);
    for object in &list.objects {
        let name = match &object.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", object.disk),
            None => object.disk.clone(),
        };
        let lost = if object.lost == 0 { "-".to_owned() } else { size(object.lost) };
        table.row(vec![name, size(object.capacity), lost, if object.proven { "whole" } else { "damaged" }.to_owned()]);
    }
    table.print(out)?;
    print_notes(out, list.behind, &list.notes)
}

/// Prints what was extracted, and what is lost.
pub fn print(out: &mut dyn Write, report: &SalvageReport) -> io::Result<()> {
    print_notes(out, report.behind, &report.notes)?;
    if !report.proven {
        writeln!(out, "note: the record of {} is damaged: check the name and capacity of the disk", report.source)?;
    }
    print_lost(out, &report.lost)?;
    print_ranges(out, "unverified", &report.unverified)?;
    let lost = summed(&report.lost);
    writeln!(
        out,
        "read {} out to {} ({}, {} of data): {lost}",
        report.source,
        report.target,
        report.format,
        size(report.copied)
    )
}

/// Prints the lost ranges.
pub fn print_lost(out: &mut dyn Write, ranges: &[ByteRange]) -> io::Result<()> {
    print_ranges(out, "lost", ranges)
}

/// How much is lost.
pub fn summed(lost: &[ByteRange]) -> String {
    match lost.iter().map(|range| range.length).sum::<u64>() {
        0 => "nothing is lost".to_owned(),
        bytes => format!("{} in {} lost, zeros there", size(bytes), count(lost.len() as u64, "range")),
    }
}

fn print_ranges(out: &mut dyn Write, what: &str, ranges: &[ByteRange]) -> io::Result<()> {
    ranges.iter().try_for_each(|range| writeln!(out, "{what}: bytes {} to {}", range.start, range.start + range.length))
}

fn print_notes(out: &mut dyn Write, behind: bool, notes: &[String]) -> io::Result<()> {
    notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))?;
    match behind {
        true => writeln!(out, "note: the end of the journal is lost: all disks have earlier states"),
        false => Ok(()),
    }
}
