//! Disks in each writable format, on small file systems of each kind that are repeatedly filled to the last byte, with
//! snapshots, compression, deduplication, discards, deletions, stops and kills. A seed determines the operations.
//! `LAMINA_FILLS` sets the number of fills on each file system. With `LAMINA_FILLS_REDUCED=1` the server compresses and
//! deduplicates all disks, otherwise those of every third datastore.
//!
//! 1. Only requests that need space are refused, with ENOSPC. Overwrites, reads, flushes, discards, deletions and stops
//!    succeed.
//! 2. When space is available again, all requests succeed without intervention.
//! 3. Acknowledged data survives a stop of the server, and flushed data survives a kill.
//! 4. The check finds no problems.

#![allow(clippy::unwrap_used)]

mod filled;

use filled::{Filled, Mix};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::mounted::{fill_with_names, leave, make_room, take_the_rest};
use testkit::nbd::{Client, ENOSPC, Failure};
use testkit::process::{Serving, Store, until};
use testkit::{mounted, pattern, process, split};

/// Number of times that one datastore is filled, and the number of fills on each file system.
const FILLS_OF_ONE: u64 = 2;
const FILLS: u64 = 4;
const SIZE: usize = 12 << 20;
/// Options of disks that the server compresses and deduplicates.
const REDUCED: [&str; 3] = [
    "--compression lz4 --dedup datastore",
    "--compression zstd --dedup disk",
    "--compression lz4 --dedup datastore --dedup-at idle",
];
const SNAPSHOTS: usize = 3;
/// Free space in bytes, below which the server may refuse writes.
const ROOM: u64 = 16 << 20;
/// Number of files in the folder `reserve`, with which a datastore on btrfs reserves space, and the time within which
/// the server must create missing ones once there is space. Until then the server may refuse writes of new blocks,
/// because the server creates the files only at intervals.
const STEPS: usize = 32;
const STEPS_PATIENCE: Duration = Duration::from_secs(60);

/// Options of the disks, and whether all their space is allocated at creation.
const FORMATS: [(&str, bool); 17] = [
    ("", false),
    ("--format 2gbsparse --delta sesparse", false),
    ("--provisioning zeroedthick", false),
    ("--format 2gbflat --delta vmfssparse", false),
    ("--provisioning eagerzeroedthick", false),
    ("--format monolithicflat --delta vsansparse", false),
    ("--format raw --delta sesparse", false),
    ("--format vmdk --delta vmfssparse", false),
    ("--format vmdk --delta sesparse", false),
    ("--format vmdk --delta vsansparse", false),
    ("--format zeroedthick --delta sesparse", true),
    ("--format eagerzeroedthick --delta vmfssparse", true),
    ("--format vmfssparse --delta vmfssparse", false),
    ("--format sesparse --delta sesparse", false),
    ("--format vsansparse --delta vsansparse", false),
    ("--format monolithicsparse --delta vmfssparse", false),
    ("--format monolithicsparse --delta sesparse", false),
];

#[test]
fn fills_of_ext4() {
    mounted::on_ext4("fills_of_ext4", |folder| fills(folder, 0));
}

#[test]
fn fills_of_xfs() {
    mounted::on_xfs("fills_of_xfs", |folder| fills(folder, 2));
}

#[test]
fn fills_of_btrfs() {
    mounted::on_btrfs("fills_of_btrfs", |folder| fills(folder, 4));
}

#[test]
fn fills_of_a_quota_of_btrfs() {
    mounted::on_btrfs_quota("fills_of_a_quota_of_btrfs", |folder| fills(folder, 6));
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |value| value.parse().unwrap())
}

/// Statistics.
#[derive(Default, Debug)]
struct Tally {
    fills: u64,
    refused: u64,
    overwritten: u64,
    stops: u64,
    kills: u64,
    snapshots: u64,
    snapshots_refused: u64,
    deleted: u64,
    compressed: u64,
}

/// Runs fills with seeds from `first` on, unless another first seed is given. `first` differs between file systems, so
/// that different formats are tested on each.
fn fills(folder: &Path, first: u64) {
    let (begin, wanted) = (Instant::now(), number("LAMINA_FILLS", FILLS));
    let first = number("LAMINA_FILL_FROM", first);
    let mut tally = Tally::default();
    let mut seed = first;
    while tally.fills < wanted {
        println!("seed {seed}: LAMINA_FILL_FROM={seed}");
        let mut case = Case::new(folder, seed, tally);
        for _ in 0..FILLS_OF_ONE {
            case.fill_up();
        }
        tally = case.end();
        seed += 1;
    }
    println!("{tally:?} in {} datastores and {:.0} s", seed - first, begin.elapsed().as_secs_f64());
    let overwritten = tally.overwritten > tally.fills || number("LAMINA_FILLS_REDUCED", 0) > 0;
    assert!(tally.refused >= tally.fills && overwritten, "{tally:?}");
}

struct Case<'a> {
    folder: &'a Path,
    store: Store,
    server: Option<Serving>,
    random: Random,
    disks: Vec<Filled>,
    /// For disks in VMware's formats: snapshots that may be merged in either direction.
    merged: Vec<bool>,
    /// Thin native disks, which can be compressed.
    compressible: Vec<bool>,
    clients: Vec<Client>,
    /// Disks that are created and deleted.
    spares: Vec<String>,
    next: u64,
    /// Number of files with which the test, in place of another program, has filled the file system.
    taken: u64,
    /// The operations, printed if the test fails.
    trace: Vec<String>,
    tally: Tally,
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("what was done:\n  {}", self.trace.join("\n  "));
        }
    }
}

impl<'a> Case<'a> {
    fn new(folder: &'a Path, seed: u64, tally: Tally) -> Self {
        let store = Store::at(folder, "4M");
        let random = Random(seed ^ 0x6669_6c6c);
        let (mut disks, mut merged, mut compressible) = (Vec::new(), Vec::new(), Vec::new());
        // Consecutive seeds test every format once. In each further pass through the formats, a format is combined with
        // a different second format.
        let other = 2 * seed + 1 + seed / FORMATS.len() as u64;
        let reduced = seed % 3 == 1 || self::number("LAMINA_FILLS_REDUCED", 0) > 0;
        for (number, format) in [2 * seed, other].into_iter().enumerate() {
            if reduced {
                let (name, options) = (format!("disk{number}"), REDUCED[format as usize % REDUCED.len()]);
                println!("  {name} {options}");
                store.run(&format!("disk create {name} {SIZE} {options}")).ok();
                disks.push(Filled::reduced(&name, 1, SIZE, seed + number as u64));
                merged.push(false);
                compressible.push(true);
                continue;
            }
            let (options, thick) = FORMATS[format as usize % FORMATS.len()];
            println!("  disk{number} {options}");
            split::create(&store, &format!("disk{number}"), SIZE as u64, options);
            disks.push(Filled::new(&format!("disk{number}"), number as u64 + 1, SIZE, seed, thick));
            merged.push(options.contains("--format"));
            compressible.push(options.is_empty());
        }
        let (spares, clients) = (Vec::new(), Vec::new());
        let (server, trace, next, taken) = (None, Vec::new(), 0, 0);
        let mut case = Self {
            folder,
            store,
            server,
            random,
            disks,
            merged,
            compressible,
            clients,
            spares,
            next,
            taken,
            trace,
            tally,
        };
        case.start();
        for _ in 0..4 {
            case.create();
        }
        case
    }

    fn note(&mut self, what: impl Into<String>) {
        self.trace.push(what.into());
    }

    /// Whether a command succeeded; it may be refused for lack of space.
    fn done(&mut self, arguments: &str) -> bool {
        let done = self.store.run(arguments);
        self.note(format!("{arguments}: {} {}", done.code, done.stderr.trim_end()));
        match done.code {
            0 => true,
            5 if self.disks[0].full => false,
            _ => panic!("{arguments}: {done:?}"),
        }
    }

    fn start(&mut self) {
        let options = ["", "", "--io direct --read-cache 8M", "--queue threads"][self.random.below(4) as usize];
        self.note(format!("serve {options}"));
        self.server = Some(self.store.serve(&format!("--log warn {options}")));
        self.connect();
    }

    fn connect(&mut self) {
        let connect = |disk: &Filled| Client::connect(&self.store.socket(), &disk.history.name).unwrap();
        self.clients = self.disks.iter().map(connect).collect();
    }

    /// Fills the file system, as another program would.
    fn take(&mut self) {
        self.taken += 1;
        self.note("all room is taken");
        // On btrfs, using up the space for names takes long, so the test does this less often.
        let names = if mounted::is_btrfs(self.folder) { 16 } else { 4 };
        match self.random.below(names) {
            0 => fill_with_names(self.folder, &format!("rest-{}", self.taken)),
            _ => take_the_rest(self.folder, &format!("rest-{}", self.taken)),
        }
        self.is_full(true);
    }

    /// The file system may be full even without another program, because of the disks and their snapshots.
    fn is_full_or_not(&mut self) {
        let full = mounted::free(self.folder) < ROOM;
        if !full {
            self.steps_are_made();
        }
        self.is_full(full);
    }

    /// Waits until the server has detected without a request that there is space, and has created its reserve files.
    fn steps_are_made(&self) {
        let Ok(count) = std::fs::read_dir(self.store.path().join("reserve")).map(Iterator::count) else { return };
        let (begin, mut made) = (Instant::now(), count);
        while made < STEPS {
            assert!(begin.elapsed() < STEPS_PATIENCE, "{made} of {STEPS} steps are made although there is space");
            std::thread::sleep(Duration::from_millis(20));
            made = std::fs::read_dir(self.store.path().join("reserve")).unwrap().count();
        }
    }

    fn is_full(&mut self, full: bool) {
        self.disks.iter_mut().for_each(|disk| disk.full = full);
    }

    fn round(&mut self, disk: usize, mix: Mix) -> u64 {
        self.note(format!("round of disk{disk}: {mix:?}"));
        let refused = self.disks[disk].round(&mut self.clients[disk], mix);
        refused.unwrap_or_else(|failure| panic!("disk{disk}: {failure:?}"))
    }

    fn rounds(&mut self, count: u64, disk: usize, mix: Mix) {
        for _ in 0..count {
            self.round(disk, mix);
        }
    }

    fn flush(&mut self, disk: usize) {
        self.note(format!("flush of disk{disk}"));
        let flushed = self.disks[disk].flush(&mut self.clients[disk]);
        flushed.unwrap_or_else(|failure| panic!("a flush of disk{disk}: {failure:?}"));
    }

    fn create(&mut self) {
        self.next += 1;
        let name = format!("spare{}", self.next);
        let (options, _) = FORMATS[self.random.below(FORMATS.len() as u64) as usize];
        if self.done(&format!("disk create {name} 1M {options}")) {
            let mut client = Client::connect(&self.store.socket(), &name).unwrap();
            match client.write(0, &pattern::bytes(self.next, 64 << 10)) {
                Ok(()) => {}
                Err(Failure::Errno(ENOSPC)) if self.disks[0].full => {}
                Err(failure) => panic!("{name}: {failure:?}"),
            }
            self.spares.push(name);
        } else {
            self.store.run(&format!("disk show {name}")).fails(3, &name);
        }
    }

    /// Deletes a disk, which must succeed.
    fn delete(&mut self) {
        if self.spares.is_empty() {
            return;
        }
        let spare = self.random.below(self.spares.len() as u64) as usize;
        let name = self.spares.swap_remove(spare);
        self.note(format!("disk delete {name}"));
        self.store.run(&format!("disk delete {name}")).ok();
        self.store.run(&format!("disk show {name}")).fails(3, &name);
        self.tally.deleted += 1;
    }

    fn snapshot(&mut self, disk: usize) {
        self.next += 1;
        let name = format!("s{}", self.next);
        let taken = self.done(&format!("snapshot create disk{disk}@{name}"));
        self.disks[disk].share();
        match taken {
            true => self.disks[disk].history.snapshot_taken(&name),
            false => self.tally.snapshots_refused += 1,
        }
        self.tally.snapshots += 1;
        self.snapshots_are(disk);
    }

    fn delete_snapshot(&mut self, disk: usize) {
        let snapshots = &self.disks[disk].history.snapshots;
        let chosen = self.random.below(snapshots.len() as u64) as usize;
        let name = snapshots[chosen].0.clone();
        let sides = if self.merged[disk] { 3 } else { 1 };
        let side = ["", " --up", " --down"][self.random.below(sides) as usize];
        match self.done(&format!("snapshot delete disk{disk}@{name}{side}")) {
            true => drop(self.disks[disk].history.snapshots.remove(chosen)),
            false => self.tally.snapshots_refused += 1,
        }
        self.snapshots_are(disk);
    }

    /// Compresses a disk, and sometimes deduplicates it. There may be no space for a pack; what was compressed before
    /// stays.
    fn compress(&mut self, disk: usize) {
        // An overwrite of a compressed or shared block needs a new one.
        self.disks.iter_mut().for_each(Filled::share);
        let method = ["lz4", "zstd"][self.random.below(2) as usize];
        let dedup = ["off", "disk", "datastore"][self.random.below(3) as usize];
        let optimized = self.done(&format!("disk optimize disk{disk} --compression {method} --dedup {dedup}"));
        self.tally.compressed += u64::from(optimized);
    }

    fn listed(&self, disk: usize) -> Vec<String> {
        let listed = self.store.run(&format!("snapshot list disk{disk} --json")).json();
        let listed = listed["snapshots"].as_array().unwrap().iter();
        listed.map(|snapshot| snapshot["name"].as_str().unwrap().to_owned()).collect()
    }

    /// A refused request must not have changed the snapshots.
    fn snapshots_are(&self, disk: usize) {
        let mut listed = self.listed(disk);
        let mut known: Vec<&str> = self.disks[disk].history.snapshots.iter().map(|(name, _)| name.as_str()).collect();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known, "disk{disk}");
    }

    /// A random operation that is possible at any time.
    fn step(&mut self) {
        let disk = self.random.below(2) as usize;
        let snapshots = self.disks[disk].history.snapshots.len();
        match self.random.below(100) {
            0..46 => self.rounds(1, disk, Mix::Any),
            46..58 => self.rounds(1, disk, Mix::Overwrite),
            58..66 => self.flush(disk),
            66..72 => {
                self.note(format!("discard of disk{disk}"));
                let discarded = self.disks[disk].discard(&mut self.clients[disk]);
                discarded.unwrap_or_else(|failure| panic!("a discard of disk{disk}: {failure:?}"));
            }
            72..80 if snapshots < SNAPSHOTS => self.snapshot(disk),
            72..86 if snapshots > 0 => self.delete_snapshot(disk),
            86..91 => self.create(),
            91..93 => self.delete(),
            93..95 if self.compressible[disk] => self.compress(disk),
            95..97 => self.stop(),
            97 => self.kill(),
            _ => self.rounds(1, disk, Mix::Fill),
        }
    }

    /// Stops the server without flushing the disks before.
    fn stop(&mut self) {
        self.note("stop");
        self.clients.clear();
        assert_eq!(self.server.take().unwrap().stop("TERM"), Some(0));
        self.tally.stops += 1;
        if self.disks[0].full && self.random.once_in(2) {
            self.take();
        }
        self.start();
        self.disks.iter().for_each(|disk| disk.is_whole(&self.store));
    }

    /// Kills the server with requests in flight, and sometimes during an operation.
    fn kill(&mut self) {
        let disk = self.random.below(2) as usize;
        let name = format!("disk{disk}");
        let snapshots = &self.disks[disk].history.snapshots;
        let (first, count) = (snapshots.first().map(|(snapshot, _)| snapshot.clone()), snapshots.len());
        let operation = match (self.random.below(5), first) {
            (4, _) if self.compressible[disk] => {
                self.disks[disk].share();
                Some(format!("disk optimize {name}"))
            }
            (0, _) if count < SNAPSHOTS => {
                self.next += 1;
                let snapshot = format!("k{}", self.next);
                let operation = format!("snapshot create {name}@{snapshot}");
                self.disks[disk].share();
                self.disks[disk].history.snapshot_taken(&snapshot);
                Some(operation)
            }
            (1, Some(snapshot)) => Some(format!("snapshot delete {name}@{snapshot}")),
            (2, _) => self.spares.pop().map(|spare| format!("disk delete {spare}")),
            _ => None,
        };
        self.note(format!("kill in {operation:?} and rounds of {name}"));
        let operation = operation.map(|operation| {
            let mut command = self.store.command(&operation);
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        });
        let mut server = self.server.take().unwrap();
        let delay = Duration::from_micros(self.random.below(30_000));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(delay);
                server.kill();
            });
            // While a snapshot is taken, nothing is written, so that its content is known.
            while operation.is_none() {
                match self.disks[disk].round(&mut self.clients[disk], Mix::Any) {
                    Ok(_) => {}
                    Err(Failure::Gone(_)) => break,
                    Err(failure) => panic!("{name}: {failure:?}"),
                }
            }
        });
        drop(server);
        self.clients.clear();
        if let Some(mut operation) = operation {
            process::wait(&mut operation);
        }
        self.tally.kills += 1;
        if self.disks[0].full && self.random.once_in(2) {
            self.take();
        }
        self.start();
        self.disks.iter_mut().for_each(|disk| disk.settle(&self.store));
    }

    /// Fills the file system, runs operations, and frees the space again.
    fn fill_up(&mut self) {
        for _ in 0..12 {
            self.is_full_or_not();
            self.step();
        }
        self.taken += 1;
        self.is_full(true);
        let left = self.random.below(6 << 20);
        self.note(format!("{left} bytes are left"));
        leave(self.folder, &format!("rest-{}", self.taken), left);
        // The disks fill the file system as long as they accept writes; then another program fills the rest.
        for disk in 0..2 {
            let mut refused = 0;
            for _ in 0..self.random.below(200) {
                refused += self.round(disk, Mix::Fill);
                if refused > 20 {
                    break;
                }
            }
        }
        self.take();
        for disk in 0..2 {
            if self.compressible[disk] && self.random.once_in(2) {
                self.compress(disk);
            }
            self.flush(disk);
            self.rounds(4, disk, Mix::Overwrite);
            self.rounds(4, disk, Mix::Fill);
        }
        self.disks.iter().for_each(|disk| disk.is_whole(&self.store));
        for _ in 0..self.random.below(24) {
            self.step();
            if self.random.once_in(6) {
                self.take();
            }
        }
        self.take();
        if self.random.once_in(2) {
            self.stop()
        } else {
            self.kill()
        }
        self.delete();
        for disk in 0..2 {
            self.rounds(2, disk, Mix::Overwrite);
            self.flush(disk);
        }
        self.tally.fills += 1;

        self.note("there is space again");
        make_room(self.folder, "rest-");
        self.is_full(true);
        for disk in 0..2 {
            for _ in 0..SNAPSHOTS {
                if mounted::free(self.folder) < ROOM && !self.disks[disk].history.snapshots.is_empty() {
                    self.delete_snapshot(disk);
                }
            }
            until("there is space again", || self.round(disk, Mix::Fill) == 0);
        }
        for disk in 0..2 {
            self.is_full_or_not();
            self.rounds(4, disk, Mix::Fill);
            self.flush(disk);
        }
    }

    fn end(mut self) -> Tally {
        self.stop();
        while !self.spares.is_empty() {
            self.delete();
        }
        self.clients.clear();
        assert_eq!(self.server.take().unwrap().stop("TERM"), Some(0));
        // An image whose server was killed, and that was only read since, causes a warning, which does not count as a
        // problem.
        let checked = self.store.run("check --data");
        assert!(checked.code == 0 && checked.stdout.ends_with("clean\n"), "{checked:?}");
        for disk in &self.disks {
            self.tally.refused += disk.refused;
            self.tally.overwritten += disk.overwritten;
            self.store.run(&format!("disk delete {} --force", disk.history.name)).ok();
        }
        std::mem::take(&mut self.tally)
    }
}
