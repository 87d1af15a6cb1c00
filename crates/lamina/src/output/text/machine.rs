//! Machines as text.

mod import;

use crate::output::human::{self, count};
use crate::output::table::{Align, Table, print_facts};
use crate::output::words;
use control::{Cloned, ClonedMachine, MachineInfo, MachineMemory, MachineReply, MachineSummary, MachineVerb};
use std::io::{self, Write};
use vm::definition::{Card, Definition, Disk, Origin, Platform};
use vm::machine::MachineState;
use vm::snapshots::Record;

/// Most names that are listed when many machines are made at once.
const NAMES_TOLD_MAX: usize = 5;

/// Prints the answer to a request about machines.
pub fn print(out: &mut dyn Write, verb: &MachineVerb, reply: &MachineReply) -> io::Result<()> {
    match reply {
        MachineReply::Created(definition) => writeln!(out, "made machine {} ({})", definition.name, definition.uuid),
        MachineReply::Imported { machines, dry_run, .. } => import::print(out, machines, *dry_run),
        MachineReply::Exported { machine, archive, notes, .. } => {
            writeln!(out, "wrote machine {machine} to '{}'", archive.display())?;
            import::print_notes(out, notes)
        }
        MachineReply::Each { done, .. } if done.is_empty() => Ok(()),
        MachineReply::Each { done, .. } => writeln!(out, "{} {}", words::done(verb), done.join(", ")),
        MachineReply::Machine(info) => print_one(out, info),
        MachineReply::Machines(machines) => print_all(out, machines),
        MachineReply::SnapshotTaken { machine, record, .. } => {
            writeln!(out, "took {machine}@{}: {}", record.name, words::how_taken(reply))
        }
        MachineReply::Snapshots { machine, records } => print_snapshots(out, machine, records),
        MachineReply::SnapshotDeleted(snapshot) => writeln!(out, "deleted {}@{}", snapshot.machine, snapshot.name),
        MachineReply::Reverted { snapshot, state } => {
            let off = if *state == MachineState::Stopped { ", and off" } else { "" };
            writeln!(out, "machine {} is as it was at {}{off}", snapshot.machine, snapshot.name)
        }
        MachineReply::Cloned(cloned) => print_cloned(out, cloned),
        MachineReply::Sent { machine, name, sent, quiet } => {
            super::send::print(out, sent)?;
            match quiet {
                Some(quiet) => writeln!(out, "machine {machine} is {name} there; {quiet}"),
                None => Ok(()),
            }
        }
        MachineReply::Frozen { name, image, stop_ms, disks_ms, state_ms } => writeln!(
            out,
            "froze {name} to image {image} (stop {stop_ms:.1} ms, disks {disks_ms:.1} ms, state {state_ms:.1} ms)"
        ),
        // The caller attaches to the console, so this reply is not normally printed.
        MachineReply::Console { socket, .. } => writeln!(out, "{}", socket.display()),
        MachineReply::Executed { output, .. } => out.write_all(output),
    }
}

fn origin(origin: &Origin) -> String {
    let at = origin.snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
    format!("{}{at} ({} clone)", origin.machine, origin.way.name())
}

fn print_all(out: &mut dyn Write, machines: &[MachineSummary]) -> io::Result<()> {
    let columns = [("NAME", Align::Left), ("STATE", Align::Left), ("CPUS", Align::Right), ("MEMORY", Align::Right)];
    let more = [("DISKS", Align::Right), ("CLONE OF", Align::Left)];
    let mut table = Table::new(&[&columns[..], &more[..]].concat());
    for MachineSummary { definition, state } in machines {
        table.row(vec![
            definition.name.clone(),
            state.name().into(),
            definition.cpus.to_string(),
            human::size(definition.memory),
            definition.disks.len().to_string(),
            definition.origin.as_ref().map(origin).unwrap_or_default(),
        ]);
    }
    table.print(out)
}

fn print_snapshots(out: &mut dyn Write, machine: &str, records: &[Record]) -> io::Result<()> {
    let columns = [("SNAPSHOT", Align::Left), ("TAKEN", Align::Left), ("HOLDS", Align::Left), ("DISKS", Align::Right)];
    let mut table = Table::new(&columns);
    for record in records {
        let holds =
            if record.has_memory() { "disks and memory".into() } else { format!("disks, {}", record.consistency) };
        let taken = human::time(record.created);
        table.row(vec![format!("{machine}@{}", record.name), taken, holds, record.disks.len().to_string()]);
    }
    table.print(out)
}

fn print_one(out: &mut dyn Write, info: &MachineInfo) -> io::Result<()> {
    let defined = &info.definition;
    let state = info.state.name();
    let accelerator = &info.accelerator;
    let mut facts = vec![
        ("name", defined.name.clone()),
        ("uuid", defined.uuid.to_string()),
        ("state", info.pid.map_or(state.to_owned(), |pid| format!("{state} (process {pid})"))),
        ("accelerator", info.why_not_kvm.as_ref().map_or(accelerator.clone(), |why| format!("{accelerator}: {why}"))),
        ("cpus", defined.cpus.to_string()),
        ("memory", memory(defined.memory, info.memory)),
    ];
    if defined.platform != Platform::default() {
        facts.push(("platform", words::platform(&defined.platform)));
    }
    if let Some(boot) = &defined.boot {
        facts.push(("kernel", boot.kernel.display().to_string()));
    }
    let mut several = |title: &'static str, values: Vec<String>| {
        for (index, value) in values.into_iter().enumerate() {
            facts.push((if index == 0 { title } else { "" }, value));
        }
    };
    let disk = |it: &Disk| match info.capacities.iter().find(|(disk, _)| *disk == it.name) {
        Some((_, capacity)) => format!("{} ({}{})", it.name, human::size(*capacity), words::place(it)),
        None => format!("{} (MISSING)", it.name),
    };
    several("disks", defined.disks.iter().map(disk).collect());
    several("networks", cards(defined));
    several("console", info.console.iter().map(|path| path.display().to_string()).collect());
    several("clone of", defined.origin.iter().map(origin).collect());
    several("snapshots", info.snapshots.iter().map(|it| format!("{} ({})", it.name, it.consistency)).collect());
    several("image", info.image.iter().cloned().collect());
    several("children", info.children.iter().map(|(at, child)| format!("{child} (on {at})")).collect());
    print_facts(out, &facts)
}

fn cards(defined: &Definition) -> Vec<String> {
    let model = |model: Card| if model == Card::Virtio { String::new() } else { format!(" ({})", model.name()) };
    let card = defined.networks.iter();
    card.map(|it| format!("{}{} on {}", it.mac, model(it.model), words::link(&it.link))).collect()
}

fn memory(size: u64, memory: Option<MachineMemory>) -> String {
    let size = human::size(size);
    match memory {
        Some(MachineMemory::OwnFile) => format!("{size}, in a file of its own"),
        Some(MachineMemory::Shared) => format!("{size}, shared copy-on-write"),
        Some(MachineMemory::Private) | None => size,
    }
}

fn print_cloned(out: &mut dyn Write, cloned: &Cloned) -> io::Result<()> {
    let Cloned { kind, made, quiet, stun_ms, .. } = cloned;
    if made.is_empty() {
        return Ok(());
    }
    write!(out, "made {}: {}", count(made.len() as u64, &format!("{} clone", kind.name())), names(made))?;
    if let Some(stun) = stun_ms {
        write!(out, " (the source was paused for {stun:.1} ms)")?;
    }
    match quiet {
        Some(quiet) => writeln!(out, "; {quiet}"),
        None => writeln!(out),
    }
}

fn names(made: &[ClonedMachine]) -> String {
    match made {
        [first, .., last] if made.len() > NAMES_TOLD_MAX => format!("{} to {}", first.name, last.name),
        _ => made.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}
