//! A server is killed with SIGKILL at random times during every operation on disks in VMware's formats, while a client
//! writes.
//!
//! There are three disks, one for each delta format. In each round, one of the disks is written, and operations on it
//! are killed: snapshots are taken, deleted upwards and downwards and reverted to; levels are wiped, shrunk and
//! consolidated; the base is inflated and punched; clones are made. The kill happens at a random time. Afterwards the
//! datastore must open, every sector of the disk and of each listed snapshot must have an allowed version
//! ([`history`]), the check must be clean, and QEMU must read the same content from the files.

#![allow(clippy::unwrap_used)]

use parking_lot::Mutex;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::history::{History, read_export};
use testkit::nbd::{Client, Failure};
use testkit::process;
use testkit::process::{Store, tool};

const KILLS: u64 = 42;
const SIZE: usize = 8 << 20;
/// Snapshots kept of each disk.
const SNAPSHOTS: usize = 4;
/// Latest time of a kill after the operation began, in milliseconds.
const KILL_AFTER_MS_MAX: u64 = 120;

/// The operations that are interrupted.
const OPERATIONS: [&str; 10] = [
    "snapshot create",
    "snapshot create",
    "snapshot delete --up",
    "snapshot delete --down",
    "snapshot delete",
    "disk consolidate",
    "disk wipe",
    "disk shrink",
    "disk inflate",
    "disk punchzero",
];

/// Writes until the server is killed.
fn write_on(store: &Store, history: &Mutex<History>, killed: &AtomicBool) {
    let name = history.lock().name.clone();
    let mut client = match Client::connect(&store.socket(), &name) {
        Ok(client) => client,
        // The server was killed before it accepted the connection.
        Err(_) => return process::until("the server was killed", || killed.load(Ordering::Acquire)),
    };
    loop {
        match history.lock().step(&mut client) {
            Ok(()) => {}
            Err(Failure::Gone(_)) => break,
            Err(Failure::Errno(errno)) => panic!("{name}: a request failed with {errno}"),
        }
        std::thread::yield_now();
    }
    process::until("the server was killed", || killed.load(Ordering::Acquire));
}

/// The delta format of a disk, which is also its name.
fn delta_of(disk: &str) -> &str {
    disk
}

/// Runs a command that may be interrupted; true if it succeeded.
fn attempt(store: &Store, arguments: &str) -> bool {
    let outcome = process::output(&mut store.command(arguments));
    outcome.status.success()
}

/// Statistics of the operations.
#[derive(Default)]
struct Tally {
    /// Operations that completed before the kill.
    done: AtomicU64,
    /// Operations that the kill interrupted.
    cut: AtomicU64,
}

/// Repeats one operation until the server is killed. Snapshots are taken between two rounds of writes, so that their
/// content is known; if the command was interrupted, its snapshot may exist or not.
fn operate(
    store: &Store,
    history: &Mutex<History>,
    operation: &str,
    random: &mut Random,
    killed: &AtomicBool,
    tally: &Tally,
) {
    let mut number = 0;
    while !killed.load(Ordering::Acquire) {
        number += 1;
        let (disk, snapshots) = {
            let history = history.lock();
            let names: Vec<String> = history.snapshots.iter().map(|(name, _)| name.clone()).collect();
            (history.name.clone(), names)
        };
        let any = snapshots.get(random.below(snapshots.len().max(1) as u64) as usize);
        let wanted = if snapshots.len() < 2 { "snapshot create" } else { operation };
        let fits = delta_of(&disk) == "sesparse" || !matches!(operation, "disk wipe" | "disk shrink");
        let wanted = if fits { wanted } else { "disk consolidate" };
        let deletes =
            wanted.starts_with("snapshot delete") || wanted == "snapshot create" && snapshots.len() >= SNAPSHOTS;
        let done = match (wanted.split_once(" --"), any) {
            (option, Some(name)) if deletes => {
                let option = option.map_or(String::new(), |(_, option)| format!(" --{option}"));
                attempt(store, &format!("snapshot delete {disk}@{name}{option}"))
            }
            _ if wanted == "snapshot create" => {
                let mut history = history.lock();
                let name = format!("s{}-{number}", history.version);
                history.snapshot_taken(&name);
                attempt(store, &format!("snapshot create {disk}@{name}"))
            }
            _ => attempt(store, &format!("{wanted} {disk}")),
        };
        if done {
            tally.done.fetch_add(1, Ordering::Relaxed);
        } else if killed.load(Ordering::Acquire) {
            tally.cut.fetch_add(1, Ordering::Relaxed);
        }
        if done && deletes {
            let gone = any.cloned();
            history.lock().snapshots.retain(|(name, _)| Some(name) != gone.as_ref());
        }
        // A consolidation deletes all snapshots.
        if done && wanted == "disk consolidate" {
            history.lock().snapshots.clear();
        }
    }
}

#[test]
fn kills_in_the_middle_of_every_operation_lose_nothing() {
    let store = Store::at(&std::env::temp_dir(), "4M");
    let deltas = ["vmfssparse", "sesparse", "vsansparse"];
    let mut histories = Vec::new();
    for (number, delta) in deltas.iter().enumerate() {
        let base = if number == 1 { "zeroedthick" } else { "thin" };
        store.run(&format!("disk create {delta} {SIZE} --format {base} --delta {delta}")).ok();
        histories.push(Mutex::new(History::new(delta, number as u64 + 1, SIZE)));
    }
    let mut random = Random(20_261_122);
    let (mut kills, mut younger) = (0, 0);
    let tally = Tally::default();
    let begin = Instant::now();
    let sum = |histories: &[Mutex<History>], of: fn(&History) -> u64| -> u64 {
        histories.iter().map(|history| of(&history.lock())).sum()
    };
    // On a slow machine fewer requests are sent between two kills, so the test continues until there were enough.
    let enough = |histories: &[Mutex<History>]| {
        sum(histories, |history| history.version) > 20 * KILLS
            && sum(histories, |history| history.flushes) > KILLS
            && tally.done.load(Ordering::Relaxed) > KILLS
            && tally.cut.load(Ordering::Relaxed) > KILLS / 2
    };
    while kills < KILLS || !enough(&histories) && kills < 4 * KILLS {
        let kill = kills;
        kills += 1;
        let history = &histories[kill as usize % histories.len()];
        let operation = OPERATIONS[random.below(OPERATIONS.len() as u64) as usize];
        let options = ["", "--io direct", "--queue threads"][(kill / 3 % 3) as usize];
        let mut server = store.serve(options);
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| write_on(&store, history, &killed));
            let mut own = Random(random.next());
            let (store, killed, tally) = (&store, &killed, &tally);
            scope.spawn(move || operate(store, history, operation, &mut own, killed, tally));
            // On a slow machine, later kills leave more time.
            std::thread::sleep(Duration::from_millis(10 + random.below(KILL_AFTER_MS_MAX << (kill / KILLS))));
            // The flag is set before the kill, because the connection breaks before `stop` returns.
            killed.store(true, Ordering::Release);
            assert_eq!(server.stop("KILL"), None);
        });
        if random.once_in(4) {
            // The server is killed again while it opens the datastore of the killed server.
            let mut opening = store.command("serve").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(random.below(15)));
            process::send(opening.id(), "KILL");
            process::wait(&mut opening);
        }
        let mut server = store.serve("");
        let mut history = history.lock();
        younger += history.verify(&store);
        history.verify_snapshots(&store);
        assert_eq!(server.stop("TERM"), Some(0), "after a kill in '{operation}' of {}", history.name);
        let text = store.run("check").ok();
        assert!(text.ends_with("clean\n"), "after a kill in '{operation}' of {}: {text}", history.name);
        if history.name != "vsansparse" {
            let shown = store.run(&format!("disk show {} --json", history.name)).json();
            let raw = store.path().with_file_name("raw");
            let head = shown["image"]["head"].as_str().unwrap().to_owned();
            tool("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", &head, raw.to_str().unwrap()]);
            history.is(&std::fs::read(&raw).unwrap(), &format!("qemu-img after a kill in '{operation}'"));
        }
    }
    // All disks can still be written, and all operations on them succeed.
    let mut server = store.serve("");
    for history in &mut histories {
        let history = history.get_mut();
        store.run(&format!("disk consolidate {}", history.name)).ok();
        history.is(&read_export(&store, &history.name), &history.name);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    println!(
        "{kills} kills in {:.0} s: {} requests, {} flushes, {} operations done and {} cut off; nothing flushed was lost, \
         {younger} sectors were younger than they had to be, every check was clean",
        begin.elapsed().as_secs_f64(),
        sum(&histories, |history| history.version),
        sum(&histories, |history| history.flushes),
        tally.done.load(Ordering::Relaxed),
        tally.cut.load(Ordering::Relaxed),
    );
    assert!(enough(&histories));
}
