//! Instant clones of real guests, from frozen and from running parents, and the parent's disk speed afterwards.
//!
//! ```text
//! clones   parents that have touched 256 MiB, 1 GiB and 2 GiB are frozen and cloned three at a time, in turn: time
//!          until a clone's processor executes, how long the parent was paused, and guest memory that a clone has
//!          copied two seconds later
//! stun     a running parent is cloned ten times, several parents one after the other: how long it was paused
//! speed    flushed writes of a guest before and after it was cloned, in turn with a guest that is not cloned: each
//!          relative to its earlier speed, and one relative to the other, so that other activity of the host cancels
//!          out
//! ```
//!
//! The guests are built by `scripts/guest`, in a folder next to the program's folder. The times of clones are those
//! that lamina reports, from the beginning of a clone until `cont` has returned. The rate per hour is that of whole
//! commands, including the change of identity inside the guests.

use super::{Setting, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::{Doing, Error, Result};
use crate::plan::Mode;
use crate::process;
use crate::report::{Finding, Outcome};
use crate::statistics::{median, ratio};
use serde_json::{Value, json};
use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Property of findings about clones: time until they execute, memory that they copy.
const CLONE: &str = "instant clones";
/// Property of findings about how long a running parent is paused.
const STUN: &str = "stun of the parent";
/// Property of findings about the disk speed of a parent after it was cloned.
const PARENT_SPEED: &str = "disk speed after a clone";

/// Memory that parents have touched, in MiB.
const TOUCHED: [u64; 3] = [256, 1024, 2048];
/// Memory that a guest needs for itself, in MiB.
const GUEST: u64 = 256;
/// Number of clones made at a time.
const AT_ONCE: u32 = 3;
/// Number of times that a parent is frozen again.
const FREEZES: usize = 3;
/// Number of clones of one running parent.
const IN_A_ROW: usize = 10;
/// Limit of the time until a clone executes.
const RUNNING_MAX_MS: f64 = 150.0;
/// Most time until a clone executes with the largest memory, relative to the smallest memory.
const RATIO_MAX: f64 = 1.2;
/// Most guest memory that an idle clone may have copied.
const OWN_MAX_MIB: f64 = 5.0;
/// Limit of the time that a running parent is paused.
const STUN_MAX_MS: f64 = 25.0;
/// Least disk speed of a parent after cloning, as a share of its speed before.
const SPEED_MIN: f64 = 0.97;
/// Time limit for booting a guest on a loaded machine.
const BOOT_TIME_MAX: Duration = Duration::from_secs(180);
/// Instant clones per hour that a study reported for VMware: least and most.
const STUDY_PER_HOUR: [f64; 2] = [700.0, 1400.0];

/// A part of the measurement. It adds findings and returns raw samples.
type Measure = fn(&Setting, &Room<'_>, &mut Outcome) -> Result<Value>;
/// The parts of the measurement, by name.
const PARTS: [(&str, Measure); 3] = [("frozen", frozen), ("running", running), ("speed", speed)];

/// Machines on a served datastore. Dropping this value stops all of them.
struct Room<'a> {
    datastore: &'a Datastore,
    guest: PathBuf,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let listed = self.datastore.ask(&["vm", "list"]).unwrap_or_default();
        for one in listed["machines"].as_array().into_iter().flatten() {
            let _ = self.datastore.verb(&["vm", "stop", one["name"].as_str().unwrap_or_default(), "--force"]);
        }
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let guest = setting.lamina.ancestors().nth(2).unwrap_or(&setting.lamina).join("guest");
    if !guest.join("vm-initrd").is_file() {
        let folder = guest.display();
        return Err(Error::Usage(format!("no guest in {folder}: make it with scripts/guest {folder}")));
    }
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "machines")?;
    datastore.create("first", 1 << 20)?;
    let (server, _) = datastore.serve(&Serving::plain(Mode::Buffered), "first")?;
    let room = Room { datastore: &datastore, guest };
    let mut outcome = Outcome::default();
    let plan = &setting.plan;
    let wanted: Vec<_> = PARTS.into_iter().filter(|(name, _)| plan.wants(name)).collect();
    if wanted.is_empty() {
        return Err(no_cell(plan, &PARTS.map(|(name, _)| name)));
    }
    let mut raw = Vec::new();
    for (name, measure) in wanted {
        raw.push(json!({ name: measure(setting, &room, &mut outcome)? }));
    }
    drop(room);
    server.service.stop()?;
    outcome.raw = json!(raw);
    Ok(outcome)
}

impl Room<'_> {
    /// Boots a guest and waits until its workload runs.
    fn boot(&self, name: &str, touched: u64) -> Result<()> {
        let path = |file: &str| self.guest.join(file).display().to_string();
        let (kernel, initrd, memory) = (path("vmlinuz"), path("vm-initrd"), format!("{}M", touched + GUEST));
        let line = format!("console=ttyS0 quiet panic=-1 workload={touched}");
        let what = ["vm", "create", name, "--memory", &memory, "--disk-size", "1G", "--start", "--kernel", &kernel];
        self.datastore.verb(&[&what[..], &["--initrd", &initrd, "--append", &line]].concat())?;
        let began = Instant::now();
        while !self.datastore.text(&["vm", "console", name, "--said"])?.contains("tick 1") || !self.answers(name) {
            if began.elapsed() > BOOT_TIME_MAX {
                return Err(Error::Answer(format!("the guest of {name} is not up in time")));
            }
            process::pause(Duration::from_millis(100))?;
        }
        Ok(())
    }

    fn answers(&self, name: &str) -> bool {
        self.datastore.text(&["vm", "exec", name, "--", "/bin/true"]).is_ok()
    }

    /// Stops and deletes machines.
    fn delete(&self, names: &[String]) -> Result<()> {
        for name in names {
            self.datastore.verb(&["vm", "stop", name, "--force"])?;
            self.datastore.verb(&["vm", "delete", name])?;
        }
        Ok(())
    }

    /// Guest memory that a machine has copied, in MiB.
    fn own_memory(&self, name: &str) -> Result<f64> {
        let shown = self.datastore.ask(&["vm", "show", name])?;
        let path = format!("/proc/{}/smaps", shown["pid"]);
        let maps = std::fs::read_to_string(&path).doing(|| format!("reading {path}"))?;
        let (mut of_guest, mut kib) = (false, 0.0);
        for line in maps.lines() {
            if line.starts_with(|first: char| first.is_ascii_digit() || first.is_ascii_lowercase()) {
                of_guest = line.contains("/image-");
            } else if let (true, Some(rest)) = (of_guest, line.strip_prefix("Anonymous:")) {
                kib += rest.trim().trim_end_matches(" kB").parse().unwrap_or(0.0);
            }
        }
        Ok(kib / 1024.0)
    }
}

fn number(value: &Value, key: &str) -> Result<f64> {
    value[key].as_f64().ok_or_else(|| Error::Answer(format!("no number '{key}' in {value}")))
}

fn frozen(setting: &Setting, room: &Room<'_>, outcome: &mut Outcome) -> Result<Value> {
    let mut figures = Frozen::default();
    for run in 0..setting.plan.runs {
        // The first case fills caches that the other cases then use, so the order changes with every run.
        let mut order: Vec<usize> = (0..TOUCHED.len()).collect();
        order.rotate_left(run as usize % TOUCHED.len());
        figures.take(room, run, &order)?;
    }
    for (index, touched) in TOUCHED.into_iter().enumerate() {
        let what = format!("frozen parent, {touched} MiB touched");
        let Frozen { first, again, times, own, .. } = &figures;
        outcome.findings.extend([
            Finding::new(CLONE, format!("{what}: clone executes after"), median(&times[index]), "ms")
                .at_most(RUNNING_MAX_MS),
            Finding::new(CLONE, format!("{what}: stood still, first time"), median(&first[index]), "ms"),
            Finding::new(CLONE, format!("{what}: stood still, later"), median(&again[index]), "ms"),
            Finding::new(CLONE, format!("{what}: a clone's own guest memory"), median(&own[index]), "MiB"),
        ]);
    }
    let spread = |of: &[Vec<f64>]| {
        let medians: Vec<f64> = of.iter().map(|times| median(times)).collect();
        ratio(medians.iter().copied().fold(0.0, f64::max), medians.iter().copied().fold(f64::INFINITY, f64::min))
    };
    let against = |what: &str, of: &[Vec<f64>]| {
        Finding::new(CLONE, format!("{what}, slowest memory against fastest"), spread(of), "").at_most(RATIO_MAX)
    };
    outcome.findings.extend([
        against("time until a clone executes", &figures.times),
        against("time a parent stands still, first time", &figures.first),
        against("time a parent stands still, later", &figures.again),
        Finding::new(CLONE, "an idle clone's own guest memory", median(&figures.idle), "MiB").at_most(OWN_MAX_MIB),
        Finding::new(
            CLONE,
            "instant clones per hour, with their identity",
            f64::from(AT_ONCE) / median(&figures.commands) * 3600.0,
            "",
        ),
        Finding::new(CLONE, "the study: VMware's least", STUDY_PER_HOUR[0], ""),
        Finding::new(CLONE, "the study: VMware's most", STUDY_PER_HOUR[1], ""),
    ]);
    let Frozen { first, again, times, own, idle, commands } = figures;
    Ok(json!({
        "touched": TOUCHED, "running_ms": times, "first_still_ms": first, "later_still_ms": again, "own_mib": own,
        "idle_mib": idle, "commands_s": commands,
    }))
}

/// Measurements of frozen parents and their clones; arrays have an entry for each of [`TOUCHED`].
#[derive(Default)]
struct Frozen {
    /// Milliseconds for which a parent was paused. The parent had its own memory file, which became the image's file.
    first: [Vec<f64>; TOUCHED.len()],
    /// Milliseconds for which a parent was paused. The parent was started from an image, and most of its memory was
    /// copied before the pause.
    again: [Vec<f64>; TOUCHED.len()],
    /// Milliseconds until a clone executes.
    times: [Vec<f64>; TOUCHED.len()],
    /// Guest memory, in MiB, that a clone has copied after its identity was changed.
    own: [Vec<f64>; TOUCHED.len()],
    /// Guest memory, in MiB, that a clone without a changed identity has copied: only its workload has run.
    idle: Vec<f64>,
    /// Durations of whole commands in seconds.
    commands: Vec<f64>,
}

impl Frozen {
    /// Measures once, with the memory sizes in the given order.
    fn take(&mut self, room: &Room<'_>, run: u32, order: &[usize]) -> Result<()> {
        let name = |index: usize| format!("frozen{}r{run}", TOUCHED[index]);
        for index in order.iter().copied() {
            say(&format!("a parent that touches {} MiB", TOUCHED[index]));
            room.boot(&name(index), TOUCHED[index])?;
        }
        let freeze = |index: usize| {
            let taken = room.datastore.ask(&["vm", "freeze", &name(index)])?;
            let (disks, state) = (number(&taken, "disks_ms")?, number(&taken, "state_ms")?);
            number(&taken, "stop_ms").map(|stop| stop + disks.max(state))
        };
        for index in order.iter().copied() {
            self.first[index].push(freeze(index)?);
        }
        for _ in 0..FREEZES {
            for index in order.iter().copied() {
                room.datastore.verb(&["vm", "start", &name(index)])?;
                process::pause(Duration::from_secs(1))?;
                self.again[index].push(freeze(index)?);
            }
        }
        say("clones of the frozen parents in turn, three clones at a time");
        let clone = |index: usize, batch: &str| -> Result<(Value, Vec<String>)> {
            let (pattern, count) = (format!("{}{batch}-%d", name(index)), AT_ONCE.to_string());
            let words = ["vm", "clone", &name(index), "--instant", "--count", &count, "--parallel", &count];
            let made = room.datastore.ask(&[&words[..], &["--name-pattern", &pattern]].concat())?;
            Ok((made, (1..=AT_ONCE).map(|number| format!("{}{batch}-{number}", name(index))).collect()))
        };
        // A first batch of clones is not measured, so that all measured batches begin in the same state.
        for index in order.iter().copied() {
            room.delete(&clone(index, "w")?.1)?;
        }
        for index in order.iter().copied() {
            let began = Instant::now();
            let (made, names) = clone(index, "c")?;
            self.commands.push(began.elapsed().as_secs_f64());
            for one in made["made"].as_array().into_iter().flatten() {
                self.times[index].push(number(one, "running_ms")?);
            }
            process::pause(Duration::from_secs(2))?;
            for name in &names {
                self.own[index].push(room.own_memory(name)?);
            }
            room.delete(&names)?;
        }
        room.datastore.verb(&["vm", "clone", &name(0), "idle", "--instant", "--identity", "keep"])?;
        process::pause(Duration::from_secs(2))?;
        self.idle.push(room.own_memory("idle")?);
        room.delete(&["idle".into()])?;
        for index in order.iter().copied() {
            room.datastore.verb(&["vm", "delete", &name(index)])?;
        }
        Ok(())
    }
}

fn running(setting: &Setting, room: &Room<'_>, outcome: &mut Outcome) -> Result<Value> {
    let mut stuns: Vec<Vec<f64>> = vec![Vec::new(); IN_A_ROW];
    for run in 0..setting.plan.runs.min(3) {
        let parent = format!("running{run}");
        say(&format!("{IN_A_ROW} clones of a running parent, {} of {}", run + 1, setting.plan.runs.min(3)));
        room.boot(&parent, TOUCHED[0])?;
        for (index, stuns) in stuns.iter_mut().enumerate() {
            let child = format!("{parent}c{index}");
            let made = room.datastore.ask(&["vm", "clone", &parent, &child, "--instant"])?;
            stuns.push(number(&made, "stun_ms")?);
            room.delete(&[child])?;
        }
        room.delete(&[parent])?;
    }
    let between: Vec<f64> = stuns[1..IN_A_ROW - 1].concat();
    outcome.findings.extend([
        Finding::new(STUN, "running parent stands still, first clone", median(&stuns[0]), "ms").at_most(STUN_MAX_MS),
        Finding::new(STUN, "running parent stands still, clones between", median(&between), "ms"),
        Finding::new(STUN, "running parent stands still, tenth clone", median(&stuns[IN_A_ROW - 1]), "ms")
            .at_most(STUN_MAX_MS),
    ]);
    Ok(json!({ "stun_ms": stuns }))
}

fn speed(setting: &Setting, room: &Room<'_>, outcome: &mut Outcome) -> Result<Value> {
    say("a guest's writes before and after it is cloned");
    // Other activity of the host has a larger effect than the clone, so there are many rounds.
    let rounds = setting.plan.runs * 5;
    for name in ["cloned", "alone"] {
        room.boot(name, 32)?;
    }
    let turns = Cell::new(0u32);
    let both = || -> Result<[f64; 2]> {
        turns.set(turns.get() + 1);
        if turns.get().is_multiple_of(2) {
            return Ok([write(room, "cloned")?, write(room, "alone")?]);
        }
        let alone = write(room, "alone")?;
        Ok([write(room, "cloned")?, alone])
    };
    // A first round, which is not measured, creates the files and lets QEMU translate the guests' programs.
    both()?;
    let before = (0..rounds).map(|_| both()).collect::<Result<Vec<_>>>()?;
    room.datastore.verb(&["vm", "clone", "cloned", "child", "--instant"])?;
    room.datastore.verb(&["vm", "pause", "child"])?;
    both()?;
    let after = (0..rounds).map(|_| both()).collect::<Result<Vec<_>>>()?;
    let of = |all: &[[f64; 2]], which: usize| median(&all.iter().map(|both| both[which]).collect::<Vec<_>>());
    let kept = |which: usize| ratio(of(&before, which), of(&after, which));
    // The ratios of adjacent measurements are used, because other activity of the host slows down both.
    let together =
        |all: &[[f64; 2]]| median(&all.iter().map(|[cloned, alone]| ratio(*cloned, *alone)).collect::<Vec<_>>());
    outcome.findings.extend([
        Finding::new(
            PARENT_SPEED,
            "a cloned guest's speed of writes, against a guest without clones",
            ratio(together(&before), together(&after)),
            "",
        )
        .at_least(SPEED_MIN),
        Finding::new(PARENT_SPEED, "a cloned guest's speed of writes, against before", kept(0), ""),
        Finding::new(PARENT_SPEED, "speed of writes of the guest without clones, against before", kept(1), ""),
    ]);
    room.delete(&["child".into(), "cloned".into(), "alone".into()])?;
    Ok(json!({ "before_s": before, "after_s": after }))
}

/// Seconds, by the guest's own clock, in which a guest overwrites a file with direct I/O and flushes every part.
fn write(room: &Room<'_>, name: &str) -> Result<f64> {
    let line = "read a b </proc/uptime; dd if=/dev/zero of=/io bs=16k count=3072 conv=notrunc oflag=direct 2>/dev/null; \
                sync; read c d </proc/uptime; echo $a $c";
    let said = room.datastore.text(&["vm", "exec", name, "--", "/bin/sh", "-c", line])?;
    let times: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match times[..] {
        [from, to] if to > from => Ok(to - from),
        _ => Err(Error::Answer(format!("a guest timed its writes so: {said}"))),
    }
}
