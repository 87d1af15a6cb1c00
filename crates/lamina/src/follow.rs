//! Following long work from a terminal: a bar on stderr, Ctrl-C, and answers that come in parts, printed as they come.

use crate::output::{self, Extents, Form};
use control::{DiskRequest, ImageRequest, JobRequest, MachineVerb, Part, Request, SnapshotRequest, Watch};
use disk::Progress;
use error::{Error, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vm::definition::CloneKind;

/// How long work has to last before a bar shows; most verbs are done by then.
const BAR_AFTER: Duration = Duration::from_millis(300);

/// Sets a flag on the first SIGINT or SIGTERM and ends the process at the second.
pub fn interruption(code: u8) -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag unset and sets it.
        flag::register_conditional_shutdown(signal, i32::from(code), Arc::clone(&interrupted))
            .and_then(|_| flag::register(signal, Arc::clone(&interrupted)))
            .map_err(|e| Error::io("registering for signals", e))?;
    }
    Ok(interrupted)
}

/// What is counted.
const BYTES: &str = "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
/// The same.
const THINGS: &str = "{msg} [{bar:30}] {human_pos} of {human_len}, {eta} left";

/// Where that is not known.
const PART: &str = "{msg} [{bar:30}] {percent}%, {eta} left";

/// A bar on stderr that shows once the work has lasted; where stderr is no terminal it never does.
struct Bar {
    bar: ProgressBar,
    begun: Instant,
    visible: AtomicBool,
}

impl Bar {
    /// For work that is called `what`.
    fn new(what: &'static str, template: &str) -> Self {
        // Hidden until it is worth showing; indicatif itself keeps it hidden where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, begun: Instant::now(), visible: AtomicBool::new(false) }
    }

    /// So much of all is done.
    fn update(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !self.visible.load(Ordering::Relaxed) && self.begun.elapsed() >= BAR_AFTER {
            self.visible.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Takes it away.
    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// What a request's progress is called, and what its numbers count.
fn template(request: &Request) -> Option<(&'static str, &'static str)> {
    Some(match request {
        Request::Check { .. } => ("checking", THINGS),
        Request::Disk(DiskRequest::Create { .. }) => ("zeroing", BYTES),
        Request::Disk(DiskRequest::Detach { .. }) => ("detaching", BYTES),
        Request::Disk(DiskRequest::Migrate { .. }) => ("moving", BYTES),
        Request::Disk(DiskRequest::Import { .. }) => ("copying", BYTES),
        Request::Disk(DiskRequest::Inflate { .. }) => ("inflating", BYTES),
        Request::Disk(DiskRequest::PunchZero { .. }) => ("looking for zeros", BYTES),
        Request::Disk(DiskRequest::Wipe { .. }) => ("wiping", BYTES),
        Request::Disk(DiskRequest::Shrink { .. }) => ("shrinking", BYTES),
        Request::Disk(DiskRequest::Consolidate { .. }) => ("merging", BYTES),
        Request::Snapshot(SnapshotRequest::Delete { .. }) => ("merging", BYTES),
        Request::Convert(_) => ("converting", BYTES),
        Request::Salvage(_) => ("reading", BYTES),
        Request::Send(_) => ("sending", BYTES),
        Request::Image(ImageRequest::Check { .. }) => ("checking", THINGS),
        Request::Image(ImageRequest::Create { .. }) => ("zeroing", BYTES),
        Request::Clone { full: true, .. } => ("copying", BYTES),
        Request::Clone { full: false, .. } => ("cloning", THINGS),
        Request::Machine(request) => match &request.verb {
            MachineVerb::Clone { options, .. } if options.kind == CloneKind::Full => ("cloning", BYTES),
            MachineVerb::Clone { .. } => ("cloning", THINGS),
            MachineVerb::Send { .. } => ("sending", BYTES),
            _ => return None,
        },
        Request::Job(JobRequest::Wait { .. }) => ("waiting", PART),
        _ => return None,
    })
}

/// Prints the parts of an answer.
pub enum Parts {
    /// The answer comes in one.
    None,
    /// Of a diff.
    Extents(Extents),
    /// Changes, on standard output.
    Events(Form),
}

/// Follows one request of the command line.
pub struct Follow {
    /// `None` for what takes no time.
    bar: Option<Bar>,
    interrupted: Arc<AtomicBool>,
    parts: Mutex<Parts>,
    unread: AtomicBool,
}

impl Follow {
    /// Follows `request`; `parts` prints what comes in parts.
    pub fn new(request: &Request, interrupted: Arc<AtomicBool>, parts: Parts) -> Self {
        Self {
            bar: template(request).map(|(what, template)| Bar::new(what, template)),
            interrupted,
            parts: Mutex::new(parts),
            unread: AtomicBool::new(false),
        }
    }

    /// True when the reader of the output has seen enough (`| head`).
    pub fn unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Takes the bar away and gives back what prints parts.
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
