//! Disks that are migrated while NBD clients use them: the effect on the clients, and the files that remain if the
//! server is killed.

#![allow(clippy::unwrap_used)]

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::nbd::{Client, Command, Failure};
use testkit::pattern::SECTOR;
use testkit::process::Store;
use testkit::{pattern, process};

const KILLS: u64 = 40;
const SECTORS: usize = (8 << 20) / SECTOR;
const REQUEST_SECTORS_MAX: u64 = 256;
const READ_BYTES: usize = 1 << 20;
const DISK: u64 = 1;
/// Prefix of the file that records a migration.
const RECORD: &str = "migration-";

/// Stage of a migration according to its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Copying,
    Committed,
}

/// The stage of the only migration; `None` before its record is created and after the record is removed.
fn stage(store: &Store) -> Option<Stage> {
    let names = process::files(&store.path());
    let name = names.iter().find(|name| name.starts_with(RECORD) && !name.ends_with(".new"))?;
    let text = std::fs::read_to_string(store.path().join(name)).ok()?;
    Some(if text.contains("\"committed\"") { Stage::Committed } else { Stage::Copying })
}

/// Time of a kill.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// When this fraction of the usual duration has passed.
    Part(f64),
    /// When the record has reached this stage.
    Reached(Stage),
}

/// For each sector, the versions that a crash may leave: the durable version is the first, the newest the last.
struct Model {
    sectors: Vec<Vec<u64>>,
    version: u64,
    random: Random,
}

impl Model {
    fn new(seed: u64) -> Self {
        Self { sectors: vec![vec![0]; SECTORS], version: 0, random: Random(seed) }
    }

    fn settle(&mut self) {
        self.sectors.iter_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
    }

    /// Sends one request and waits for the reply.
    fn step(&mut self, client: &mut Client) -> Result<(), Failure> {
        if self.random.once_in(12) {
            client.flush()?;
            self.settle();
            return Ok(());
        }
        let align = if self.random.once_in(4) { 1 } else { 8 };
        let length = (1 + self.random.below(REQUEST_SECTORS_MAX)).next_multiple_of(align);
        let start = self.random.below((SECTORS as u64 - length) / align) * align;
        let range = start as usize..(start + length) as usize;
        let (fua, zeroes) = (self.random.once_in(8), self.random.once_in(8));
        self.version += 1;
        let version = if zeroes { 0 } else { self.version };
        let (offset, bytes) = ((range.start * SECTOR) as u64, range.len() * SECTOR);
        let mut data = vec![0; if zeroes { 0 } else { bytes }];
        for (sector, content) in range.clone().zip(data.chunks_exact_mut(SECTOR)) {
            pattern::fill(content, DISK, sector as u64, version);
        }
        self.sectors[range.clone()].iter_mut().for_each(|versions| versions.push(version));
        client.call(match zeroes {
            true if self.version.is_multiple_of(2) => Command::Trim { offset, length: bytes as u32, fua },
            true => Command::Zero { offset, length: bytes as u32, fua },
            false => Command::Write { offset, data: &data, fua },
        })?;
        if fua {
            self.sectors[range].iter_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
        }
        Ok(())
    }

    /// Checks each sector against the allowed versions. From then on, the version that is found counts as durable.
    fn verify(&mut self, store: &Store, export: &str) {
        let content = read_export(store, export);
        for (at, (sector, versions)) in content.chunks_exact(SECTOR).zip(&mut self.sectors).enumerate() {
            let found = pattern::version(sector, DISK, at as u64).unwrap_or_else(|e| panic!("{export}: {e}"));
            assert!(versions.contains(&found), "{export} sector {at}: {found} is none of {versions:?}");
            *versions = vec![found];
        }
    }
}

fn read_export(store: &Store, export: &str) -> Vec<u8> {
    let mut client = Client::connect(&store.socket(), export).unwrap();
    let mut content = Vec::with_capacity(client.size as usize);
    for offset in (0..client.size).step_by(READ_BYTES) {
        content.extend(client.read(offset, READ_BYTES as u32).unwrap());
    }
    content
}

/// The format of the only disk, as an argument for `-d`.
fn format(store: &Store) -> String {
    let listed = store.run("disk list --json").json();
    let disks = listed["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 1, "there must be exactly one disk: {listed}");
    assert_eq!(disks[0]["name"], "a");
    let of = |member: &str| disks[0][member].as_str().unwrap().to_owned();
    if of("format") == "vmdk" { of("provisioning") } else { of("format") }
}

/// Checks that no file of a migration is left.
fn nothing_is_left(store: &Store) {
    let names = process::files(&store.path());
    assert!(!names.iter().any(|name| name.starts_with(RECORD)), "{names:?}");
    let images = store.path().join("images");
    if images.exists() {
        let folders = process::files(&images);
        let wanted = usize::from(format(store) != "native");
        assert_eq!(folders.len(), wanted, "{folders:?}");
    }
}

#[test]
fn a_disk_is_before_or_after_its_migration_whenever_the_server_is_killed() {
    let store = Store::at(&std::env::temp_dir(), "4M");
    let mut model = Model::new(77);
    store.run(&format!("disk create a --size {}", SECTORS * SECTOR)).ok();
    {
        let mut server = store.serve("");
        let mut client = Client::connect(&store.socket(), "a").unwrap();
        for _ in 0..60 {
            model.step(&mut client).unwrap();
        }
        client.flush().unwrap();
        model.settle();
        assert_eq!(server.stop("TERM"), Some(0));
    }
    store.run("snapshot create a@s").ok();
    let server = store.serve("");
    let snapshot = read_export(&store, "a@s");
    drop(server);
    let formats = ["thin", "sesparse", "native", "vsansparse", "vmfssparse", "zeroedthick", "native"];
    let mut random = Random(20_261_121);
    let (mut kills, mut moved, mut stayed, mut now) = (0, 0, 0, "native".to_owned());
    // Number of kills, by the stage of the record at the kill.
    let (mut without, mut copying, mut committed) = (0, 0, 0);
    let mut next = 0;
    // Usual duration of a migration, updated by each migration, so that the kills are spread over all of it.
    let mut usual = Duration::from_millis(300);
    while kills < KILLS {
        let mut server = store.serve("");
        let wanted = formats[next % formats.len()];
        let moment = match random.below(4) {
            0 => Moment::Reached(Stage::Committed),
            1 => Moment::Reached(Stage::Copying),
            _ => Moment::Part(random.below(130) as f64 / 100.0),
        };
        let mut at_death = None;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = match Client::connect(&store.socket(), "a") {
                    Ok(client) => client,
                    Err(_) => return,
                };
                loop {
                    match model.step(&mut client) {
                        Ok(()) => {}
                        Err(Failure::Gone(_)) => return,
                        Err(Failure::Errno(errno)) => panic!("a request failed with {errno}"),
                    }
                }
            });
            let mut command = store.command(&format!("disk migrate a -d {wanted} --rate 60M"));
            let begun = Instant::now();
            let mut migration = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let ended = loop {
                if migration.try_wait().unwrap().is_some() {
                    break true;
                }
                match moment {
                    Moment::Part(part) if begun.elapsed() >= usual.mul_f64(part) => break false,
                    Moment::Reached(wanted) if stage(&store) >= Some(wanted) => break false,
                    _ => std::thread::sleep(Duration::from_micros(200)),
                }
            };
            server.kill();
            at_death = stage(&store);
            kills += 1;
            match (ended, moment) {
                (true, _) => usual = (usual + begun.elapsed()) / 2,
                (false, Moment::Part(part)) if part > 1.0 => usual = usual.mul_f64(1.25),
                _ => {}
            }
            match at_death {
                None => without += 1,
                Some(Stage::Copying) => copying += 1,
                Some(Stage::Committed) => committed += 1,
            }
            writer.join().unwrap();
            // Without a server, the command migrates the disk itself, and the command is sometimes killed.
            if random.once_in(2) {
                let _ = migration.kill();
            }
            process::wait(&mut migration);
        });
        if random.once_in(3) {
            // The first process that opens the datastore completes the recovery, and logs that to stderr.
            let done = store.run("check --data");
            assert_eq!(done.code, 0, "{done:?}");
        }
        let mut server = store.serve("");
        let found = format(&store);
        assert!(found == now || found == wanted, "{found} is neither {now} nor {wanted}");
        assert!(found == wanted || at_death != Some(Stage::Committed), "{found}, though {wanted} was committed");
        if found == wanted && now != wanted {
            moved += 1
        } else {
            stayed += 1
        }
        if found == wanted {
            next += 1;
        }
        now = found;
        model.verify(&store, "a");
        assert!(read_export(&store, "a@s") == snapshot, "the snapshot is missing or wrong after kill {kills}");
        nothing_is_left(&store);
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
    println!(
        "{kills} kills, {copying} in the copying, {committed} after the commit, {without} without a record: {moved} times \
         the disk had moved, {stayed} times it had not; {} requests; a migration takes {usual:.0?}",
        model.version
    );
    assert!(moved > 0 && stayed > 0 && copying > KILLS / 4 && committed > 0);
}

#[test]
fn a_client_is_served_during_a_migration_and_ctrl_c_cancels_it() {
    let store = Store::new();
    store.run(&format!("disk create a --size {} --provisioning zeroedthick --format vmdk", SECTORS * SECTOR)).ok();
    let mut server = store.serve("");
    let mut model = Model::new(5);
    let mut client = Client::connect(&store.socket(), "a").unwrap();
    for _ in 0..100 {
        model.step(&mut client).unwrap();
    }
    // While a disk is migrated, other operations on it are refused with the reason, and Ctrl-C cancels the migration.
    let mut command = store.command("disk migrate a -d native --rate 100K");
    let migration = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    process::until("it has begun", || process::files(&store.path()).iter().any(|name| name.starts_with(RECORD)));
    store.run("snapshot create a@x").fails(4, "migrated");
    store.run("disk delete a").fails(4, "migrated");
    for _ in 0..50 {
        model.step(&mut client).unwrap();
    }
    process::send(migration.id(), "INT");
    let done: process::Done = migration.wait_with_output().unwrap().into();
    done.fails(130, "was not moved");
    assert_eq!(format(&store), "zeroedthick");
    nothing_is_left(&store);
    for wanted in ["native", "sesparse", "thin"] {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    model.step(&mut client).unwrap();
                }
            });
            let moved = store.run(&format!("disk migrate a -d {wanted} --json"));
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            assert_eq!(moved.json()["name"], "a");
        });
        client.flush().unwrap();
        model.settle();
        assert_eq!(format(&store), wanted);
        model.verify(&store, "a");
    }
    assert_eq!(server.stop("TERM"), Some(0));
    // Without a server, the command migrates the disk itself.
    store.run("disk migrate a -d native").ok();
    nothing_is_left(&store);
    let mut server = store.serve("");
    model.verify(&store, "a");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

/// Prints the longest latency while a thick disk is migrated under random writes. The test fails if the latency exceeds
/// a bound. `LAMINA_MIGRATE_MIB` sets the size of the disk, for measurements.
#[test]
fn no_request_waits_for_the_copy_of_a_migration() {
    let size = std::env::var("LAMINA_MIGRATE_MIB").map_or(64, |text| text.parse::<u64>().unwrap()) << 20;
    let store = Store::new();
    store.run(&format!("disk create a --size {size} --provisioning eagerzeroedthick --format vmdk")).ok();
    let mut server = store.serve("");
    {
        let mut client = Client::connect(&store.socket(), "a").unwrap();
        for offset in (0..size).step_by(1 << 20) {
            client.write(offset, &pattern::bytes(offset, 1 << 20)).unwrap();
        }
        client.flush().unwrap();
    }
    for wanted in ["thin", "native"] {
        let stop = AtomicBool::new(false);
        let (requests, worst, median, whole) = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = Client::connect(&store.socket(), "a").unwrap();
                let mut random = Random(3);
                let mut times = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let data = pattern::bytes(random.next(), 4096);
                    let begun = Instant::now();
                    client.write(random.below(size / 4096) * 4096, &data).unwrap();
                    times.push(begun.elapsed());
                }
                times.sort();
                (times.len(), *times.last().unwrap(), times[times.len() / 2])
            });
            let begun = Instant::now();
            store.run(&format!("disk migrate a -d {wanted} --rate 16M")).ok();
            let whole = begun.elapsed();
            stop.store(true, Ordering::Relaxed);
            let (requests, worst, median) = writer.join().unwrap();
            (requests, worst, median, whole)
        });
        println!(
            "{} MiB to {wanted} in {:.1} s under {requests} random 4 KiB writes: median {:.2} ms, worst {:.1} ms",
            size >> 20,
            whole.as_secs_f64(),
            median.as_secs_f64() * 1e3,
            worst.as_secs_f64() * 1e3
        );
        // A loaded machine delays requests too, but not for the time of the copy.
        assert!(worst < whole / 2, "{worst:?} of {whole:?}");
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
