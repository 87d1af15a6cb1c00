//! Power cuts below the file system while snapshots of several disks are taken at one point in time: native disks and
//! disks in VMware's formats, on ext4 and on XFS. A seed determines the operations and the time of the cut.
//!
//! 1. Each group of snapshots that are taken together exists completely or not at all; an acknowledged group exists.
//! 2. Every sector of disks and snapshots has an allowed version, and flushed data exists.
//! 3. The check finds no problems.

#![allow(clippy::unwrap_used)]

mod doubted;
mod medium;

use doubted::{Doubted, Snapshot};
use medium::Medium;
use testkit::Random;
use testkit::nbd::Client;
use testkit::process::{Serving, Store};

const SIZE: usize = 4 << 20;
/// Number of snapshot groups during which the power may be cut.
const GROUPS: usize = 2;
/// Number of writes, discards and flushes that is assumed per case, until a case without a power cut has counted them.
const CHANGES: u64 = 400;
const FORMATS: [&str; 6] = [
    "",
    "--format vmdk --delta vmfssparse",
    "--format vmdk --delta sesparse",
    "--format sesparse --delta sesparse",
    "--format vsansparse --delta vsansparse",
    "--format monolithicsparse --delta vmfssparse",
];

#[test]
fn snapshot_groups_survive_power_cuts_on_ext4() {
    medium::on_medium("snapshot_groups_survive_power_cuts_on_ext4", 64, |medium| cases(medium, false));
}

#[test]
fn snapshot_groups_survive_power_cuts_on_xfs() {
    medium::on_medium("snapshot_groups_survive_power_cuts_on_xfs", 300, |medium| cases(medium, true));
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |value| value.parse().unwrap())
}

/// Statistics.
#[derive(Default, Debug)]
struct Tally {
    cut: u64,
    whole: u64,
    none: u64,
    /// Number of writes, discards and flushes in a case without a power cut.
    changes: u64,
}

fn cases(medium: &mut Medium, xfs: bool) {
    let (first, wanted) = (number("LAMINA_POWER_FROM", 0), number("LAMINA_POWER", 4));
    let mut tally = Tally { changes: CHANGES, ..Tally::default() };
    for seed in first..first + wanted {
        case(medium, xfs, seed, &mut tally);
    }
    println!("{wanted} cases: {tally:?}");
    assert!(tally.cut > 0 || wanted < 4, "{tally:?}");
}

fn start(store: &Store, disks: &[Doubted]) -> (Serving, Vec<Client>) {
    let server = store.serve("--log warn");
    let clients = disks.iter().map(|disk| Client::connect(&store.socket(), &disk.name).unwrap()).collect();
    (server, clients)
}

fn case(medium: &mut Medium, xfs: bool, seed: u64, tally: &mut Tally) {
    let mut random = Random(seed ^ 0x706f_7765);
    medium.make_file_system(xfs);
    medium.mount("rw");
    let store = Store::at(&medium.mounted, "4M");
    // One native disk, one disk in a VMware format, and one of a random kind.
    let other = 1 + random.below(FORMATS.len() as u64 - 1) as usize;
    let formats = ["", FORMATS[other], FORMATS[random.below(FORMATS.len() as u64) as usize]];
    let mut disks: Vec<Doubted> = Vec::new();
    for (number, format) in formats.iter().enumerate() {
        store.run(&format!("disk create disk{number} {SIZE} {format}")).ok();
        disks.push(Doubted::new(&format!("disk{number}"), number as u64 + 1, SIZE, seed));
    }
    let (mut server, mut clients) = start(&store, &disks);
    let mut trace = vec![format!("{formats:?}")];
    for (disk, client) in disks.iter_mut().zip(&mut clients) {
        disk.round(client).unwrap();
        assert!(disk.flush(client).unwrap());
        disk.fua = false;
        disk.fails = true;
    }
    // The first case of a run has no power cut and counts the changes.
    let after = if seed.is_multiple_of(8) { u64::MAX } else { random.below(tally.changes) };
    medium.cut_power_after(after, seed);
    for group in 0..GROUPS {
        for (disk, client) in disks.iter_mut().zip(&mut clients) {
            disk.round(client).unwrap();
        }
        let of: Vec<String> = disks.iter().map(|disk| format!("{}@g{group}", disk.name)).collect();
        let done = store.run(&format!("snapshot create {}", of.join(" ")));
        let off = medium.is_off();
        trace.push(format!("group {group}: {}, power off: {off} {}", done.code, done.stderr.trim_end()));
        assert!(done.code == 0 || off, "seed {seed}: {done:?}");
        for disk in &mut disks {
            let (name, sectors) = (format!("g{group}"), disk.sectors.clone());
            disk.snapshots.push(Snapshot { name, sectors, certain: done.code == 0 && !off });
        }
        for (disk, client) in disks.iter_mut().zip(&mut clients) {
            disk.round(client).unwrap();
            // Writes acknowledged after the cut do not count as durable.
            if client.flush().is_ok() && !medium.is_off() {
                disk.flushed();
            }
        }
    }
    drop(clients);
    server.kill();
    drop(server);
    medium.unmount();
    tally.cut += u64::from(medium.is_off());
    let changes = medium.restore_power();
    if after == u64::MAX {
        tally.changes = changes;
    }
    trace.push(format!("cut after {after}, {changes} changes"));
    println!("LAMINA_POWER_FROM={seed}: {}", trace.join("; "));
    medium.mount("rw");
    let (mut server, mut clients) = start(&store, &disks);
    let listed: Vec<Vec<String>> = disks.iter().map(|disk| snapshots(&store, &disk.name)).collect();
    for group in 0..GROUPS {
        let there = listed.iter().filter(|names| names.contains(&format!("g{group}"))).count();
        assert!(there == 0 || there == disks.len(), "seed {seed}: {there} of group {group}: {listed:?}");
        (tally.whole, tally.none) = (tally.whole + u64::from(there > 0), tally.none + u64::from(there == 0));
    }
    for ((disk, listed), client) in disks.iter_mut().zip(&listed).zip(&mut clients) {
        disk.settle(&store.socket());
        disk.settle_snapshots(&store.socket(), listed);
        disk.fails = false;
        disk.round(client).unwrap();
        assert!(disk.flush(client).unwrap());
    }
    drop(clients);
    assert_eq!(server.stop("TERM"), Some(0));
    let checked = store.run("check --data");
    assert!(checked.code == 0 && checked.stdout.ends_with("clean\n"), "seed {seed}: {checked:?}");
    drop(store);
    medium.unmount();
}

fn snapshots(store: &Store, disk: &str) -> Vec<String> {
    let listed = store.run(&format!("snapshot list {disk} --json")).json();
    let listed = listed["snapshots"].as_array().unwrap().iter();
    listed.map(|snapshot| snapshot["name"].as_str().unwrap().to_owned()).collect()
}
