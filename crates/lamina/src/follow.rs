//! Following long work from a terminal: a bar on stderr, Ctrl-C, and the extents of a diff as they come.

use crate::control::{DiskRequest, ImageRequest, Request, SnapshotRequest, Watch};
use crate::output::Extents;
use disk::{ChangedExtent, Error, Progress, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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

/// What the numbers of a progress count.
fn template(request: &Request) -> Option<(&'static str, &'static str)> {
    const BYTES: &str = "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    const THINGS: &str = "{msg} [{bar:30}] {human_pos} of {human_len}, {eta} left";
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
        Request::Send(_) => ("sending", BYTES),
        Request::Image(ImageRequest::Check { .. }) => ("checking", THINGS),
        Request::Image(ImageRequest::Create { .. }) => ("zeroing", BYTES),
        Request::Clone { full: true, .. } => ("copying", BYTES),
        Request::Clone { full: false, .. } => ("cloning", THINGS),
        _ => return None,
    })
}

/// Follows one request of the command line.
pub struct Follow {
    bar: ProgressBar,
    begun: std::time::Instant,
    visible: AtomicBool,
    interrupted: Arc<AtomicBool>,
    extents: Mutex<Option<Extents>>,
    unread: AtomicBool,
}

impl Follow {
    /// Follows `request`; `extents` takes what a diff finds.
    pub fn new(request: &Request, interrupted: Arc<AtomicBool>, extents: Option<Extents>) -> Self {
        // Hidden until it is worth showing; indicatif itself keeps it hidden where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let template = template(request);
        if let Some((what, template)) = template {
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_message(what);
        }
        Self {
            bar,
            begun: std::time::Instant::now(),
            visible: AtomicBool::new(template.is_none()),
            interrupted,
            extents: Mutex::new(extents),
            unread: AtomicBool::new(false),
        }
    }

    /// True when the reader of the output has seen enough (`| head`).
    pub fn unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Takes the bar away and gives back what prints extents.
    pub fn finish(self) -> Option<Extents> {
        self.bar.finish_and_clear();
        self.extents.into_inner()
    }
}

impl Progress for Follow {
    fn update(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !self.visible.load(Ordering::Relaxed) && self.begun.elapsed() >= BAR_AFTER {
            self.visible.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}

impl Watch for Follow {
    fn extents(&self, batch: Vec<ChangedExtent>) -> Result<()> {
        match self.extents.lock().as_mut() {
            Some(extents) => extents.print(&batch).map_err(|e| {
                self.unread.fetch_or(e.kind() == io::ErrorKind::BrokenPipe, Ordering::Relaxed);
                Error::io("writing the output", e)
            }),
            None => Ok(()),
        }
    }
}
