//! Space that a folder keeps back where the file system refuses what needs no new space.
//!
//! btrfs counts the metadata of every request against a quota. At the limit it refuses overwrites in place, punched
//! holes, changes of a length and renames with EDQUOT. It keeps space for metadata apart from space for data: where
//! other programs have used that up, it refuses the same with ENOSPC. It always carries out the removal of a file. So a
//! folder there keeps [`STEPS`] files whose extended attributes take metadata, and no data. Where such a request is
//! refused, one of them is removed, and the request repeated.
//!
//! 1. A step is removed for a request on what has its space, and only after the request was refused again.
//! 2. While steps are missing, requests that need new space are refused: what is kept back is not for data.
//! 3. Missing steps are taken again as soon as there is room: after a rename at once, by the next request that needs
//!    space, by a thread that runs for as long as some are missing, and at the next opening.
//! 4. Another program may take the space of a removed step before it is taken again. After [`STEPS`] times nothing is
//!    kept back any more, and everything is refused until there is room.
//!
//! Which folder keeps space for a file is found by the device: on btrfs each subvolume is one.

use super::extents;
use super::file_system::FileSystem;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The folder of the steps, in the folder that keeps them.
const FOLDER: &str = "reserve";
/// Steps that are kept.
const STEPS: usize = 32;
/// Extended attributes of a step, each of which takes a node of btrfs (16 KiB) nearly to its end. A request takes such
/// a node for each run of pages that it touches, until the file system commits; a new name needs 1.3 MiB, a rename
/// 3 MiB free at that moment.
const ATTRIBUTES: usize = 16;
const ATTRIBUTE: usize = 16_000;
/// Missing steps are not looked for more often: at a full quota, each try makes the file system commit.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// The same for the thread.
const THREAD_EVERY: Duration = Duration::from_millis(500);

/// Folders of this process that keep space.
static KEPT: RwLock<Vec<Arc<Steps>>> = RwLock::new(Vec::new());
/// Those among them that miss steps.
static MISSING: AtomicUsize = AtomicUsize::new(0);

/// Space that a folder keeps back, for as long as this exists. For the folder's owner: one in all processes.
pub struct KeptSpace(Arc<Steps>);

/// Use of what was given up.
pub struct HeldSpace<'a>(&'a Arc<Steps>);

struct Steps {
    folder: OwnedFd,
    device: u64,
    state: Mutex<StepsState>,
    /// Held while a step is given up and used: others would use it too.
    giving: Mutex<()>,
}

struct StepsState {
    missing: [bool; STEPS],
    /// When missing ones were looked for, and the error that said there is no room.
    tried: Option<Instant>,
    refusal: i32,
    thread: bool,
    /// The owner uses what it has given up.
    held: usize,
    /// The owner has gone.
    ended: bool,
}

impl KeptSpace {
    /// Takes what is missing, as far as there is room; `None` on a file system that needs nothing kept back.
    pub fn keep(folder: &Path) -> io::Result<Option<Self>> {
        if FileSystem::of(folder)? != FileSystem::Btrfs {
            return Ok(None);
        }
        let path = folder.join(FOLDER);
        match rustix::fs::mkdir(&path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty())?;
        let state = StepsState {
            missing: std::array::from_fn(|step| !is_there(&folder, step)),
            tried: None,
            refusal: rustix::io::Errno::DQUOT.raw_os_error(),
            thread: false,
            held: 0,
            ended: false,
        };
        let device = rustix::fs::fstat(&folder)?.st_dev;
        let steps = Arc::new(Steps { folder, device, state: Mutex::new(state), giving: Mutex::new(()) });
        KEPT.write().push(Arc::clone(&steps));
        {
            let mut state = steps.state.lock();
            if state.is_missing() {
                MISSING.fetch_add(1, Ordering::AcqRel);
                steps.take(&mut state);
                steps.go_on_taking(&mut state);
            }
        }
        Ok(Some(Self(steps)))
    }

    /// Whether all of it is there.
    pub fn is_whole(&self) -> bool {
        !self.0.state.lock().is_missing()
    }

    /// Nothing is taken for as long as what this returns exists: the owner needs what it gives up.
    pub fn hold(&self) -> HeldSpace<'_> {
        self.0.state.lock().held += 1;
        HeldSpace(&self.0)
    }
}

impl HeldSpace<'_> {
    /// Gives up a step; false when none is left.
    pub fn give_up(&self) -> bool {
        self.0.give_up()
    }
}

impl Drop for HeldSpace<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.held -= 1;
        if state.is_missing() {
            self.0.take(&mut state);
        }
    }
}

impl Drop for KeptSpace {
    fn drop(&mut self) {
        KEPT.write().retain(|steps| !Arc::ptr_eq(steps, &self.0));
        let mut state = self.0.state.lock();
        if state.is_missing() {
            self.0.take(&mut state);
        }
        if state.is_missing() {
            MISSING.fetch_sub(1, Ordering::AcqRel);
        }
        state.ended = true;
    }
}

impl StepsState {
    fn is_missing(&self) -> bool {
        self.missing.contains(&true)
    }
}

fn name(step: usize) -> String {
    step.to_string()
}

#[cfg(target_os = "linux")]
fn attribute(number: usize) -> String {
    format!("user.lamina.{number}")
}

/// Whether a step is there as a whole: its last attribute was made last.
#[cfg(target_os = "linux")]
fn is_there(folder: &OwnedFd, step: usize) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(folder, name(step), flags, Mode::empty()) else { return false };
    let mut value = [0; ATTRIBUTE];
    rustix::fs::fgetxattr(file, attribute(ATTRIBUTES - 1), &mut value) == Ok(ATTRIBUTE)
}

#[cfg(target_os = "linux")]
fn make(folder: &OwnedFd, step: usize) -> rustix::io::Result<()> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name(step), flags, Mode::RUSR | Mode::WUSR)?;
    let value = [0; ATTRIBUTE];
    (0..ATTRIBUTES)
        .try_for_each(|number| rustix::fs::fsetxattr(&file, attribute(number), &value, rustix::fs::XattrFlags::empty()))
}

#[cfg(not(target_os = "linux"))]
fn is_there(_folder: &OwnedFd, _step: usize) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn make(_folder: &OwnedFd, _step: usize) -> rustix::io::Result<()> {
    Err(rustix::io::Errno::NOTSUP)
}

impl Steps {
    /// Takes missing steps until one finds no room.
    fn take(&self, state: &mut StepsState) {
        if state.held > 0 {
            return;
        }
        state.tried = Some(Instant::now());
        for step in 0..STEPS {
            if !state.missing[step] {
                continue;
            }
            if let Err(error) = make(&self.folder, step) {
                // Part of it may have been taken.
                let _ = rustix::fs::unlinkat(&self.folder, name(step), AtFlags::empty());
                state.refusal = error.raw_os_error();
                return;
            }
            state.missing[step] = false;
        }
        if !state.ended {
            MISSING.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Whether none is missing, after another try if the last was long ago.
    fn is_whole_again(&self) -> Result<(), io::Error> {
        let mut state = self.state.lock();
        if state.is_missing() && state.tried.is_none_or(|tried| tried.elapsed() >= TRY_EVERY) {
            self.take(&mut state);
        }
        match state.is_missing() {
            true => Err(io::Error::from_raw_os_error(state.refusal)),
            false => Ok(()),
        }
    }

    fn give_up(self: &Arc<Self>) -> bool {
        let mut state = self.state.lock();
        let was_missing = state.is_missing();
        let Some(step) = state.missing.iter().position(|missing| !missing) else { return false };
        if rustix::fs::unlinkat(&self.folder, name(step), AtFlags::empty()).is_err() {
            return false;
        }
        state.missing[step] = true;
        // Not at once: what it was given up for comes first.
        state.tried = Some(Instant::now());
        if !was_missing && !state.ended {
            MISSING.fetch_add(1, Ordering::AcqRel);
        }
        self.go_on_taking(&mut state);
        true
    }

    /// Has a thread take what is missing.
    fn go_on_taking(self: &Arc<Self>, state: &mut StepsState) {
        if state.thread || state.ended || !state.is_missing() {
            return;
        }
        let steps = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("keeping space back".into()).spawn(move || keep_taking(&steps));
        // Without a thread, requests that need space try.
        state.thread = thread.is_ok();
    }
}

fn keep_taking(steps: &Weak<Steps>) {
    loop {
        std::thread::sleep(THREAD_EVERY);
        let Some(steps) = steps.upgrade() else { return };
        let mut state = steps.state.lock();
        if state.is_missing() && !state.ended && state.tried.is_none_or(|tried| tried.elapsed() >= THREAD_EVERY) {
            steps.take(&mut state);
        }
        if !state.is_missing() || state.ended {
            state.thread = false;
            return;
        }
    }
}

/// Whether a folder of this process misses a part of what it keeps back: then each write is looked at.
pub(crate) fn is_missing() -> bool {
    MISSING.load(Ordering::Acquire) > 0
}

fn of(file: impl AsFd) -> Option<Arc<Steps>> {
    let device = rustix::fs::fstat(file).ok()?.st_dev;
    KEPT.read().iter().find(|steps| steps.device == device).cloned()
}

/// Makes a request on a file that needs no new space.
pub(super) fn without_new_space<T>(file: &File, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match call() {
        Err(error) if error::lacks_space(&error) => repeat(of(file), error, call),
        outcome => outcome,
    }
}

/// Renames in a folder. The file system needs much space for that, for a moment.
pub(super) fn rename(folder: &OwnedFd, call: impl Fn() -> io::Result<()>) -> io::Result<()> {
    match call() {
        Err(error) if error::lacks_space(&error) => {
            let steps = of(folder);
            let outcome = repeat(steps.clone(), error, call);
            if let Some(steps) = steps {
                let mut state = steps.state.lock();
                if state.is_missing() {
                    steps.take(&mut state);
                }
            }
            outcome
        }
        outcome => outcome,
    }
}

/// Makes a request on a range of a file, which needs new space where the range has none.
pub(super) fn in_range<T>(file: &File, range: Range<u64>, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    if is_missing()
        && let Some(steps) = of(file)
        && let Err(error) = steps.is_whole_again()
        && !has_space(file, &range)
    {
        return Err(error);
    }
    match call() {
        Err(error) if error::lacks_space(&error) => {
            let steps = of(file).filter(|_| has_space(file, &range));
            repeat(steps, error, call)
        }
        outcome => outcome,
    }
}

#[cold]
fn repeat<T>(steps: Option<Arc<Steps>>, error: io::Error, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let Some(steps) = steps else { return Err(error) };
    let _giving = steps.giving.lock();
    loop {
        // What another request has given up may be enough.
        match call() {
            Err(error) if error::lacks_space(&error) && steps.give_up() => {}
            outcome => return outcome,
        }
    }
}

/// Whether all of a range has its space, reserved or written.
fn has_space(file: &File, range: &Range<u64>) -> bool {
    let mut at = range.start;
    while at < range.end {
        let Ok(placements) = extents::placements(file, at, true) else { return false };
        let before = at;
        for placement in placements {
            if placement.range.start > at || at >= range.end {
                break;
            }
            at = at.max(placement.range.end);
        }
        if at == before {
            return false;
        }
    }
    true
}
