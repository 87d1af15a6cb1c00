//! Scrubs as text.

use crate::cli::interval::interval;
use crate::output::human::{count, size, time};
use crate::output::table::print_facts;
use control::{Request, ScrubRequest};
use disk::{ScrubReport, ScrubState, ScrubSummary};
use std::io::{self, Write};

/// The state in one line, for the status of a datastore.
pub fn short(summary: &ScrubSummary) -> String {
    let mut text = state(summary);
    if let (ScrubState::Done, Some(ended)) = (summary.state, summary.ended) {
        text = format!("{text} {}", time(ended));
    }
    match summary.damaged {
        0 if summary.state == ScrubState::Never => text,
        0 => format!("{text}, no damage"),
        damaged => format!("{text}, {}: 'lamina scrub status' lists them", count(damaged, "damaged place")),
    }
}

fn state(summary: &ScrubSummary) -> String {
    let name = summary.state.name();
    match (summary.state, summary.total) {
        (ScrubState::Running | ScrubState::Cancelling, total) if total > 0 => {
            format!("{name}, {}%", u128::from(summary.done.min(total)) * 100 / u128::from(total))
        }
        _ => name.into(),
    }
}

fn schedule(summary: &ScrubSummary) -> String {
    let Some(every) = summary.every else { return "none".into() };
    let rate = if summary.rate > 0 { format!(" at {}/s", size(summary.rate)) } else { String::new() };
    let next = summary.due.map(|due| format!(", next {} if the datastore is served", time(due))).unwrap_or_default();
    format!("every {}{rate}{next}", interval(every))
}

fn facts(summary: &ScrubSummary) -> Vec<(&'static str, String)> {
    let mut facts = vec![("state", state(summary))];
    facts.extend(summary.started.map(|started| ("started", time(started))));
    if summary.done > 0 {
        facts.push(("read", size(summary.done)));
    }
    facts.extend(summary.ended.map(|ended| ("last end", time(ended))));
    facts.push(("found", format!("{}, {} repaired", count(summary.found, "damaged place"), summary.repaired)));
    facts.push(("schedule", schedule(summary)));
    facts
}

/// Prints the state of the scrub after a command has changed it.
pub fn print_state(out: &mut dyn Write, request: &Request, summary: &ScrubSummary) -> io::Result<()> {
    match request {
        Request::Scrub(ScrubRequest::Schedule { .. }) if summary.every.is_none() => {
            writeln!(out, "no scrub is scheduled")
        }
        Request::Scrub(ScrubRequest::Schedule { .. }) => writeln!(out, "scrubs {}", schedule(summary)),
        _ if summary.state == ScrubState::Cancelling => writeln!(out, "the scrub is stopping"),
        _ => writeln!(out, "the scrub is stopped; 'lamina scrub start' continues it"),
    }
}

/// Prints the state and the list of damage.
pub fn print(out: &mut dyn Write, report: &ScrubReport) -> io::Result<()> {
    print_facts(out, &facts(&report.summary))?;
    if let Some(last) = &report.last {
        writeln!(
            out,
            "last whole scrub: {}, {} and {} examined",
            count(last.pages, "metadata page"),
            count(last.blocks, "data block"),
            count(last.images, "image")
        )?;
        for disk in &last.skipped {
            writeln!(out, "disk {disk} was not examined, because another operation used it")?;
        }
    }
    for damage in &report.damage {
        match &damage.repaired {
            Some(repair) => writeln!(out, "{}; repaired: {repair}", damage.problem)?,
            None => writeln!(out, "{}", damage.problem)?,
        }
        for reference in &damage.references {
            let bytes = format!("bytes {} to {}", reference.offset, reference.offset + reference.length);
            writeln!(out, "  {} {bytes}", reference.name)?;
        }
        if damage.unlisted > 0 {
            writeln!(out, "  and {} more disks and snapshots", damage.unlisted)?;
        }
    }
    if report.unlisted > 0 {
        writeln!(out, "{} more damaged places", report.unlisted)?;
    }
    for touched in &report.touched {
        writeln!(out, "{}: {}", touched.name, count(touched.places, "damaged place"))?;
    }
    match report.summary.damaged {
        0 => writeln!(out, "no damage"),
        damaged => writeln!(out, "{} without a good copy", count(damaged, "damaged place")),
    }
}
