//! Storage that fails below the file system: reads, writes, flushes and discards fail once, for a time or permanently,
//! under a datastore in use on ext4 and on XFS. A seed determines the operations.
//!
//! 1. Failures are reported as EIO. No read returns old data or wrong bytes.
//! 2. A disk that stops after a failed flush reports the failure once, and continues after `disk reopen` or a restart
//!    if the file system is still writable.
//! 3. After mounting on healthy storage, every sector has an allowed version, and flushed data exists.
//! 4. The check then finds no problems. Nothing panics or hangs.
//! 5. A flush fails if a write was lost since the previous flush, no matter to which system call the kernel returned
//!    the error.

#![allow(clippy::unwrap_used)]

mod doubted;
mod medium;

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Directory, File, IoMode};
use doubted::{Doubted, Snapshot};
use medium::{Medium, Request};
use std::process::{Command, Stdio};
use std::time::Instant;
use testkit::Random;
use testkit::nbd::Client;
use testkit::process::{Done, Serving, Store};
use testkit::{process, split};

const SIZE: usize = 6 << 20;
const SNAPSHOTS: usize = 3;
const RESTARTED: u64 = 49;
const REQUESTS: [Request; 4] = [Request::Read, Request::Write, Request::Flush, Request::Punch];
/// The case [`RESTARTED`] draws one of the first [`DRAWN`] formats. In the other cases, the seed determines the format.
const FORMATS: [&str; 11] = [
    "--format vmdk --delta vmfssparse",
    "--format vmdk --delta sesparse",
    "--format vmdk --delta vsansparse",
    "--format zeroedthick --delta sesparse",
    "--format sesparse --delta sesparse",
    "--format vsansparse --delta vsansparse",
    "--format monolithicsparse --delta vmfssparse",
    "--format 2gbsparse --delta sesparse",
    "--format raw --delta vsansparse",
    "--format 2gbflat --delta vmfssparse",
    "--format monolithicflat --delta sesparse",
];
/// The number of formats from which the case [`RESTARTED`] draws.
const DRAWN: usize = 7;

#[test]
fn requests_to_a_datastore_on_ext4_with_a_failing_device() {
    medium::on_medium("requests_to_a_datastore_on_ext4_with_a_failing_device", 96, |medium| cases(medium, false, 4));
}

#[test]
fn requests_to_a_datastore_on_xfs_with_a_failing_device() {
    medium::on_medium("requests_to_a_datastore_on_xfs_with_a_failing_device", 300, |medium| cases(medium, true, 4));
}

#[test]
fn a_flush_fails_after_a_failed_write_out() {
    medium::on_medium("a_flush_fails_after_a_failed_write_out", 300, |medium| {
        let write_out: fn(&dyn File) = |file| file.write_out(0, 1 << 20, true);
        let list_extents: fn(&dyn File) = |file| drop(file.placements(0));
        let calls = [("writing out", write_out), ("listing extents", list_extents)];
        for ((call, lose), xfs) in calls.into_iter().flat_map(|call| [(call, false), (call, true)]) {
            medium.make_file_system(xfs);
            medium.mount("rw");
            let directory = LocalDirectory::open(&medium.mounted, LocalQueues::Threads).unwrap();
            let file = directory.create("file", IoMode::Buffered).unwrap();
            // In the second round, the file system has only data to write, no metadata.
            for content in [[1; 64 << 10], [2; 64 << 10]] {
                file.write_at(&[&content], 0, false).unwrap();
                file.sync().unwrap();
            }
            file.write_at(&[&[3; 64 << 10]], 0, false).unwrap();
            medium.fail(Request::Write, 0, u64::MAX);
            lose(&*file);
            assert!(medium.heal() > 0, "{call} wrote nothing");
            let flushed = file.sync();
            assert!(flushed.is_err(), "xfs {xfs}: {call} has lost a write, and the flush after it succeeds");
            drop((file, directory));
            medium.unmount();
        }
    });
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |value| value.parse().unwrap())
}

/// Statistics.
#[derive(Default, Debug)]
struct Tally {
    failed: u64,
    without: u64,
    requests: u64,
    refused: u64,
    flushes_failed: u64,
    commands_failed: u64,
    sectors_unread: u64,
    sectors_lost: u64,
    reopened: u64,
    restarted: u64,
    not_writable: u64,
}

fn cases(medium: &mut Medium, xfs: bool, otherwise: u64) {
    let (begin, first) = (Instant::now(), number("LAMINA_MEDIUM_FROM", 0));
    let wanted = number("LAMINA_MEDIA", otherwise);
    let mut tally = Tally::default();
    // One more case: after a restart without a new mount, an earlier version returned data of the page cache that had
    // never been written to the storage.
    let remembered = (first == 0 && wanted <= RESTARTED).then_some(RESTARTED);
    for seed in (first..first + wanted).chain(remembered) {
        case(medium, xfs, seed, &mut tally);
    }
    println!("{wanted} cases: {tally:?} in {:.0} s", begin.elapsed().as_secs_f64());
    assert!(tally.failed > 0 || wanted < 4, "{tally:?}");
}

struct Case<'a> {
    medium: &'a mut Medium,
    tally: &'a mut Tally,
    store: Store,
    random: Random,
    server: Option<Serving>,
    disks: Vec<Doubted>,
    clients: Vec<Client>,
    fails: Request,
    /// Whether the log has reported that the disk in a VMware format accepts no writes.
    said: bool,
    next: u64,
    trace: Vec<String>,
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("what was done:\n  {}", self.trace.join("\n  "));
        }
    }
}

fn case(medium: &mut Medium, xfs: bool, seed: u64, tally: &mut Tally) {
    let fails = REQUESTS[seed as usize % 4];
    let times = [1, 6, u64::MAX][(seed / 4 % 3) as usize];
    let mut random = Random(seed ^ 0x6d65_6469);
    let discard = if fails == Request::Punch { ",discard" } else { "" };
    let options = match xfs {
        true => format!("rw{discard}"),
        false => format!("errors={}{discard}", ["continue", "remount-ro"][(seed / 12 % 2) as usize]),
    };
    println!("LAMINA_MEDIUM_FROM={seed}: {fails:?}, {times} times, {options}");
    medium.make_file_system(xfs);
    medium.mount(&options);
    let store = Store::at(&medium.mounted, "4M");
    let drawn = (random.below(DRAWN as u64) as usize, random.below(2) as usize);
    let (format, native) = match seed {
        RESTARTED => drawn,
        // Consecutive cases on both file systems test all formats.
        _ => ((2 * seed as usize + usize::from(xfs) + DRAWN) % FORMATS.len(), seed as usize % 3),
    };
    let native = ["", "--provisioning zeroedthick", "--provisioning eagerzeroedthick"][native];
    let format = FORMATS[format];
    store.run(&format!("disk create disk0 {SIZE} {native}")).ok();
    split::create(&store, "disk1", SIZE as u64, format);
    let disks = (0..2).map(|number| Doubted::new(&format!("disk{number}"), number + 1, SIZE, seed)).collect();
    let trace = vec![format!("disk0 {native}, disk1 {format}")];
    let (server, clients, next) = (None, Vec::new(), 0);
    let mut case = Case { medium, tally, store, random, server, disks, clients, fails, said: false, next, trace };
    case.start();
    case.calm();
    let passes = case.random.below(if fails == Request::Punch { 2 } else { 12 });
    case.medium.fail(fails, passes, times);
    case.trace.push(format!("{fails:?} fails after {passes}, {times} times"));
    case.disks.iter_mut().for_each(|disk| disk.fails = true);
    for _ in 0..16 {
        case.step();
    }
    case.end(&options, xfs);
}

impl Case<'_> {
    fn start(&mut self) {
        let options = ["", "", "--io direct --read-cache 8M", "--queue threads"][self.random.below(4) as usize];
        self.trace.push(format!("serve {options}"));
        self.server = Some(self.store.serve(&format!("--log warn {options}")));
        let connect = |disk: &Doubted| Client::connect(&self.store.socket(), &disk.name).unwrap();
        self.clients = self.disks.iter().map(connect).collect();
    }

    /// Runs a command, which must end but may fail.
    fn run(&mut self, arguments: &str) -> Done {
        let mut command = self.store.command(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        process::wait(&mut child);
        let done = Done::from(child.wait_with_output().unwrap());
        self.trace.push(format!("{arguments}: {} {}", done.code, done.stderr.trim_end()));
        assert!(!done.stderr.contains("panicked") && done.code < 100, "{arguments}: {done:?}");
        done
    }

    fn round(&mut self, disk: usize) {
        self.trace.push(format!("round of disk{disk}"));
        let done = self.disks[disk].round(&mut self.clients[disk]);
        done.unwrap_or_else(|e| panic!("a round of disk{disk}: {e:?}"));
    }

    fn flush(&mut self, disk: usize) -> bool {
        let done = self.disks[disk].flush(&mut self.clients[disk]);
        let done = done.unwrap_or_else(|e| panic!("a flush of disk{disk}: {e:?}"));
        self.trace.push(format!("flush of disk{disk}: {done}"));
        done
    }

    fn snapshot(&mut self, disk: usize) {
        self.next += 1;
        let name = format!("s{}", self.next);
        let certain = self.run(&format!("snapshot create disk{disk}@{name}")).code == 0;
        self.tally.commands_failed += u64::from(!certain);
        assert!(certain || self.disks[disk].fails, "a snapshot was refused");
        let sectors = self.disks[disk].sectors.clone();
        self.disks[disk].snapshots.push(Snapshot { name, sectors, certain });
    }

    fn delete_snapshot(&mut self, disk: usize) {
        let snapshots = self.disks[disk].snapshots.len() as u64;
        let chosen = self.random.below(snapshots) as usize;
        let name = self.disks[disk].snapshots[chosen].name.clone();
        let side = if disk == 0 { "" } else { ["", " --up", " --down"][self.random.below(3) as usize] };
        self.disks[disk].snapshots[chosen].certain = false;
        let done = self.run(&format!("snapshot delete disk{disk}@{name}{side}"));
        match done.code {
            0 => drop(self.disks[disk].snapshots.remove(chosen)),
            _ => self.tally.commands_failed += 1,
        }
        assert!(done.code == 0 || self.disks[disk].fails, "{done:?}");
    }

    /// Operations while no request fails.
    fn calm(&mut self) {
        for disk in 0..2 {
            for _ in 0..6 {
                self.round(disk);
            }
            assert!(self.flush(disk));
            if self.random.once_in(2) {
                self.snapshot(disk);
            }
            self.round(disk);
        }
    }

    fn step(&mut self) {
        let disk = self.random.below(2) as usize;
        let snapshots = self.disks[disk].snapshots.len();
        match self.random.below(20) {
            0..7 => self.round(disk),
            7..10 => drop(self.flush(disk)),
            10..14 => {
                // If nothing but reads fails, all clean pages are on the storage. Only in such cases do reads have a
                // defined content after the page cache is dropped.
                if self.fails == Request::Read {
                    self.forget();
                }
                let looked = self.disks[disk].look(&mut self.clients[disk]);
                looked.unwrap_or_else(|e| panic!("a read of disk{disk}: {e:?}"));
            }
            14..16 if snapshots < SNAPSHOTS => self.snapshot(disk),
            14..18 if snapshots > 0 => self.delete_snapshot(disk),
            14..18 => self.round(disk),
            18 => {
                self.next += 1;
                let format = FORMATS[self.random.below(DRAWN as u64) as usize];
                let created = self.run(&format!("disk create spare{} 1M {format}", self.next));
                self.tally.commands_failed += u64::from(created.code != 0);
            }
            _ => drop(self.run("check")),
        }
    }

    /// Drops clean data from the page cache.
    fn forget(&self) {
        let folders = [self.store.path(), self.store.path().join("images").join("disk1")];
        let entries = folders.iter().flat_map(std::fs::read_dir).flatten().flatten().map(|entry| entry.path());
        for path in entries.filter(|path| path.is_file()).chain([self.medium.device.clone().into()]) {
            let mut dd = Command::new("dd");
            dd.arg(format!("if={}", path.display())).args(["iflag=nocache", "count=0", "status=none"]);
            // The file may not be readable on failing storage.
            let _ = dd.stderr(Stdio::null()).status();
        }
    }

    fn writable(&self) -> bool {
        let path = self.medium.mounted.join("writable");
        let mut touch = Command::new("sh");
        touch.args(["-c", "echo >$0 && sync $0 && rm $0"]).arg(path).stderr(Stdio::null());
        touch.status().unwrap().success()
    }

    fn end(mut self, options: &str, xfs: bool) {
        let failed = self.medium.heal();
        self.tally.failed += failed;
        self.tally.without += u64::from(failed == 0);
        let _ = self.writable();
        let writable = self.writable();
        self.trace.push(format!("healed after {failed}; writable: {writable}"));
        let log = self.server.as_ref().unwrap().log();
        let said = |what: &str| log.matches(what).count();
        let (images, native) = (said("takes no writes until it is opened again"), said("stops taking writes"));
        assert!(images <= 1 && native <= 1, "said more than once: {log}");
        self.said = images > 0;
        if writable {
            self.go_on();
        } else {
            self.tally.not_writable += 1;
        }
        self.clients.clear();
        let mut server = self.server.take().unwrap();
        let stopped = self.stop(&mut server);
        drop(server);
        self.medium.unmount();
        if !xfs {
            let checked = Command::new("e2fsck").args(["-f", "-p", &self.medium.device]).output().unwrap();
            let text = String::from_utf8_lossy(&checked.stdout).into_owned();
            self.trace.push(format!("e2fsck: {:?} {text}", checked.status.code()));
        }
        self.medium.mount(options);
        self.disks.iter_mut().for_each(|disk| disk.fails = false);
        self.start();
        self.settle(stopped);
        for disk in 0..2 {
            self.round(disk);
            assert!(self.flush(disk));
        }
        self.settle(true);
        self.clients.clear();
        assert_eq!(self.server.take().unwrap().stop("TERM"), Some(0));
        // Images that were not closed cleanly are reported, but are not findings.
        let checked = self.run("check --data");
        assert!(checked.code == 0 && checked.stdout.ends_with("clean\n"), "{checked:?}");
        for disk in &self.disks {
            self.tally.requests += disk.counted.requests;
            self.tally.refused += disk.counted.refused;
            self.tally.flushes_failed += disk.counted.flushes_failed;
            self.tally.sectors_unread += disk.counted.sectors_unread;
            self.tally.sectors_lost += disk.counted.sectors_lost;
        }
        let mounted = self.medium.mounted.clone();
        drop(self);
        medium::unmount(&mounted);
    }

    /// Kills or stops the server; returns whether the stop reported that all data was written.
    fn stop(&mut self, server: &mut Serving) -> bool {
        let code = match self.random.once_in(2) {
            true => {
                server.kill();
                None
            }
            false => Some(server.stop("TERM").unwrap_or_else(|| panic!("ended by a signal"))),
        };
        self.trace.push(format!("stopped with {code:?}; the log:\n{}", server.log()));
        code == Some(0)
    }

    /// Checks the content after the datastore was opened again; `stopped` is whether the last stop succeeded.
    fn settle(&mut self, stopped: bool) {
        let socket = self.store.socket();
        for disk in 0..2 {
            let lost = self.disks[disk].counted.sectors_lost;
            let listed = self.store.run(&format!("snapshot list disk{disk} --json")).json();
            let listed = listed["snapshots"].as_array().unwrap().iter();
            let listed: Vec<String> = listed.map(|snapshot| snapshot["name"].as_str().unwrap().to_owned()).collect();
            self.disks[disk].settle(&socket);
            // A stop writes acknowledged data back. If data was lost, a failed flush or the stop must have reported the
            // loss.
            let told = self.disks[disk].counted.flushes_failed > 0 || self.said;
            let lost = self.disks[disk].counted.sectors_lost - lost;
            assert!(lost == 0 || told || !stopped, "disk{disk}: a stop that succeeded has lost {lost} sectors");
            self.disks[disk].settle_snapshots(&socket, &listed);
        }
    }

    /// Continues after the storage was repaired, if the file system has survived the failures.
    fn go_on(&mut self) {
        // The first write to a file may still report an earlier failure.
        let (restart, reopen) = (self.random.once_in(2), !self.next.is_multiple_of(2));
        if reopen || !restart {
            let reopened = (0..3).any(|_| self.run("disk reopen disk1").code == 0);
            assert!(reopened, "disk1 cannot be opened again");
            self.tally.reopened += 1;
        }
        if restart {
            self.tally.restarted += 1;
            self.clients.clear();
            let mut server = self.server.take().unwrap();
            let stopped = self.stop(&mut server);
            drop(server);
            self.start();
            self.settle(stopped);
            self.disks.iter_mut().for_each(|disk| disk.fails = false);
            for disk in 0..2 {
                self.round(disk);
                assert!(self.flush(disk));
            }
            return;
        }
        // After a possible loss, the next flush reports the loss, and so does the next request with FUA.
        self.disks[1].settle(&self.store.socket());
        self.flush(1);
        self.round(1);
        self.disks[1].fails = false;
        assert!(self.flush(1), "the loss was reported before, so this flush succeeds");
    }
}
