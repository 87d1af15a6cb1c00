//! What happens to writes that need space while there is none: they fail at once, or they wait.
//!
//! The policy is a setting of the disk ([`crate::settings`]). Sessions carry it out: they keep the refused writes and
//! try them again. [`SpaceWait`] is shared by all clients of a disk and by the datastore, which shows the waiting
//! writes and publishes when they begin and cease to wait.
//!
//! 1. A waiting write is not acknowledged, and is counted exactly once: from [`SpaceWait::begin`] to
//!    [`SpaceWait::end`].
//! 2. A change of the policy applies to writes that wait already.
//! 3. The receiver of notices is called without a lock that a request needs.

use crate::info::WaitingWrites;
use backend::clock;
use error::text::{TIME_UNITS, parse_time, time};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest limited wait: a year.
const LIMIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The stored forms of policies other than a limited wait, whose form is its time in seconds.
const ERROR: u64 = 0;
const UNLIMITED: u64 = u64::MAX;

/// The units of a limited wait: seconds, minutes, hours and days.
const UNITS: &[(&str, u64)] = TIME_UNITS.split_at(4).0;

/// What happens to writes that need space while there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OnFull {
    /// The writes fail at once.
    #[default]
    Error,
    /// The writes wait until there is space, at most for this time, and then fail; `None` for no limit.
    Wait(Option<Duration>),
}

impl OnFull {
    fn to_number(self) -> u64 {
        match self {
            Self::Error => ERROR,
            Self::Wait(None) => UNLIMITED,
            Self::Wait(Some(limit)) => limit.as_secs(),
        }
    }

    fn from_number(number: u64) -> Self {
        match number {
            ERROR => Self::Error,
            UNLIMITED => Self::Wait(None),
            seconds => Self::Wait(Some(Duration::from_secs(seconds))),
        }
    }
}

impl fmt::Display for OnFull {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error => out.write_str("error"),
            Self::Wait(None) => out.write_str("wait"),
            Self::Wait(Some(limit)) => write!(out, "wait={}", time(limit.as_secs(), UNITS)),
        }
    }
}

impl FromStr for OnFull {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "error" => return Ok(Self::Error),
            "wait" => return Ok(Self::Wait(None)),
            _ => {}
        }
        let seconds = text.strip_prefix("wait=").and_then(|limit| {
            // Without a unit, the number is in seconds.
            parse_time(limit, UNITS).or_else(|| parse_time(limit, &[("", 1)]))
        });
        match seconds {
            Some(seconds) if (1..=LIMIT_MAX.as_secs()).contains(&seconds) => {
                Ok(Self::Wait(Some(Duration::from_secs(seconds))))
            }
            Some(_) => Err(Error::new(ErrorKind::Invalid, format!("'{text}': writes wait from 1s to 365d"))),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "'{}' is no policy for a full disk: error, wait, or wait=TIME such as wait=10m",
                    text.escape_debug()
                ),
            )),
        }
    }
}

impl TryFrom<String> for OnFull {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<OnFull> for String {
    fn from(policy: OnFull) -> Self {
        policy.to_string()
    }
}

/// How the wait of a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The write succeeded.
    Written,
    /// The write failed: its time was over, or the policy was changed, or another error occurred.
    Refused,
    /// The connection ended, so the write was not answered.
    Dropped,
}

/// A notice about the writes of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitNotice {
    /// The first write of a disk waits for space.
    Begins {
        /// The name of the disk.
        disk: String,
        /// The error of the write.
        reason: String,
    },
    /// No write of a disk waits any more.
    Ends {
        /// The name of the disk.
        disk: String,
        /// Number of writes that were carried out.
        written: u64,
        /// Number of writes that failed.
        refused: u64,
        /// Number of writes that were not answered, because their connections ended.
        dropped: u64,
        /// Time since the first of them began to wait, in seconds.
        seconds: u64,
    },
}

/// The receiver of notices, which is set once.
#[derive(Default)]
pub(crate) struct Notices(OnceLock<Box<dyn Fn(WaitNotice) + Send + Sync>>);

impl Notices {
    /// Sets the receiver. Only the first call has an effect.
    pub fn set(&self, receiver: impl Fn(WaitNotice) + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(receiver));
    }

    fn send(&self, notice: WaitNotice) {
        if let Some(receiver) = self.0.get() {
            receiver(notice);
        }
    }
}

/// The policy of a disk that clients have open, and its waiting writes.
pub struct SpaceWait {
    disk: Mutex<String>,
    policy: AtomicU64,
    waiting: Mutex<Option<Waiting>>,
    notices: Arc<Notices>,
}

/// The writes that wait for space, counted from the time at which the first of them began to wait.
struct Waiting {
    writes: u64,
    bytes: u64,
    since: u64,
    began: Instant,
    reason: String,
    written: u64,
    refused: u64,
    dropped: u64,
}

impl SpaceWait {
    /// The policy of a device that belongs to no datastore. Its notices have no receiver.
    pub fn alone(disk: &str, policy: OnFull) -> Arc<Self> {
        Self::new(disk, policy, Arc::default())
    }

    pub(crate) fn new(disk: &str, policy: OnFull, notices: Arc<Notices>) -> Arc<Self> {
        let policy = AtomicU64::new(policy.to_number());
        Arc::new(Self { disk: Mutex::new(disk.to_owned()), policy, waiting: Mutex::new(None), notices })
    }

    /// The policy of the disk.
    pub fn policy(&self) -> OnFull {
        OnFull::from_number(self.policy.load(Ordering::Relaxed))
    }

    pub(crate) fn set_policy(&self, policy: OnFull) {
        self.policy.store(policy.to_number(), Ordering::Relaxed);
    }

    /// Records the new name of the disk.
    pub(crate) fn rename(&self, disk: &str) {
        disk.clone_into(&mut self.disk.lock());
    }

    /// The waiting writes, if there are any.
    pub fn waiting(&self) -> Option<WaitingWrites> {
        let disk = self.disk.lock().clone();
        let waiting = self.waiting.lock();
        waiting.as_ref().map(|waiting| WaitingWrites {
            disk,
            writes: waiting.writes,
            bytes: waiting.bytes,
            since: waiting.since,
            reason: waiting.reason.clone(),
        })
    }

    /// A write of `bytes` bytes begins to wait, because it failed with `error`.
    pub fn begin(&self, bytes: u64, error: &Error) {
        let mut waiting = self.waiting.lock();
        if let Some(waiting) = &mut *waiting {
            waiting.writes += 1;
            waiting.bytes += bytes;
            return;
        }
        let reason = error.to_string();
        *waiting = Some(Waiting {
            writes: 1,
            bytes,
            since: clock::seconds(),
            began: Instant::now(),
            reason: reason.clone(),
            written: 0,
            refused: 0,
            dropped: 0,
        });
        drop(waiting);
        let disk = self.disk.lock().clone();
        tracing::warn!(disk, reason, policy = %self.policy(), "writes wait for space");
        self.notices.send(WaitNotice::Begins { disk, reason });
    }

    /// The wait of a write of `bytes` bytes has ended.
    pub fn end(&self, bytes: u64, how: WaitEnd) {
        let mut all = self.waiting.lock();
        let Some(waiting) = &mut *all else { return };
        waiting.writes = waiting.writes.saturating_sub(1);
        waiting.bytes = waiting.bytes.saturating_sub(bytes);
        match how {
            WaitEnd::Written => waiting.written += 1,
            WaitEnd::Refused => waiting.refused += 1,
            WaitEnd::Dropped => waiting.dropped += 1,
        }
        if waiting.writes > 0 {
            return;
        }
        let Some(Waiting { began, written, refused, dropped, .. }) = all.take() else { return };
        drop(all);
        let (disk, seconds) = (self.disk.lock().clone(), began.elapsed().as_secs());
        tracing::info!(disk, written, refused, dropped, seconds, "no write waits for space any more");
        self.notices.send(WaitNotice::Ends { disk, written, refused, dropped, seconds });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_policy_has_one_text_and_is_read_in_all_usual_forms() {
        for (text, seconds, shown) in [
            ("wait=1", 1, "wait=1s"),
            ("wait=90s", 90, "wait=90s"),
            ("wait=120", 120, "wait=2m"),
            ("wait=10m", 600, "wait=10m"),
            ("wait=36h", 129_600, "wait=36h"),
            ("wait=365d", 31_536_000, "wait=365d"),
        ] {
            let policy: OnFull = text.parse().unwrap();
            assert_eq!(policy, OnFull::Wait(Some(Duration::from_secs(seconds))), "{text}");
            assert_eq!(policy.to_string(), shown);
            assert_eq!(policy.to_string().parse::<OnFull>().unwrap(), policy);
            assert_eq!(OnFull::from_number(policy.to_number()), policy);
        }
        for policy in [OnFull::Error, OnFull::Wait(None)] {
            assert_eq!(policy.to_string().parse::<OnFull>().unwrap(), policy);
            assert_eq!(OnFull::from_number(policy.to_number()), policy);
        }
        for text in
            ["", "Error", "wait=", "wait=0", "wait=m", "wait=-1s", "wait=+1s", "wait=1.5h", "wait=366d", "wait=9y"]
        {
            assert_eq!(text.parse::<OnFull>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
        }
        let huge = format!("wait={}d", u64::MAX);
        assert_eq!(huge.parse::<OnFull>().unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn the_first_and_the_last_waiting_write_are_noticed() {
        let (notices, told) = (Arc::new(Notices::default()), Arc::new(Mutex::new(Vec::new())));
        let receiver = Arc::clone(&told);
        notices.set(move |notice| receiver.lock().push(notice));
        let space = SpaceWait::new("web", OnFull::Wait(None), notices);
        assert_eq!(space.waiting(), None);
        let full = Error::new(ErrorKind::NoSpace, "full");
        space.begin(4096, &full);
        space.rename("www");
        space.begin(512, &Error::new(ErrorKind::NoSpace, "still full"));
        let waiting = space.waiting().unwrap();
        assert_eq!((waiting.disk.as_str(), waiting.writes, waiting.bytes), ("www", 2, 4608));
        assert_eq!(waiting.reason, "full");
        space.end(4096, WaitEnd::Written);
        assert_eq!(space.waiting().unwrap().writes, 1);
        space.end(512, WaitEnd::Dropped);
        assert_eq!(space.waiting(), None);
        // Without a waiting write there is nothing to end.
        space.end(512, WaitEnd::Dropped);
        let told = told.lock();
        assert_eq!(told[0], WaitNotice::Begins { disk: "web".into(), reason: "full".into() });
        let WaitNotice::Ends { disk, written, refused, dropped, .. } = &told[1] else { panic!("{:?}", told[1]) };
        assert_eq!((disk.as_str(), *written, *refused, *dropped), ("www", 1, 0, 1));
        assert_eq!(told.len(), 2);
    }
}
