//! Transfers and receptions as text.

use crate::output::human::{count, size, time};
use crate::output::table::{Align, Table};
use disk::transfer::ReceptionInfo;
use replication::Sent;
use std::io::{self, Write};

/// Prints the result of a transfer.
pub fn print(out: &mut dyn Write, sent: &Sent) -> io::Result<()> {
    write!(out, "sent {}: {} of data", sent.disks.join(", "), size(sent.data))?;
    if sent.resumed > 0 {
        write!(out, ", the receiver already had {}", size(sent.resumed))?;
    }
    if sent.incremental > 0 {
        write!(out, ", only what had changed")?;
    }
    write!(out, ", {} on the wire in {:.1} s", size(sent.wire), sent.seconds)?;
    match sent.reconnects {
        0 => writeln!(out),
        again => writeln!(out, ", {} broken", count(again, "connection")),
    }
}

/// Prints receptions.
pub fn print_all(out: &mut dyn Write, receptions: &[ReceptionInfo]) -> io::Result<()> {
    let mut table = Table::new(&[
        ("ID", Align::Left),
        ("DISKS", Align::Left),
        ("ARRIVED", Align::Right),
        ("STATE", Align::Left),
        ("BEGUN", Align::Left),
        ("SENDER", Align::Left),
    ]);
    for reception in receptions {
        let state = if reception.active { "active" } else { "kept" };
        table.row(vec![
            reception.id.clone(),
            reception.disks.join(" "),
            size(reception.bytes),
            state.into(),
            time(reception.begun),
            reception.sender.clone(),
        ]);
    }
    table.print(out)
}
