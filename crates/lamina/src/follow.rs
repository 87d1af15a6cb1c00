//! Progress of long operations on a terminal: a progress bar on stderr, Ctrl-C, and partial replies that are printed as
//! they arrive.

use crate::output::{self, Extents, Form};
use control::{
    BackupRequest, DiskRequest, ImageRequest, JobRequest, MachineVerb, Part, Request, ScrubRequest, SnapshotRequest,
    Watch,
};
use disk::Progress;
use error::{Error, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vm::definition::CloneKind;

/// Time after which the progress bar is shown. Most commands end before.
const BAR_AFTER: Duration = Duration::from_millis(300);

/// Has writes beyond the limit of file sizes (`ulimit -f`) fail with an error. By default SIGXFSZ ends the process, and
/// a server with it. A handler, other than an ignored signal, does not apply to programs that this process starts.
pub fn survive_size_limit() -> Result<()> {
    let reached = Arc::new(AtomicBool::new(false));
    flag::register(SIGXFSZ, reached).map(drop).map_err(|e| Error::io("registering for signals", e))
}

/// Sets a flag on the first SIGINT or SIGTERM, and ends the process on the second one.
pub fn interruption(code: u8) -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The handlers run in this order, so that the first signal finds the flag unset and then sets it.
        flag::register_conditional_shutdown(signal, i32::from(code), Arc::clone(&interrupted))
            .and_then(|_| flag::register(signal, Arc::clone(&interrupted)))
            .map_err(|e| Error::io("registering for signals", e))?;
    }
    Ok(interrupted)
}

/// Template of a bar that counts bytes.
const BYTES: &str = "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
/// Template of a bar that counts objects.
const THINGS: &str = "{msg} [{bar:30}] {human_pos} of {human_len}, {eta} left";

/// Template of a bar whose unit is unknown.
const PART: &str = "{msg} [{bar:30}] {percent}%, {eta} left";

/// A progress bar on stderr, shown after [`BAR_AFTER`]; never shown if stderr is not a terminal.
struct Bar {
    bar: ProgressBar,
    begun: Instant,
    visible: AtomicBool,
}

impl Bar {
    /// A bar for the operation `what`.
    fn new(what: &'static str, template: &str) -> Self {
        // The bar is hidden at first; indicatif keeps it hidden if stderr is not a terminal.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, begun: Instant::now(), visible: AtomicBool::new(false) }
    }

    /// Sets the progress.
    fn update(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !self.visible.load(Ordering::Relaxed) && self.begun.elapsed() >= BAR_AFTER {
            self.visible.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Removes the bar.
    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Name and bar template for a request's progress.
fn template(request: &Request) -> Option<(&'static str, &'static str)> {
    Some(match request {
        Request::Check { .. } => ("checking", THINGS),
        Request::Scrub(ScrubRequest::Start { .. }) => ("scrubbing", BYTES),
        Request::StatusSpace | Request::Disk(DiskRequest::Space { .. }) => ("counting", THINGS),
        Request::Disk(DiskRequest::Create { .. }) => ("zeroing", BYTES),
        Request::Disk(DiskRequest::Detach { .. }) => ("detaching", BYTES),
        Request::Disk(DiskRequest::Migrate { .. }) => ("moving", BYTES),
        Request::Disk(DiskRequest::Import { .. }) => ("copying", BYTES),
        Request::Disk(DiskRequest::Inflate { .. }) => ("inflating", BYTES),
        Request::Disk(DiskRequest::PunchZero { .. }) => ("looking for zeros", BYTES),
        Request::Disk(DiskRequest::Wipe { .. }) => ("wiping", BYTES),
        Request::Disk(DiskRequest::Reclaim { .. }) => ("reclaiming", BYTES),
        Request::Disk(DiskRequest::Reclaimable) => ("reading", BYTES),
        Request::Disk(DiskRequest::Shrink { .. }) => ("shrinking", BYTES),
        Request::Disk(DiskRequest::Optimize { .. }) => ("optimizing", BYTES),
        Request::Disk(DiskRequest::Consolidate { .. }) => ("merging", BYTES),
        Request::Snapshot(SnapshotRequest::Delete { .. }) => ("merging", BYTES),
        Request::ExportArchive(_) => ("exporting", BYTES),
        Request::Convert(_) => ("converting", BYTES),
        Request::Salvage(_) => ("reading", BYTES),
        Request::Send(_) => ("sending", BYTES),
        Request::Backup(request) => match request {
            BackupRequest::Create(_) | BackupRequest::CreateMachine(_) => ("backing up", BYTES),
            BackupRequest::Verify { .. } => ("verifying", BYTES),
            BackupRequest::Restore(_) => ("restoring", BYTES),
            BackupRequest::Key { .. }
            | BackupRequest::PrepareMachine { .. }
            | BackupRequest::List { .. }
            | BackupRequest::Delete { .. }
            | BackupRequest::Prune { .. } => return None,
        },
        Request::Image(ImageRequest::Check { .. }) => ("checking", THINGS),
        Request::Image(ImageRequest::Create { .. }) => ("zeroing", BYTES),
        Request::Clone { full: true, .. } => ("copying", BYTES),
        Request::Clone { full: false, .. } => ("cloning", THINGS),
        Request::Machine(request) => match &request.verb {
            MachineVerb::Clone { options, .. } if options.kind == CloneKind::Full => ("cloning", BYTES),
            MachineVerb::Clone { .. } => ("cloning", THINGS),
            MachineVerb::Send { .. } => ("sending", BYTES),
            MachineVerb::Export { .. } => ("exporting", BYTES),
            MachineVerb::BackUp(_) => ("backing up", BYTES),
            MachineVerb::Restore(_) => ("restoring", BYTES),
            MachineVerb::Import(_) => ("importing", BYTES),
            _ => return None,
        },
        Request::Job(JobRequest::Wait { .. }) => ("waiting", PART),
        _ => return None,
    })
}

/// Prints partial replies.
pub enum Parts {
    /// The reply has no parts.
    None,
    /// Extents of a diff.
    Extents(Extents),
    /// Events.
    Events(Form),
}

/// Progress of one request of the command line.
pub struct Follow {
    /// The progress bar; `None` for requests without progress.
    bar: Option<Bar>,
    interrupted: Arc<AtomicBool>,
    parts: Mutex<Parts>,
    unread: AtomicBool,
}

impl Follow {
    /// Progress of `request`; `parts` prints partial replies.
    pub fn new(request: &Request, interrupted: Arc<AtomicBool>, parts: Parts) -> Self {
        Self {
            bar: template(request).map(|(what, template)| Bar::new(what, template)),
            interrupted,
            parts: Mutex::new(parts),
            unread: AtomicBool::new(false),
        }
    }

    /// True if the reader of the output has closed it (`| head`).
    pub fn unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Removes the bar and returns the printer of partial replies.
    pub fn finish(self) -> Parts {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
        self.parts.into_inner()
    }
}

impl Progress for Follow {
    fn update(&self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.update(done, total);
        }
    }

    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}

impl Watch for Follow {
    fn part(&self, part: Part) -> Result<()> {
        let printed = match (&mut *self.parts.lock(), part) {
            (Parts::Extents(extents), Part::Extents(batch)) => extents.print(&batch),
            (Parts::Events(form), Part::Event(event)) => output::print_event(&mut io::stdout(), *form, &event),
            _ => Ok(()),
        };
        printed.map_err(|e| {
            self.unread.fetch_or(e.kind() == io::ErrorKind::BrokenPipe, Ordering::Relaxed);
            Error::io("writing the output", e)
        })
    }
}
