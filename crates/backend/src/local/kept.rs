//! Space that a folder keeps back. It is released when the file system refuses even requests that need no new space.
//!
//! btrfs counts the metadata of every request against a quota. At the limit it refuses overwrites in place, hole
//! punches, length changes and renames with EDQUOT. It has separate space for metadata and for data: if other programs
//! have used up the space for metadata, it refuses the same requests with ENOSPC. It always carries out the removal of
//! a file. So a folder on btrfs keeps [`STEPS`] files, the steps. Their extended attributes use metadata and no data.
//! If such a request is refused, one step is removed, and the request is repeated.
//!
//! 1. A step is removed only for a request that needs no new space, and only after that request was refused again.
//! 2. While steps are missing, requests that need new space are refused, because the kept space is not for data.
//! 3. Missing steps are made again when there is space: right after a rename, by the next write or reservation, by a
//!    thread that runs while steps are missing, and at the next opening. Attempts are at least [`TRY_EVERY`] apart.
//!    Until the next attempt, requests that need new space may be refused although another program has freed space.
//! 4. Another program may use the space of a removed step before the step is made again. After [`STEPS`] such losses no
//!    step is left, and requests that need no new space are refused too, until there is space.
//!
//! The folder that keeps space for a file is found by the device number: each subvolume of btrfs has its own.

use super::extents;
use super::file_system::FileSystem;
#[cfg(target_os = "linux")]
use crate::owner::{Owner, open_in};
use crate::private;
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

/// The subfolder that contains the steps.
const FOLDER: &str = "reserve";
/// The number of steps.
const STEPS: usize = 32;
/// The extended attributes of a step: length and number. Each fills a node of btrfs almost completely. The first form
/// is for nodes of 16 KiB or more, the others for file systems that were made with nodes of 8 KiB or 4 KiB, which
/// refuse longer attributes with ENOSPC. A request allocates a node for each run of pages that it touches, until the
/// file system commits. While a request is carried out, the creation of a name needs 1.3 MiB of free space, and a
/// rename needs 3 MiB.
const FORMS: [(usize, usize); 3] = [(16_000, 16), (8_000, 32), (3_900, 64)];
/// The least time between two attempts to make missing steps: at a full quota, each makes the file system commit.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// The least time between two attempts of the thread to make missing steps.
const THREAD_EVERY: Duration = Duration::from_millis(500);

/// The folders of this process that keep space back.
static KEPT: RwLock<Vec<Arc<Steps>>> = RwLock::new(Vec::new());
/// The number of these folders in which steps are missing.
static MISSING: AtomicUsize = AtomicUsize::new(0);

/// Space that a folder keeps back while this value exists. Only the owner of the folder creates this value, so all
/// processes together have one for each folder.
pub struct KeptSpace(Arc<Steps>);

/// Exists while the owner of the folder uses the space of steps that it removes.
pub struct HeldSpace<'a>(&'a Arc<Steps>);

struct Steps {
    folder: OwnedFd,
    device: u64,
    state: Mutex<StepsState>,
    /// Held while a step is removed and its space is used, because other requests would use that space too.
    giving: Mutex<()>,
}

struct StepsState {
    missing: [bool; STEPS],
    /// The time of the last attempt to make missing steps, and the error of the last failed attempt.
    tried: Option<Instant>,
    refusal: i32,
    thread: bool,
    /// The number of [`HeldSpace`] values: while there is one, no step is made.
    held: usize,
    /// Whether the [`KeptSpace`] was dropped.
    ended: bool,
}

impl KeptSpace {
    /// Makes the missing steps for which there is space; `None` on a file system that needs no kept space.
    pub fn keep(folder: &Path) -> io::Result<Option<Self>> {
        if FileSystem::of(folder)? != FileSystem::Btrfs {
            return Ok(None);
        }
        let path = folder.join(FOLDER);
        match private::create_folder(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
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

    /// Whether no step is missing.
    pub fn is_whole(&self) -> bool {
        !self.0.state.lock().is_missing()
    }

    /// While the returned value exists, no step is made, because the owner uses the space of the steps that it removes.
    pub fn hold(&self) -> HeldSpace<'_> {
        self.0.state.lock().held += 1;
        HeldSpace(&self.0)
    }
}

impl HeldSpace<'_> {
    /// Removes a step; false if none is left.
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

/// Whether a step is complete: its last attribute is made last.
#[cfg(target_os = "linux")]
fn is_there(folder: &OwnedFd, step: usize) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(folder, name(step), flags, Mode::empty()) else { return false };
    let mut value = [0; FORMS[0].0];
    FORMS.iter().any(|(length, count)| {
        rustix::fs::fgetxattr(&file, attribute(count - 1), &mut value).is_ok_and(|found| found == *length)
    })
}

#[cfg(target_os = "linux")]
fn make(folder: &OwnedFd, step: usize) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW;
    let file = open_in(folder.as_fd(), Owner::of(folder), name(step).as_str(), flags)?;
    let value = [0; FORMS[0].0];
    let set = |number: usize, length: usize| {
        rustix::fs::fsetxattr(&file, attribute(number), &value[..length], rustix::fs::XattrFlags::empty())
    };
    for (length, count) in FORMS {
        match set(0, length) {
            // The nodes may be too small, or the file system may be full. A full one refuses the other forms, too.
            Err(rustix::io::Errno::NOSPC) => {}
            first => return Ok(first.and_then(|()| (1..count).try_for_each(|number| set(number, length)))?),
        }
    }
    Err(rustix::io::Errno::NOSPC.into())
}

#[cfg(not(target_os = "linux"))]
fn is_there(_folder: &OwnedFd, _step: usize) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn make(_folder: &OwnedFd, _step: usize) -> io::Result<()> {
    Err(rustix::io::Errno::NOTSUP.into())
}

impl Steps {
    /// Makes missing steps until there is no space for one.
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
                // Removes the step, of which a part may have been made.
                let _ = rustix::fs::unlinkat(&self.folder, name(step), AtFlags::empty());
                state.refusal = error.raw_os_error().unwrap_or(state.refusal);
                return;
            }
            state.missing[step] = false;
        }
        if !state.ended {
            MISSING.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Fails if a step is missing. Tries to make the missing steps first, unless the last attempt was recent.
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
        // Delays the next attempt, because the request for which the step was removed needs the space first.
        state.tried = Some(Instant::now());
        if !was_missing && !state.ended {
            MISSING.fetch_add(1, Ordering::AcqRel);
        }
        self.go_on_taking(&mut state);
        true
    }

    /// Starts a thread that makes the missing steps.
    fn go_on_taking(self: &Arc<Self>, state: &mut StepsState) {
        if state.thread || state.ended || !state.is_missing() {
            return;
        }
        let steps = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("keeping space back".into()).spawn(move || keep_taking(&steps));
        // Without a thread, later writes and reservations make the missing steps.
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

/// Whether a folder of this process misses a step: then each write has to be checked.
pub(crate) fn is_missing() -> bool {
    MISSING.load(Ordering::Acquire) > 0
}

fn of(file: impl AsFd) -> Option<Arc<Steps>> {
    let device = rustix::fs::fstat(file).ok()?.st_dev;
    KEPT.read().iter().find(|steps| steps.device == device).cloned()
}

/// Carries out a request on a file that needs no new space.
pub(super) fn without_new_space<T>(file: &File, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match call() {
        Err(error) if error::lacks_space(&error) => repeat(of(file), error, call),
        outcome => outcome,
    }
}

/// Renames in a folder. btrfs needs much free space for a rename, but only while it is carried out.
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

/// Carries out a request on a range of a file. The request needs new space if the range has none.
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
        // The space of a step that another request has removed may be enough.
        match call() {
            Err(error) if error::lacks_space(&error) && steps.give_up() => {}
            outcome => return outcome,
        }
    }
}

/// Whether the whole range has space, reserved or written.
pub(super) fn has_space(file: &File, range: &Range<u64>) -> bool {
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
