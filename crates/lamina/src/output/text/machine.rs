//! Machines as text.

mod import;

use crate::output::human::{self, count};
use crate::output::table::{Align, Table, print_facts};
use crate::output::words;
use control::{
    Cloned, ClonedMachine, MachineActivity, MachineInfo, MachineMemory, MachineReply, MachineSummary, MachineVerb,
};
use std::io::{self, Write};
use vm::agent::Execution;
use vm::definition::{BootDevice, Card, Cdrom, Definition, Disk, Origin, Platform, WriteErrors};
use vm::machine::MachineState;
use vm::snapshots::Record;

/// Most children of a machine that are listed, unless the user requests all.
const CHILDREN_TOLD_MAX: usize = 10;
/// Most names that are listed when many machines are made at once.
const NAMES_TOLD_MAX: usize = 5;

/// Prints the answer to a request about machines.
pub fn print(out: &mut dyn Write, verb: &MachineVerb, reply: &MachineReply) -> io::Result<()> {
    match reply {
        MachineReply::Created(definition) => writeln!(out, "made machine {} ({})", definition.name, definition.uuid),
        MachineReply::Imported { machines, dry_run, .. } => import::print(out, machines, *dry_run),
        MachineReply::Edited(definition) => writeln!(out, "changed {}", definition.name),
        MachineReply::Renamed { name, definition } => writeln!(out, "machine {name} is {} now", definition.name),
        MachineReply::Exported { machine, archive, notes, .. } => {
            writeln!(out, "wrote machine {machine} to '{}'", archive.display())?;
            import::print_notes(out, notes)
        }
        MachineReply::BackedUp(done) => super::backup::print_machine(out, &done.created, done.quiet.as_deref()),
        MachineReply::Restored(restored) => super::backup::print_restored_machine(out, restored),
        MachineReply::Each { done, .. } if done.is_empty() => Ok(()),
        MachineReply::Each { done, .. } => writeln!(out, "{} {}", words::done(verb), done.join(", ")),
        MachineReply::Machine(info) => print_one(out, info, matches!(verb, MachineVerb::Show { children: true, .. })),
        MachineReply::Machines(machines) => print_all(out, machines),
        MachineReply::SnapshotTaken { machine, record, .. } => {
            writeln!(out, "took {machine}@{}: {}", record.name, words::how_taken(reply))
        }
        MachineReply::Snapshots { machine, records } => print_snapshots(out, machine, records),
        MachineReply::SnapshotDeleted(snapshot) => writeln!(out, "deleted {}@{}", snapshot.machine, snapshot.name),
        MachineReply::Reverted { snapshot, state, clock } => {
            let more = match (state, clock) {
                (MachineState::Stopped, _) => ", and off".to_owned(),
                (_, Some(Ok(()))) => "; its clock was set".to_owned(),
                (_, Some(Err(why))) => format!("; its clock still has the time of the snapshot: {why}"),
                (_, None) => String::new(),
            };
            writeln!(out, "machine {} is as it was at {}{more}", snapshot.machine, snapshot.name)
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
        // For this reply the caller attaches to the console, so the reply is not normally printed.
        MachineReply::Console { socket, .. } => writeln!(out, "{}", socket.display()),
        MachineReply::Screenshot { name, path } => writeln!(out, "wrote the screen of {name} to '{}'", path.display()),
        MachineReply::KeysSent { .. } => Ok(()),
        MachineReply::Executed { execution: Execution::Ended(ended), .. } => out.write_all(&ended.output),
        MachineReply::Executed { .. } => Ok(()),
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
    let mut broken = Vec::new();
    for MachineSummary { name, definition, state } in machines {
        let definition = match definition {
            Ok(definition) => definition,
            Err(failure) => {
                let state = match state {
                    MachineActivity::Stopped => "broken".to_owned(),
                    state => format!("broken, {}", state.name()),
                };
                table.row([name.clone(), state].into_iter().chain(std::iter::repeat_n(String::new(), 4)).collect());
                broken.push((name, failure));
                continue;
            }
        };
        table.row(vec![
            name.clone(),
            state.name().into(),
            definition.cpus.to_string(),
            human::size(definition.memory),
            definition.disks.len().to_string(),
            definition.origin.as_ref().map(origin).unwrap_or_default(),
        ]);
    }
    table.print(out)?;
    broken.into_iter().try_for_each(|(name, failure)| {
        let reason: Vec<&str> = failure.message().lines().map(str::trim).collect();
        writeln!(out, "{name} is broken: {}", reason.join(" "))
    })
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

fn print_one(out: &mut dyn Write, info: &MachineInfo, all_children: bool) -> io::Result<()> {
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
    if let Some(model) = &defined.cpu_model {
        facts.push(("CPU model", model.clone()));
    }
    if let Some(limit) = defined.qemu_memory {
        facts.push(("QEMU's own memory", format!("at most {}", human::size(limit))));
    }
    if let Some(user) = &defined.run_as {
        facts.push(("QEMU's user", user.clone()));
    }
    if defined.write_errors != WriteErrors::default() {
        facts.push(("write errors", defined.write_errors.name().into()));
    }
    if defined.autostart {
        facts.push(("autostart", "yes".into()));
    }
    if defined.ports > 0 {
        let used = defined.disks.iter().filter(|disk| disk.is_in_port()).count()
            + defined.networks.iter().filter(|network| network.is_in_port()).count();
        facts.push(("ports", format!("{used} of {} in use", defined.ports)));
    }
    if !defined.arguments.is_empty() {
        facts.push(("QEMU arguments", defined.arguments.join(" ")));
    }
    if defined.platform != Platform::default() {
        facts.push(("platform", words::platform(&defined.platform)));
    }
    if let Some(boot) = &defined.boot {
        facts.push(("kernel", boot.kernel.display().to_string()));
    }
    if !defined.boot_order.is_empty() {
        let order: Vec<&str> = defined.boot_order.iter().copied().map(BootDevice::name).collect();
        facts.push(("boot order", order.join(", ")));
    }
    if defined.new_identity.is_some() {
        facts.push(("guest's identity", "that of its source, until its next start".into()));
    }
    if let Some(seed) = &defined.seed {
        let name = seed.hostname.as_ref().unwrap_or(&defined.name);
        let data = seed.user_data.as_ref().map_or(0, String::len) as u64;
        let keys = count(seed.ssh_keys.len() as u64, "SSH key");
        facts.push(("cloud-init", format!("host name {name}, {keys}, {} of user data", human::size(data))));
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
    let drive = |it: &Cdrom| it.file.as_ref().map_or("empty".to_owned(), |file| file.display().to_string());
    several("CD-ROM drives", defined.cdroms.iter().map(drive).collect());
    several("networks", cards(defined));
    several("user networks", info.passt.iter().map(user_network).collect());
    several("console", info.console.iter().map(|path| path.display().to_string()).collect());
    several("vnc", vnc(info).into_iter().collect());
    several("clone of", defined.origin.iter().map(origin).collect());
    several("snapshots", info.snapshots.iter().map(|it| format!("{} ({})", it.name, it.consistency)).collect());
    several("image", info.image.iter().cloned().collect());
    let most = if all_children { usize::MAX } else { CHILDREN_TOLD_MAX };
    let mut children: Vec<String> =
        info.children.iter().take(most).map(|(at, child)| format!("{child} (on {at})")).collect();
    if info.children.len() > most {
        children.push(format!("and {} more; --children prints all", info.children.len() - most));
    }
    several("children", children);
    print_facts(out, &facts)
}

/// Where VNC listens.
fn vnc(info: &MachineInfo) -> Option<String> {
    let vnc = info.definition.vnc?;
    let at = info.vnc.as_ref().map_or_else(|| vnc.to_string(), |socket| socket.display().to_string());
    let password = info.vnc_password.as_ref().map(|file| format!(", password in {}", file.display()));
    let tls = info.definition.vnc_tls.as_ref().map(|tls| {
        let verified = if tls.clients { ", for viewers with a certificate" } else { "" };
        format!(", encrypted by {}{verified}", tls.folder.display())
    });
    Some(at + &password.unwrap_or_default() + &tls.unwrap_or_default())
}

fn user_network(passt: &Result<(), String>) -> String {
    passt.as_ref().map_or_else(|why| format!("QEMU's own, not passt: {why}"), |()| "passt".to_owned())
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
