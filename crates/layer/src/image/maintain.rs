//! Maintenance of an open image, extent by extent in any format: wiping, shrinking, checking.

use super::{Image, is_loss};
use crate::hosted::Hosted;
use crate::sesparse::SeSparse;
use crate::vmfssparse::VmfsSparse;
use crate::vsansparse::VsanSparse;
use crate::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use work::Progress;

/// An open extent, for maintenance operations that exist only in its format.
#[derive(Clone)]
pub(super) enum Engine {
    Hosted(Arc<Hosted>),
    VmfsSparse(Arc<VmfsSparse>),
    SeSparse(Arc<SeSparse>),
    VsanSparse(Arc<VsanSparse>),
}

/// The result of a check of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageCheck {
    /// The first remaining problems, as text.
    pub problems: Vec<String>,
    /// The number of remaining problems.
    pub problem_count: u64,
    /// The first repaired problems, as text.
    pub mended: Vec<String>,
    /// Bytes of the image's files to which no entry refers: wiping and shrinking free them.
    pub dead: u64,
    /// The number of repaired problems.
    pub repaired: u64,
}

impl ImageCheck {
    fn add(&mut self, count: u64, what: String) {
        if count > 0 {
            self.problem_count += count;
            self.problems.push(what);
        }
    }
}

/// What wiping and shrinking have freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageFreed {
    /// Bytes found dead or full of zeros, and now free for new data.
    pub freed: u64,
    /// Bytes by which the files were truncated.
    pub cut: u64,
    /// Bytes that were moved to other locations before the files were truncated.
    pub moved: u64,
}

impl std::ops::AddAssign for ImageFreed {
    fn add_assign(&mut self, other: Self) {
        self.freed += other.freed;
        self.cut += other.cut;
        self.moved += other.moved;
    }
}

/// Share of the time, in percent, in which wiping and shrinking work while guests are active. Without this limit, a
/// guest that always has a request under way would lose a quarter of its rate, even if each single request met its
/// latency goal.
const SHARE: u32 = 6;
/// The longest pause after one step: long enough for the share to be kept even if the flushes of a commit took a tenth
/// of a second.
const REST_MAX: Duration = Duration::from_secs(2);
/// Pauses are divided into parts of this length, so that a cancellation is noticed soon.
const REST_PART: Duration = Duration::from_millis(20);

/// The grain size of SEsparse, in bytes.
const SE_GRAIN: u64 = 4096;

impl Image {
    /// Whether [`Image::wipe`] can free anything in this format.
    pub fn can_wipe(&self) -> bool {
        self.engines.iter().any(|engine| matches!(engine, Engine::SeSparse(_)))
    }

    /// Whether [`Image::shrink`] can free anything in this format.
    pub fn can_shrink(&self) -> bool {
        self.engines.iter().any(|engine| matches!(engine, Engine::SeSparse(_) | Engine::VmfsSparse(_)))
    }

    /// Frees grains that no table names, and with `zeros` also grains that contain only zeros: see [`SeSparse::wipe`].
    /// Guests may be active; the work pauses so often that it hardly slows them.
    pub fn wipe(&self, zeros: bool, progress: &dyn Progress) -> Result<ImageFreed> {
        self.check_writable()?;
        let mut sum = ImageFreed::default();
        for engine in &self.engines {
            if let Engine::SeSparse(layer) = engine {
                let report = layer.wipe(zeros, &Resting::new(layer, progress))?;
                sum.freed += (report.unnamed + report.zeros) * SE_GRAIN;
            }
        }
        Ok(sum)
    }

    /// Moves live grains from the end of the files into free grains, and truncates the files: see [`SeSparse::shrink`]
    /// and [`VmfsSparse::shrink`].
    pub fn shrink(&self, progress: &dyn Progress) -> Result<ImageFreed> {
        self.check_writable()?;
        let mut sum = ImageFreed::default();
        for engine in &self.engines {
            match engine {
                Engine::SeSparse(layer) => {
                    let report = layer.shrink(&Resting::new(layer, progress))?;
                    sum.cut += report.cut;
                    sum.moved += report.moved * SE_GRAIN;
                }
                Engine::VmfsSparse(layer) => {
                    let report = layer.shrink(progress)?;
                    sum.cut += report.before.saturating_sub(report.after);
                    sum.moved += report.moved;
                }
                Engine::Hosted(_) | Engine::VsanSparse(_) => {}
            }
        }
        Ok(sum)
    }

    /// For an image that was opened for salvage: uses the second copies of its metadata, as far as this requires
    /// reading the whole image. Returns what was found, as text.
    pub fn use_proofs(&self, progress: &dyn Progress) -> Result<Vec<String>> {
        let mut told = Vec::new();
        for engine in &self.engines {
            if let Engine::SeSparse(layer) = engine {
                match layer.prove_in_memory(progress) {
                    Ok(found) => told.extend(found.into_iter().map(|what| format!("{}: {what}", layer.name()))),
                    Err(error) if is_loss(&error) => {
                        told.push(format!("{}: its second copies of metadata were not used: {error}", layer.name()));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(told)
    }

    /// Checks every table. With `repair`, an image open for writing is also repaired as far as possible.
    pub fn check(&self, repair: bool, progress: &dyn Progress) -> Result<ImageCheck> {
        if repair {
            self.check_writable()?;
        }
        let mut sum = ImageCheck::default();
        for engine in &self.engines {
            match engine {
                Engine::SeSparse(layer) => {
                    let report = layer.check(repair, progress)?;
                    sum.dead += report.unnamed * SE_GRAIN;
                    sum.repaired += report.repaired;
                    let wrong = report.invalid + report.outside + report.overlapping + report.unproven;
                    let bookkeeping = report.unallocated + report.misowned + report.uncounted_tables;
                    sum.problem_count += wrong + report.lost_tables + report.provable;
                    let put_right = repair && !report.is_damaged();
                    sum.problems.extend(report.doubts);
                    if put_right {
                        sum.mended.extend(report.findings);
                    } else {
                        sum.problem_count += if repair { 0 } else { bookkeeping };
                        sum.problems.extend(report.findings);
                    }
                    let proven = if repair { &mut sum.mended } else { &mut sum.problems };
                    proven.extend(report.proven);
                }
                Engine::VmfsSparse(layer) => {
                    let report = layer.check()?;
                    sum.dead += report.dead;
                    sum.problem_count += report.problem_count;
                    sum.problems.extend(report.problems);
                }
                Engine::VsanSparse(layer) => {
                    let report = layer.check()?;
                    sum.dead += report.dead * crate::vsansparse::BLOCK;
                    sum.problem_count += report.problem_count;
                    sum.problems.extend(report.problems);
                }
                Engine::Hosted(layer) => {
                    if repair {
                        layer.repair()?;
                    }
                    let report = layer.check()?;
                    sum.dead += report.dead;
                    sum.repaired += report.repaired;
                    sum.mended.extend(report.mended);
                    sum.add(report.bad, format!("{} entries name sectors outside the file", report.bad));
                    let what = "grains have different sectors in the two copies of their table";
                    sum.add(report.unproven, format!("{} {what}", report.unproven));
                    sum.add(report.shared, format!("{} grains overlap others", report.shared));
                    sum.add(report.overlaps, format!("{} tables overlap others", report.overlaps));
                    sum.add(report.differing, format!("{} tables differ from their copies", report.differing));
                    sum.add(report.lost, format!("{} tables cannot be read", report.lost));
                    sum.problems.extend(report.doubts);
                    // After a crash, one copy may be older than the other without an error in either.
                    sum.problems.extend(report.proven.into_iter().filter(|_| !report.unclean));
                }
            }
        }
        let label = self.place.label();
        let sentences = sum.problems.iter_mut().chain(&mut sum.mended);
        sentences.for_each(|sentence| *sentence = format!("'{label}': {sentence}"));
        Ok(sum)
    }

    /// Sets a new CID now, unless this opening has already set one. A delta that is made next then records a CID that
    /// no later write changes.
    pub fn renew_content(&self) -> Result<()> {
        self.check_writable()?;
        match &self.home {
            Some(home) => home.renew(),
            None => Ok(()),
        }
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        match self.layer.writable() {
            true => Ok(()),
            false => Err(crate::read_only(self.layer.format()).context(self.place.label())),
        }
    }

    /// The error for an image in which wiping or shrinking is not possible.
    pub fn nothing_to(&self, what: &str) -> Error {
        let text = format!(
            "'{}' is of the {} format, in which there is nothing to {what}",
            self.place.label(),
            self.layer.format()
        );
        Error::new(ErrorKind::Unsupported, text)
    }
}

/// Passes progress on, and pauses after each step during which guests sent requests, so that the work takes [`SHARE`]
/// percent of the time.
struct Resting<'a> {
    layer: &'a SeSparse,
    progress: &'a dyn Progress,
    pause: Mutex<Pause>,
}

/// The start of the current step, and the work done in it.
struct Pause {
    begun: Instant,
    worked: Duration,
    requests: u64,
    done: u64,
    moved: u64,
}

impl<'a> Resting<'a> {
    fn new(layer: &'a SeSparse, progress: &'a dyn Progress) -> Self {
        let (begun, requests) = (Instant::now(), layer.requests());
        Self {
            layer,
            progress,
            pause: Mutex::new(Pause { begun, worked: Duration::ZERO, requests, done: 0, moved: 0 }),
        }
    }
}

impl Progress for Resting<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.progress)
    }

    fn update(&self, done: u64, total: u64) {
        self.progress.update(done, total);
        let mut pause = self.pause.lock();
        let idle = pause.done == done && pause.moved == 0;
        (pause.done, pause.moved) = (done, 0);
        if idle {
            return;
        }
        if self.layer.requests() != pause.requests {
            let mut rest = (pause.worked * (100 - SHARE) / SHARE).min(REST_MAX);
            while !rest.is_zero() && !self.progress.cancelled() {
                let part = rest.min(REST_PART);
                std::thread::sleep(part);
                rest -= part;
            }
        }
        (pause.begun, pause.requests) = (Instant::now(), self.layer.requests());
    }

    /// The end of a step: the time after it, in which the rate limit waits, is not counted as work.
    fn moved(&self, bytes: u64) {
        self.progress.moved(bytes);
        let mut pause = self.pause.lock();
        pause.worked = pause.begun.elapsed();
        pause.moved += bytes;
    }
}
