//! A guest is cloned while databases in it commit. Each clone, of every kind, has a clean file system and a valid
//! database. The database has every transaction that was acknowledged before the cloning, and no partial transaction.
//!
//! The guest writes alternately to two databases on two disks: the first with a rollback journal, the second with a
//! write-ahead log. All disks of a clone are copies of the same moment, so the second database lacks at most the last
//! transaction of the first.

#![allow(clippy::unwrap_used)]

use testkit::machines::Room;

const ROLLBACK: &str = "/ledger/rollback.db";
const WAL: &str = "/mnt/wal.db";
/// Minimum number of transactions that are acknowledged between two clones.
const BETWEEN: u64 = 20;

/// Number of the last transaction that a database has acknowledged.
fn acknowledged(console: &str, database: &str) -> u64 {
    // The last line may be incomplete.
    let whole = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let number = |line: &str| line.trim().strip_prefix(database)?.strip_prefix(' ')?.parse().ok();
    whole.lines().rev().find_map(number).unwrap_or(0)
}

/// Waits until the parent has committed more transactions; returns the last acknowledged ones: rollback journal,
/// write-ahead log.
#[track_caller]
fn commits(room: &Room) -> (u64, u64) {
    let numbers = || {
        let console = room.console("parent");
        (acknowledged(&console, "main"), acknowledged(&console, "wal"))
    };
    let before = numbers();
    room.until("transactions are committed", || numbers().1 >= before.1 + BETWEEN);
    numbers()
}

/// The number of the last transaction in a database. The database must be valid and have all earlier transactions
/// completely.
#[track_caller]
fn recovered(room: &Room, name: &str, database: &str) -> u64 {
    let ask = |query: &str| room.shell(name, &format!("sqlite3 {database} '{query}'"));
    assert_eq!(ask("PRAGMA integrity_check"), "ok", "{name}: {database}");
    let tables = ["debit", "credit"].map(|table| {
        let all = "count(*), min(number), max(number), sum(amount), min(length(filler)), max(length(filler))";
        ask(&format!("SELECT {all} FROM {table}")).split('|').map(|word| word.parse().unwrap()).collect::<Vec<u64>>()
    });
    let [debit, credit] = &tables;
    assert_eq!(debit[..4], credit[..4], "{name}: {database}: half of a transaction is missing");
    assert_eq!(debit[0], debit[2], "{name}: {database}: a transaction in the middle is missing");
    assert_eq!(
        (&debit[1], &debit[4..], &credit[4..]),
        (&1, &[5000, 5000][..], &[3000, 3000][..]),
        "{name}: {database}"
    );
    debit[2]
}

#[test]
fn a_database_recovers_in_every_kind_of_hot_clone() {
    let room = Room::new();
    room.run("disk create log --size 256M").ok();
    room.boot_from("database-initrd", "parent", "--memory 128M --disk log", "fsck");
    room.shell("parent", "mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt && mkdir /ledger && sync");
    room.shell("parent", &format!("setsid ledger {ROLLBACK} {WAL} >/dev/ttyS0 2>&1 </dev/null &"));

    // For each clone: the transactions that were acknowledged before it was made, and the last transaction that can
    // have been committed when it was complete.
    let mut clones = Vec::new();
    let mut hot = |name: &str, commands: &[&str]| {
        let before = commits(&room);
        for command in commands {
            let done = room.run(command);
            assert!(done.code == 0 && !done.stdout.contains("frozen"), "{done:?}");
        }
        let after = acknowledged(&room.console("parent"), "main") + 1;
        clones.push((name.to_string(), before, after));
    };
    hot("full", &["vm clone parent full --full"]);
    hot("linked", &["vm clone parent linked --linked"]);
    hot("snapshot", &["vm snapshot create parent@now", "vm clone parent@now snapshot --linked"]);
    hot("again", &["vm clone parent again --linked"]);
    commits(&room);
    assert_eq!(room.state("parent"), "running");
    // The parent is no longer needed, and would take processor time from the clones.
    room.run("vm stop parent --force").ok();

    let mut hot_journals = 0;
    for names in ["full linked", "snapshot again"] {
        room.run(&format!("vm start {names}")).ok();
        for name in names.split(' ') {
            room.until_says(name, "guest: up");
            room.until_answers(name);
            let (_, before, after) = clones.iter().find(|clone| clone.0 == name).unwrap();
            assert!(room.console(name).contains("guest: its file system is clean"), "{}", room.console(name));
            // Mounting replays the journal; then the whole file system is checked.
            room.shell(name, "mount /dev/vdb /mnt && umount /mnt && e2fsck -fn /dev/vdb 2>&1 && mount /dev/vdb /mnt");
            let journal = room.shell(name, &format!("[ ! -s {ROLLBACK}-journal ] || echo there"));
            hot_journals += u32::from(journal == "there");
            let (rollback, log) = (recovered(&room, name, ROLLBACK), recovered(&room, name, WAL));
            assert!(rollback >= before.0 && log >= before.1, "{name}: {rollback}, {log} of {before:?} acknowledged");
            assert!(rollback <= *after, "{name}: {rollback} when {after} was not there yet");
            assert!(log <= rollback && rollback <= log + 1, "{name}: disks of two moments: {rollback}, {log}");
        }
        room.run(&format!("vm stop {names} --force")).ok();
    }
    eprintln!("{hot_journals} of {} rollback journals were to be played back; last: {:?}", clones.len(), clones.last());
    room.close();
}
