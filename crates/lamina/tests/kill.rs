//! A server is killed repeatedly with SIGKILL under writers that check the content afterwards.
//!
//! Each writer has two disks and one connection to each. The writer sends rounds of requests that do not overlap and
//! waits for all replies of a round; occasionally it flushes, or takes a snapshot of both disks at one point in time
//! with the command line. For every sector it tracks the versions that a crash may leave: the last version made durable
//! by a flush or FUA, and all later versions. A snapshot has the content acknowledged before it: exactly, if a flush
//! followed; otherwise the snapshot may lack the same writes as the disk after a crash. No later write may be in the
//! snapshot. Content found after one crash must be found after all later ones. The kill happens at a random time, in
//! some rounds while the server is still opening the datastore.

#![allow(clippy::unwrap_used)]

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::nbd::{Client, Command, Failure};
use testkit::pattern::SECTOR;
use testkit::process::Store;
use testkit::{pattern, process};

const KILLS: u64 = 100;
const WRITERS: u64 = 2;
const DISK_SECTORS: usize = (12 << 20) / SECTOR;
/// Requests per round, and sectors of the largest request (256 KiB).
const ROUND_REQUESTS: u64 = 24;
const REQUEST_SECTORS_MAX: u64 = 512;
/// Snapshots kept of each disk.
const SNAPSHOTS: usize = 3;
const READ_BYTES: usize = 1 << 20;

/// For each sector, the versions that a crash may leave: the durable version is the first, the newest the last.
type Sectors = Vec<Vec<u64>>;

/// Model of one disk.
struct Model {
    name: String,
    number: u64,
    sectors: Sectors,
    snapshots: Vec<(String, Sectors)>,
}

/// A request of a round, and whether its reply means that its data is durable.
struct Sent {
    disk: usize,
    cookie: u64,
    range: std::ops::Range<usize>,
    durable: bool,
}

struct Writer {
    disks: [Model; 2],
    random: Random,
    version: u64,
    snapshot: u64,
    /// The snapshots of a command that was killed before it answered: either both disks have them or neither.
    uncertain: Option<(String, [Sectors; 2])>,
    flushes: u64,
}

impl Model {
    /// All writes sent so far have become durable.
    fn settle(&mut self) {
        let snapshots = self.snapshots.iter_mut().map(|(_, sectors)| sectors);
        for versions in snapshots.chain([&mut self.sectors]).flatten() {
            versions.drain(..versions.len() - 1);
        }
    }
}

/// Reads an export and checks each sector against the allowed versions; from then on, the version that is found counts
/// as durable. Returns the number of sectors that were newer than the durable version.
fn verify(store: &Store, export: &str, number: u64, sectors: &mut Sectors) -> usize {
    let content = read_export(store, export);
    let mut younger = 0;
    for (at, (sector, versions)) in content.chunks_exact(SECTOR).zip(sectors).enumerate() {
        let found = pattern::version(sector, number, at as u64).unwrap_or_else(|e| panic!("{export}: {e}"));
        assert!(versions.contains(&found), "{export} sector {at}: {found} is none of {versions:?}");
        younger += usize::from(versions.len() > 1 && found != versions[0]);
        versions.clear();
        versions.push(found);
    }
    younger
}

fn read_export(store: &Store, export: &str) -> Vec<u8> {
    let mut client = Client::connect(&store.socket(), export).unwrap();
    assert_eq!(client.size, (DISK_SECTORS * SECTOR) as u64);
    let mut content = Vec::with_capacity(DISK_SECTORS * SECTOR);
    for offset in (0..client.size).step_by(READ_BYTES) {
        content.extend(client.read(offset, READ_BYTES as u32).unwrap());
    }
    content
}

impl Writer {
    fn new(number: u64, store: &Store) -> Self {
        let disks = [0, 1].map(|half| {
            let name = format!("w{number}d{half}");
            let kind = if half == 1 && number == 1 { "zeroedthick" } else { "thin" };
            let size = DISK_SECTORS * SECTOR;
            store.run(&format!("disk create {name} --size {size} --provisioning {kind}")).ok();
            Model { name, number: 2 * number + half, sectors: vec![vec![0]; DISK_SECTORS], snapshots: Vec::new() }
        });
        Self { disks, random: Random(0xdead + number), version: 0, snapshot: 0, uncertain: None, flushes: 0 }
    }

    /// Sends requests until the server is killed.
    fn work(&mut self, store: &Store, killed: &AtomicBool) {
        match self.rounds(store) {
            Failure::Gone(_) => {}
            Failure::Errno(errno) => panic!("a request failed with {errno}"),
        }
        // The connection may break shortly before `killed` is set, but never without a kill.
        process::until("the server was killed", || killed.load(Ordering::Acquire));
    }

    fn rounds(&mut self, store: &Store) -> Failure {
        let connect = |disk: &Model| Client::connect(&store.socket(), &disk.name);
        let clients = connect(&self.disks[0]).and_then(|a| Ok([a, connect(&self.disks[1])?]));
        let mut clients = match clients {
            Ok(clients) => clients,
            Err(error) => return error.into(),
        };
        loop {
            let outcome = match self.random.below(10) {
                0 | 1 => self.flush(&mut clients),
                2 if self.random.once_in(3) => self.take_snapshot(store),
                _ => self.round(&mut clients),
            };
            if let Err(failure) = outcome {
                return failure;
            }
        }
    }

    /// Sends requests that do not overlap, with all in flight at once.
    fn round(&mut self, clients: &mut [Client; 2]) -> Result<(), Failure> {
        let mut sent: Vec<Sent> = Vec::new();
        for _ in 0..1 + self.random.below(ROUND_REQUESTS) {
            let disk = self.random.below(2) as usize;
            // Chooses a range: mostly single blocks, some larger, some not aligned to blocks, often in one small area
            // of the disk.
            let (align, length) = match self.random.below(8) {
                0 => (1, 1 + self.random.below(24)),
                1 => (8, 8 * (1 + self.random.below(REQUEST_SECTORS_MAX / 8))),
                _ => (8, 8),
            };
            let space = if self.random.once_in(2) { DISK_SECTORS as u64 } else { DISK_SECTORS as u64 / 16 };
            let start = self.random.below((space - length) / align) * align;
            let range = start as usize..(start + length) as usize;
            if sent.iter().any(|s| s.disk == disk && s.range.start < range.end && range.start < s.range.end) {
                continue;
            }
            let fua = self.random.once_in(8);
            let zeroes = self.random.once_in(10);
            self.version += 1;
            let version = if zeroes { 0 } else { self.version };
            let model = &mut self.disks[disk];
            for sector in range.clone() {
                model.sectors[sector].push(version);
            }
            let (offset, bytes) = ((range.start * SECTOR) as u64, range.len() * SECTOR);
            let mut data = vec![0; if zeroes { 0 } else { bytes }];
            for (sector, content) in range.clone().zip(data.chunks_exact_mut(SECTOR)) {
                pattern::fill(content, model.number, sector as u64, version);
            }
            let command = match zeroes {
                true if self.version.is_multiple_of(2) => Command::Trim { offset, length: bytes as u32, fua },
                true => Command::Zero { offset, length: bytes as u32, fua },
                false => Command::Write { offset, data: &data, fua },
            };
            let cookie = clients[disk].submit(command)?;
            sent.push(Sent { disk, cookie, range, durable: fua });
        }
        for (disk, client) in clients.iter_mut().enumerate() {
            for _ in 0..sent.iter().filter(|s| s.disk == disk).count() {
                let (cookie, outcome) = client.complete()?;
                outcome.map_err(Failure::Errno)?;
                let done = sent.iter().find(|s| s.disk == disk && s.cookie == cookie).unwrap();
                if done.durable {
                    for versions in &mut self.disks[disk].sectors[done.range.clone()] {
                        versions.drain(..versions.len() - 1);
                    }
                }
            }
        }
        Ok(())
    }

    /// A flush on one connection covers only its own disk, so both disks are flushed.
    fn flush(&mut self, clients: &mut [Client; 2]) -> Result<(), Failure> {
        for (client, model) in clients.iter_mut().zip(&mut self.disks) {
            client.flush()?;
            model.settle();
            self.flushes += 1;
        }
        Ok(())
    }

    fn take_snapshot(&mut self, store: &Store) -> Result<(), Failure> {
        self.snapshot += 1;
        let name = format!("s{}", self.snapshot);
        let states = [self.disks[0].sectors.clone(), self.disks[1].sectors.clone()];
        self.uncertain = Some((name.clone(), states.clone()));
        let [a, b] = [&self.disks[0].name, &self.disks[1].name];
        let gone = || Failure::Gone(std::io::Error::other("a command was killed"));
        let run = |arguments: &str| {
            let mut command = store.command(arguments);
            let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
            if status.success() { Ok(()) } else { Err(gone()) }
        };
        // A command that finds no server waits until it can become the owner, so the command must end before the next
        // round.
        run(&format!("snapshot create {a}@{name} {b}@{name}"))?;
        self.uncertain = None;
        for (model, state) in self.disks.iter_mut().zip(states) {
            model.snapshots.push((name.clone(), state));
        }
        if self.disks[0].snapshots.len() > SNAPSHOTS {
            for model in &mut self.disks {
                // Whether the snapshot was deleted or not, it is no longer checked.
                let (oldest, _) = model.snapshots.remove(0);
                run(&format!("snapshot delete {}@{oldest}", model.name))?;
            }
        }
        Ok(())
    }

    /// After a crash: checks both disks, all snapshots, and the snapshots that were being taken.
    fn verify(&mut self, store: &Store) -> usize {
        if let Some((name, states)) = self.uncertain.take() {
            let listed = store.run("snapshot list --json").json();
            let there = |disk: &str| {
                let snapshots = listed["snapshots"].as_array().unwrap();
                snapshots.iter().any(|s| s["disk"] == disk && s["name"] == name)
            };
            let found = [there(&self.disks[0].name), there(&self.disks[1].name)];
            assert_eq!(found[0], found[1], "{name}: snapshots of two disks exist for both or for none");
            if found[0] {
                for (model, state) in self.disks.iter_mut().zip(states) {
                    model.snapshots.push((name.clone(), state));
                }
            }
        }
        let mut younger = 0;
        for model in &mut self.disks {
            younger += verify(store, &model.name, model.number, &mut model.sectors);
            for (name, sectors) in &mut model.snapshots {
                verify(store, &format!("{}@{name}", model.name), model.number, sectors);
            }
        }
        younger
    }
}

#[test]
fn a_hundred_kills_lose_nothing_that_was_flushed() {
    let store = Store::at(&std::env::temp_dir(), "4M");
    let mut writers: Vec<Writer> = (0..WRITERS).map(|number| Writer::new(number, &store)).collect();
    let mut random = Random(20_261_121);
    let (mut kills, mut younger) = (0, 0);
    let begin = Instant::now();
    // On a slow machine fewer requests are sent between two kills, so the test continues until there were enough.
    let enough = |writers: &[Writer]| {
        let sum = |of: fn(&Writer) -> u64| writers.iter().map(of).sum::<u64>();
        sum(|writer| writer.version) > 20 * KILLS
            && sum(|writer| writer.flushes) > KILLS
            && sum(|writer| writer.snapshot) > KILLS / 2
    };
    while kills < KILLS || !enough(&writers) && kills < 4 * KILLS {
        let options = ["", "--io direct", "--queue threads", "--io direct --queue threads"][(kills % 4) as usize];
        let mut server = store.serve(options);
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for writer in &mut writers {
                scope.spawn(|| writer.work(&store, &killed));
            }
            // On a slow machine, later kills leave more time.
            std::thread::sleep(Duration::from_millis(5 + random.below(250 << (kills / KILLS))));
            killed.store(true, Ordering::Release);
            assert_eq!(server.stop("KILL"), None);
            kills += 1;
        });
        if random.once_in(4) {
            // The server is killed again while it opens the datastore of the killed server.
            let mut opening = store.command("serve").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(random.below(25)));
            process::send(opening.id(), "KILL");
            assert_eq!(process::wait(&mut opening), None);
            kills += 1;
        }
        // In half of the cases `check` is the first to open the datastore, so that the test covers a `check` of a
        // datastore that is not recovered.
        let check_first = random.once_in(2);
        if check_first {
            store.is_clean();
        }
        let mut server = store.serve("");
        younger += writers.iter_mut().map(|writer| writer.verify(&store)).sum::<usize>();
        if !check_first {
            store.is_clean();
        }
        assert_eq!(server.stop("TERM"), Some(0));
    }
    let requests: u64 = writers.iter().map(|writer| writer.version).sum();
    let flushes: u64 = writers.iter().map(|writer| writer.flushes).sum();
    let snapshots: u64 = writers.iter().map(|writer| writer.snapshot).sum();
    println!(
        "{kills} kills in {:.0} s: {requests} requests, {flushes} flushes, {snapshots} snapshots of two disks; nothing \
         flushed was lost, {younger} sectors were younger than they had to be, every check was clean",
        begin.elapsed().as_secs_f64()
    );
    assert!(enough(&writers));
}
