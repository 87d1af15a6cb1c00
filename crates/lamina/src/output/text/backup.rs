//! Backups as text.

use crate::output::human::{count, size, time};
use crate::output::table::{Align, Table};
use backup::{BackupInfo, Created, LiveRestored, Pruned, Restored, Verified};
use std::io::{self, Write};

/// Characters of an identity that are shown: enough to name the backup.
const ID_SHOWN: usize = 8;

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
        table.row(vec![id, format!("{}@{}", backup.disk, backup.snapshot), time(backup.taken), kept]);
    }
    table.print(out)?;
    writeln!(out, "{} {deleted}, {} of stored data", count(pruned.deleted, "backup"), size(pruned.freed))
}

/// Prints backups.
pub fn print_all(out: &mut dyn Write, backups: &[BackupInfo]) -> io::Result<()> {
    let mut table = Table::new(&[
        ("ID", Align::Left),
        ("SOURCE", Align::Left),
        ("TAKEN", Align::Left),
        ("CAPACITY", Align::Right),
        ("DATA", Align::Right),
        ("STORED", Align::Right),
        ("BASED ON", Align::Left),
        ("STATE", Align::Left),
    ]);
    for backup in backups {
        let state = match (&backup.problem, backup.finished) {
            (Some(problem), _) => problem.clone(),
            (None, None) => "unfinished".into(),
            (None, Some(_)) => "complete".into(),
        };
        if backup.disk.is_empty() {
            let mut row = vec![backup.id.clone()];
            row.resize(7, String::new());
            row.push(state);
            table.row(row);
            continue;
        }
        let parent = backup.parent.as_deref().unwrap_or("-");
        table.row(vec![
            backup.id[..ID_SHOWN.min(backup.id.len())].to_owned(),
            format!("{}@{}", backup.disk, backup.snapshot),
            time(backup.taken),
            size(backup.capacity),
            size(backup.data),
            size(backup.stored),
            parent[..ID_SHOWN.min(parent.len())].to_owned(),
            state,
        ]);
    }
    table.print(out)
}
