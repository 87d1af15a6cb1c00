//! Imported machines as text.

use crate::output::human;
use crate::output::printable::printable;
use crate::output::words;
use control::ImportedMachine;
use std::io::{self, Write};
use vm::import::plan::PlannedDisk;
use vm::import::{Content, Note};

/// Prints the machines that were imported, or would be.
pub fn print(out: &mut dyn Write, machines: &[ImportedMachine], dry_run: bool) -> io::Result<()> {
    machines.iter().try_for_each(|machine| print_one(out, machine, dry_run))
}

fn print_one(out: &mut dyn Write, machine: &ImportedMachine, dry_run: bool) -> io::Result<()> {
    let ImportedMachine { plan, snapshots, started } = machine;
    let defined = &plan.definition;
    let done = match (dry_run, started) {
        (true, _) => "would make",
        (false, true) => "made and started",
        (false, false) => "made",
    };
    let source = plan.source.to_string_lossy();
    writeln!(out, "{done} machine {} from '{}'", defined.name, printable(&source))?;
    let mut fact = |name: &str, value: String| writeln!(out, "  {:<10}{}", format!("{name}:"), printable(&value));
    fact("platform", words::platform(&defined.platform))?;
    fact("cpus", defined.cpus.to_string())?;
    fact("memory", human::size(defined.memory))?;
    for (disk, planned) in defined.disks.iter().zip(&plan.disks) {
        let size = planned.capacity.map(|capacity| format!(", {}", human::size(capacity))).unwrap_or_default();
        let place = format!("{} unit {}", disk.bus.name(), disk.unit);
        fact("disk", format!("{}: {place}{size}, {}", disk.name, origin(planned)))?;
    }
    for network in &defined.networks {
        fact("network", format!("{} {} on {}", network.mac, network.model.name(), words::link(&network.link)))?;
    }
    for snapshot in snapshots {
        fact("snapshot", snapshot.clone())?;
    }
    print_notes(out, &plan.notes)
}

/// Prints what differs from the source.
pub fn print_notes(out: &mut dyn Write, notes: &[Note]) -> io::Result<()> {
    notes.iter().try_for_each(|note| {
        let kind = format!("{}:", note.effect.name());
        writeln!(out, "  {kind:<10}{}: {}", printable(&note.item), printable(&note.reason))
    })
}

fn origin(disk: &PlannedDisk) -> String {
    match &disk.content {
        Content::Image { path, .. } => format!("from {} '{}'", disk.label, path.display()),
        Content::Member { member, .. } => format!("from {} '{member}'", disk.label),
        Content::Empty { .. } => format!("{}, empty", disk.label),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::path::PathBuf;
    use vm::definition::Definition;
    use vm::import::plan::Plan;
    use vm::import::{Effect, Format};

    #[test]
    fn texts_of_the_source_reach_no_terminal_as_they_are() {
        let evil = "\u{1b}[31mred\n";
        let plan = Plan {
            source: PathBuf::from(format!("/vms/{evil}/web.vmx")),
            format: Format::Vmx,
            definition: Definition::new("web", 1, 64 << 20).unwrap(),
            disks: Vec::new(),
            nvram: None,
            snapshots: Vec::new(),
            notes: vec![Note { effect: Effect::Changed, item: evil.into(), reason: evil.into() }],
        };
        let machine = ImportedMachine { plan, snapshots: vec![evil.into()], started: false };
        let mut out = Vec::new();
        print(&mut out, &[machine], true).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains('\u{1b}'), "{text:?}");
        assert_eq!(text.matches("\\u{1b}[31mred\\n").count(), 4, "{text:?}");
        assert_eq!(text.lines().count(), 6, "{text:?}");
    }
}
