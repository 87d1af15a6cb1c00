//! Backups as text.

use crate::output::human::{count, size, time};
use crate::output::table::{Align, Table};
use backup::{BackupInfo, Created, LiveRestored, MachineCreated, Pruned, Restored, Verified};
use control::RestoredMachine;
use std::collections::BTreeSet;
use std::io::{self, Write};

/// Characters of an identity that are shown: enough to name the backup.
const ID_SHOWN: usize = 8;

/// The snapshot of a backup, as commands name it.
fn source(backup: &BackupInfo) -> String {
    let prefix = if backup.machine.is_some() { "machine:" } else { "" };
    format!("{prefix}{}@{}", backup.disk, backup.snapshot)
}

/// Prints a new backup.
pub fn print_created(out: &mut dyn Write, created: &Created) -> io::Result<()> {
    let source = format!("{}@{}", created.disk, created.snapshot);
    if created.already {
        return writeln!(out, "{source} was backed up before, as {}", &created.id[..ID_SHOWN.min(created.id.len())]);
    }
    write!(out, "backed up {source}: {} of data", size(created.data))?;
    if let Some(base) = &created.based_on {
        write!(out, " changed since {base}")?;
    }
    if created.resumed > 0 {
        write!(out, ", {} stored before", size(created.resumed))?;
    }
    writeln!(out, ", {} stored in {:.1} s", size(created.stored), created.seconds)
}

/// Prints a new backup of a machine; `quiet` is the consistency of the snapshot that was taken for it.
pub fn print_machine(out: &mut dyn Write, created: &MachineCreated, quiet: Option<&str>) -> io::Result<()> {
    let source = format!("machine {}@{}", created.machine, created.snapshot);
    if created.already {
        return writeln!(out, "{source} was backed up before, as {}", &created.id[..ID_SHOWN.min(created.id.len())]);
    }
    let sum = |of: fn(&Created) -> u64| created.disks.iter().filter(|disk| !disk.already).map(of).sum::<u64>();
    let (data, stored, resumed) = (sum(|disk| disk.data), sum(|disk| disk.stored), sum(|disk| disk.resumed));
    write!(out, "backed up {source}: {}, {} of data", count(created.disks.len() as u64, "disk"), size(data))?;
    let bases: BTreeSet<&String> = created.disks.iter().filter_map(|disk| disk.based_on.as_ref()).collect();
    if !bases.is_empty() {
        write!(out, " changed since {}", bases.into_iter().cloned().collect::<Vec<_>>().join(", "))?;
    }
    if resumed > 0 {
        write!(out, ", {} stored before", size(resumed))?;
    }
    write!(out, ", {} stored in {:.1} s", size(stored + created.stored), created.seconds)?;
    match quiet {
        Some(quiet) => writeln!(out, "; {quiet}"),
        None => writeln!(out),
    }
}

/// Prints a restored machine.
pub fn print_restored_machine(out: &mut dyn Write, restored: &RestoredMachine) -> io::Result<()> {
    let RestoredMachine { source, definition, .. } = restored;
    let disks = count(definition.disks.len() as u64, "disk");
    write!(out, "restored machine {} from {source}: {disks}", definition.name)?;
    match restored.live {
        true => writeln!(out, ", which the server copies now")?,
        false => writeln!(out, ", {} of data in {:.1} s", size(restored.data), restored.seconds)?,
    }
    if restored.new_identity {
        writeln!(out, "it has a new UUID and new MAC addresses, because another machine has those of the backup")?;
    }
    restored
        .ejected
        .iter()
        .try_for_each(|file| writeln!(out, "a CD-ROM drive is empty now, because '{}' does not exist", file.display()))
}

/// Prints a restored disk.
pub fn print_restored(out: &mut dyn Write, restored: &Restored) -> io::Result<()> {
    write!(out, "restored {}@{}: {} of data", restored.disk, restored.snapshot, size(restored.data))?;
    if restored.resumed > 0 {
        write!(out, ", {} restored before", size(restored.resumed))?;
    }
    writeln!(out, " in {:.1} s", restored.seconds)
}

/// Prints a disk that can be used while its content arrives.
pub fn print_live(out: &mut dyn Write, restored: &LiveRestored) -> io::Result<()> {
    let LiveRestored { disk, source, .. } = restored;
    let copy = match (restored.known, restored.served) {
        (true, true) => "its content is arriving already; the server tries again what has failed",
        (true, false) => "its content is arriving already, while a server serves the datastore",
        (false, true) => "the server copies it meanwhile",
        (false, false) => "a server of the datastore copies it",
    };
    writeln!(out, "{disk} can be used, with the content of {source}: {copy}")?;
    if let Some(why) = &restored.unprotected {
        writeln!(out, "keep the backup until then: the repository could not record that it is needed ({why})")?;
    }
    Ok(())
}

/// Prints the result of a verification.
pub fn print_verified(out: &mut dyn Write, verified: &Verified) -> io::Result<()> {
    verified.problems.iter().try_for_each(|problem| writeln!(out, "{problem}"))?;
    writeln!(
        out,
        "{} verified: {} of data in {}",
        count(verified.backups, "backup"),
        size(verified.data),
        size(verified.bytes)
    )?;
    match verified.problems.len() {
        0 => writeln!(out, "clean"),
        found => writeln!(out, "{}", count(found as u64, "problem")),
    }
}

/// Prints which backups rules keep, and which were deleted.
pub fn print_pruned(out: &mut dyn Write, pruned: &Pruned) -> io::Result<()> {
    let deleted = if pruned.dry_run { "would be deleted" } else { "deleted" };
    let columns = [("ID", Align::Left), ("SOURCE", Align::Left), ("TAKEN", Align::Left), ("KEPT AS", Align::Left)];
    let mut table = Table::new(&columns);
    for judged in &pruned.backups {
        let backup = &judged.backup;
        let kept = if judged.reasons.is_empty() { deleted.to_owned() } else { judged.reasons.join(", ") };
        let id = backup.id[..ID_SHOWN.min(backup.id.len())].to_owned();
        table.row(vec![id, source(backup), time(backup.taken), kept]);
    }
    table.print(out)?;
    writeln!(out, "{} {deleted}, {} of stored data", count(pruned.deleted, "backup"), size(pruned.freed))
}

/// Prints backups.
pub fn print_all(out: &mut dyn Write, backups: &[BackupInfo]) -> io::Result<()> {
    let with_machines = backups.iter().any(|backup| backup.machine.is_some());
    let mut columns = vec![
        ("ID", Align::Left),
        ("SOURCE", Align::Left),
        ("TAKEN", Align::Left),
        ("CAPACITY", Align::Right),
        ("DATA", Align::Right),
        ("STORED", Align::Right),
        ("BASED ON", Align::Left),
        ("STATE", Align::Left),
    ];
    if with_machines {
        columns.insert(7, ("DISKS", Align::Left));
    }
    let mut table = Table::new(&columns);
    for backup in backups {
        let state = match (&backup.problem, backup.finished) {
            (Some(problem), _) => problem.clone(),
            (None, None) => "unfinished".into(),
            (None, Some(_)) => "complete".into(),
        };
        if backup.disk.is_empty() {
            let mut row = vec![backup.id.clone()];
            row.resize(columns.len() - 1, String::new());
            row.push(state);
            table.row(row);
            continue;
        }
        let parent = backup.parent.as_deref().unwrap_or("-");
        let mut row = vec![
            backup.id[..ID_SHOWN.min(backup.id.len())].to_owned(),
            source(backup),
            time(backup.taken),
            size(backup.capacity),
            size(backup.data),
            size(backup.stored),
            parent[..ID_SHOWN.min(parent.len())].to_owned(),
            state,
        ];
        if with_machines {
            let disks = backup.machine.iter().flat_map(|machine| &machine.disks).map(|disk| disk.disk.as_str());
            row.insert(7, disks.collect::<Vec<_>>().join(", "));
        }
        table.row(row);
    }
    table.print(out)
}
