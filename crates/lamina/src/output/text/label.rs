//! Labels of disks, and limits, as text.

use crate::output::human::size;
use crate::output::table::{Align, Table};
use disk::LimitInfo;
use std::io::{self, Write};

/// Prints a row for each label.
pub fn print_all(out: &mut dyn Write, labels: &[LimitInfo]) -> io::Result<()> {
    let columns = [
        ("LABEL", Align::Left),
        ("DISKS", Align::Right),
        ("USED", Align::Right),
        ("QUOTA", Align::Right),
        ("RESERVATION", Align::Right),
    ];
    let mut table = Table::new(&columns);
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), size);
    for label in labels {
        let limits = label.limits;
        table.row(vec![
            label.name.clone(),
            label.disks.to_string(),
            known(label.used),
            known(limits.quota),
            known(limits.reservation),
        ]);
    }
    table.print(out)
}

/// A disk or label with its limits, for the status of a datastore.
pub fn limit(of: &LimitInfo) -> (&'static str, String) {
    let mut parts = vec![of.used.map_or_else(|| "not counted yet".into(), |used| format!("{} used", size(used)))];
    parts.extend(of.limits.quota.map(|quota| format!("quota {}", size(quota))));
    parts.extend(of.limits.reservation.map(|bytes| format!("reservation {}", size(bytes))));
    if of.exceeded {
        parts.push("writes are refused".to_owned());
    }
    let kind = if of.is_label { "label" } else { "disk" };
    ("limit", format!("{kind} {}: {}", of.name, parts.join(", ")))
}
