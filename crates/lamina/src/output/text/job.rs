//! Jobs and events as text.

use crate::output::human;
use crate::output::table::{Align, Table, print_facts};
use control::{Change, Event, JobInfo};
use std::io::{self, Write};

/// A job's command and object: `disk migrate vm1`.
fn what(job: &JobInfo) -> String {
    if job.object.is_empty() { job.kind.clone() } else { format!("{} {}", job.kind, job.object) }
}

fn progress(job: &JobInfo) -> String {
    match job.total {
        0 => "-".into(),
        total => format!("{}%", u128::from(job.done.min(total)) * 100 / u128::from(total)),
    }
}

fn state(job: &JobInfo) -> &'static str {
    if job.cancelling { "cancelling" } else { job.state.name() }
}

/// Prints all jobs.
pub fn print_all(out: &mut dyn Write, jobs: &[JobInfo]) -> io::Result<()> {
    if jobs.is_empty() {
        return writeln!(out, "no jobs");
    }
    let columns = [("ID", Align::Left), ("WHAT", Align::Left), ("STATE", Align::Left), ("PROGRESS", Align::Right)];
    let more = [("STARTED", Align::Left), ("ENDED", Align::Left)];
    let mut table = Table::new(&[&columns[..], &more[..]].concat());
    for job in jobs {
        table.row(vec![
            job.id.clone(),
            what(job),
            state(job).into(),
            progress(job),
            human::time(job.started),
            job.ended.map(human::time).unwrap_or_default(),
        ]);
    }
    table.print(out)
}

/// Prints one job.
pub fn print(out: &mut dyn Write, job: &JobInfo) -> io::Result<()> {
    let mut facts = vec![
        ("id", job.id.clone()),
        ("what", what(job)),
        ("state", state(job).into()),
        ("background", if job.background { "yes" } else { "no: cancelled when its client disconnects" }.into()),
        ("progress", progress(job)),
        ("started", human::time(job.started)),
    ];
    facts.extend(job.ended.map(|time| ("ended", human::time(time))));
    facts.extend(job.error.as_ref().map(|error| ("error", error.message().to_owned())));
    print_facts(out, &facts)
}

/// Prints an event on one line.
pub fn print_event(out: &mut dyn Write, event: &Event) -> io::Result<()> {
    write!(out, "{}  ", human::time(event.time))?;
    match &event.change {
        Change::Subscribed => writeln!(out, "subscribed"),
        Change::DiskCreated { disk, origin: None } => writeln!(out, "disk {disk} created"),
        Change::DiskCreated { disk, origin: Some(origin) } => writeln!(out, "disk {disk} created, a clone of {origin}"),
        Change::DiskDeleted { disk } => writeln!(out, "disk {disk} deleted"),
        Change::DiskRenamed { disk, to } => writeln!(out, "disk {disk} renamed to {to}"),
        Change::DiskResized { disk, capacity } => writeln!(out, "disk {disk} resized to {}", human::size(*capacity)),
        Change::DiskReverted { disk, snapshot } => writeln!(out, "disk {disk} reverted to {snapshot}"),
        Change::DiskChanged { disk, by } => writeln!(out, "disk {disk} changed by {by}"),
        Change::LabelChanged { label } => writeln!(out, "limits of label {label} changed"),
        Change::DefaultsChanged => writeln!(out, "settings of new disks changed"),
        Change::WritesWait { disk, reason } => writeln!(out, "writes of disk {disk} wait for space: {reason}"),
        Change::WritesGoOn { disk, written, refused, dropped, seconds } => {
            let waited = human::count(*seconds, "second");
            write!(out, "writes of disk {disk} wait no longer after {waited}: {written} written, {refused} refused")?;
            match dropped {
                0 => writeln!(out),
                dropped => writeln!(out, ", {dropped} not answered because their connections ended"),
            }
        }
        Change::DiskReceived { disk } => writeln!(out, "disk {disk} received"),
        Change::SnapshotCreated { disk, snapshot } => writeln!(out, "snapshot {disk}@{snapshot} created"),
        Change::SnapshotDeleted { disk, snapshot } => writeln!(out, "snapshot {disk}@{snapshot} deleted"),
        Change::ReceptionDeleted { id } => writeln!(out, "reception {id} deleted"),
        Change::DamageFound { problem, repaired, objects } => {
            let of = if objects.is_empty() { String::new() } else { format!(" ({})", objects.join(", ")) };
            let how = repaired.as_ref().map(|how| format!("; repaired: {how}")).unwrap_or_default();
            writeln!(out, "damage found: {problem}{of}{how}")
        }
        Change::JobStarted { job } => writeln!(out, "job {} started: {}", job.id, what(job)),
        Change::JobEnded { job } => writeln!(out, "job {} {}: {}", job.id, job.state.name(), what(job)),
        Change::Missed { count } => writeln!(out, "{} lost: query the present state", human::count(*count, "event")),
    }
}
