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
        let mac = plan.reported_address(network, dry_run).map_or("a new address".to_owned(), |mac| mac.to_string());
        fact("network", format!("{mac} {} on {}", network.model.name(), words::link(&network.link)))?;
    }
    for snapshot in snapshots {
        let condition = if dry_run { ", if the images of its disks have it" } else { "" };
        fact("snapshot", format!("{snapshot}{condition}"))?;
    }
    if dry_run && plan.disks.iter().any(|disk| matches!(disk.content, Content::Member { .. })) {
        fact("digests", "not verified: the import verifies those in the manifest, and refuses wrong ones".to_owned())?;
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
    use vm::definition::{Definition, Link};
    use vm::identity::Mac;
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
            new_addresses: Vec::new(),
        };
        let machine = ImportedMachine { plan, snapshots: vec![evil.into()], started: false };
        let mut out = Vec::new();
        print(&mut out, &[machine], true).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains('\u{1b}'), "{text:?}");
        assert_eq!(text.matches("\\u{1b}[31mred\\n").count(), 4, "{text:?}");
        assert_eq!(text.lines().count(), 6, "{text:?}");
    }

    #[test]
    fn a_dry_run_says_what_only_the_import_decides() {
        let mut definition = Definition::new("web", 1, 64 << 20).unwrap();
        let (kept, made): (Mac, Mac) = ("52:54:00:00:00:01".parse().unwrap(), "52:54:00:00:00:02".parse().unwrap());
        for mac in [kept, made] {
            definition.add_network(mac, Link::None).unwrap();
        }
        let content = Content::Member { archive: "/vms/web.ova".into(), member: "d.vmdk".into() };
        let disk =
            PlannedDisk { name: "web".into(), label: "disk".into(), content, capacity: Some(1 << 20), stated: None };
        let plan = Plan {
            source: "/vms/web.ova".into(),
            format: Format::Ova,
            definition,
            disks: vec![disk],
            nvram: None,
            snapshots: Vec::new(),
            notes: Vec::new(),
            new_addresses: vec![made],
        };
        let machine = ImportedMachine { plan, snapshots: vec!["monday".into()], started: false };
        let printed = |dry_run| {
            let mut out = Vec::new();
            print(&mut out, std::slice::from_ref(&machine), dry_run).unwrap();
            String::from_utf8(out).unwrap()
        };
        let (dry, done) = (printed(true), printed(false));
        assert!(dry.contains("  network:  52:54:00:00:00:01 ") && dry.contains("  network:  a new address "), "{dry}");
        assert!(dry.contains("  snapshot: monday, if the images") && dry.contains("  digests:  not verified"), "{dry}");
        assert!(done.contains("  network:  52:54:00:00:00:02 ") && !done.contains("digests:"), "{done}");
        assert!(done.contains("  snapshot: monday\n"), "{done}");
    }
}
