//! The lock of a repository in a bucket: an object that exists while a writer changes the repository.
//!
//! 1. The object is made by a put that succeeds only if there is none (`If-None-Match: *`), and replaced by puts that
//!    succeed only if it has not changed (`If-Match`). The serial number in it differs at each put, so that its ETag
//!    does too. A server that ignores these conditions is detected, and refused.
//! 2. The holder renews the object. It may change the repository only for [`Timing::valid`] after it has sent the last
//!    renewal that succeeded.
//! 3. Another writer takes the lock over if its holder has certainly ended, which is known on the same host, or if the
//!    object was not renewed for [`Timing::expires`]: both times are read from the server's clock.
//! 4. The holder removes the object only while it may change the repository.

use super::client::{Answer, Asked, Client, Method, Timing};
use backend::process::{self, ProcessIdentity};
use backend::{Lock, clock};
use disk::sealed::Kind;
use disk::transfer::new_identity;
use error::{Error, ErrorKind, Result};
use jiff::fmt::rfc2822::DateTimeParser;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The name of the object.
pub(super) const LOCK: &str = "lock";
const KIND: Kind = Kind { word: "backup lock", version: 1, length_max: 4096 };
/// How often taking is tried while other writers take and release the lock at the same time.
const TRIES: u32 = 5;

/// The content of the lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockRecord {
    /// Identity of the lock, a UUID.
    pub id: String,
    /// Number of renewals.
    pub serial: u64,
    /// The host of the holder, for messages.
    pub host: String,
    /// Identity of the boot of the host.
    pub boot: String,
    /// The namespace of process numbers on the host.
    pub namespace: String,
    /// The number of the process.
    pub process: u32,
    /// When the process started, in ticks since the boot.
    pub started: u64,
    /// When the lock was taken, in seconds since 1970, for messages.
    pub taken: u64,
}

impl LockRecord {
    /// A lock of this process.
    fn new() -> Result<Self> {
        let failed = |error| Error::io("identifying this process for the lock of the repository", error);
        let own = ProcessIdentity::own().map_err(failed)?;
        Ok(Self {
            id: new_identity()?,
            serial: 0,
            host: process::host_name().map_err(failed)?,
            boot: own.boot,
            namespace: own.namespace,
            process: own.number,
            started: own.started,
            taken: clock::seconds(),
        })
    }

    /// The encoded record.
    pub fn encode(&self) -> Result<Vec<u8>> {
        KIND.encode(self)
    }

    /// Decodes a record. Any input gives a record or an error.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        KIND.decode(bytes)
    }

    fn holder_has_ended(&self) -> bool {
        let (boot, namespace) = (self.boot.clone(), self.namespace.clone());
        ProcessIdentity { boot, namespace, number: self.process, started: self.started }.has_ended()
    }
}

/// What is known of the object.
struct Version {
    record: LockRecord,
    etag: String,
    /// When the put that made the version was sent.
    sent: Sent,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Taken,
    /// Another writer may have the lock.
    Lost,
    /// The holder does not need the lock any more.
    Released,
}

/// A time by the clock that stops while the host sleeps, and by the one that does not.
#[derive(Clone, Copy)]
struct Sent(Instant, u64);

impl Sent {
    fn now() -> Self {
        Self(Instant::now(), clock::seconds())
    }

    fn elapsed(self) -> Duration {
        self.0.elapsed().max(Duration::from_secs(clock::seconds().saturating_sub(self.1)))
    }
}

/// A lock that this process holds.
pub(super) struct Lease {
    client: Arc<Client>,
    key: String,
    version: Mutex<Version>,
    stop: Condvar,
}

/// Releases the lock when it is dropped.
pub(super) struct Held(Arc<Lease>);

impl Held {
    pub fn lease(&self) -> &Arc<Lease> {
        &self.0
    }
}

fn lost(place: &str) -> String {
    format!("the lock of the repository '{place}' was lost, because it could not be renewed: repeat the command")
}

impl Lease {
    /// Succeeds while the lock is certainly held.
    fn held(&self) -> Result<()> {
        let version = self.version.lock();
        match version.state == State::Taken && version.sent.elapsed() < self.client.timing.valid {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Busy, lost(&self.client.place))),
        }
    }

    /// Succeeds unless the lock is needed and may be lost.
    pub fn may_change(&self) -> Result<()> {
        let released = self.version.lock().state == State::Released;
        if released { Ok(()) } else { self.held() }
    }

    /// Renews the lock until it is released or lost.
    fn renew(&self) {
        let Timing { renew, .. } = self.client.timing;
        loop {
            let (record, etag) = {
                let mut version = self.version.lock();
                let until = Instant::now() + renew;
                while version.state == State::Taken && !self.stop.wait_until(&mut version, until).timed_out() {}
                if version.state != State::Taken {
                    return;
                }
                (LockRecord { serial: version.record.serial + 1, ..version.record.clone() }, version.etag.clone())
            };
            let sent = Sent::now();
            let put = put(&self.client, &self.key, &record, &Condition::Is(&etag));
            let mut version = self.version.lock();
            match put {
                _ if version.state != State::Taken => return,
                Ok(Some(etag)) => *version = Version { record, etag, sent, state: State::Taken },
                Ok(None) => {
                    version.state = State::Lost;
                    tracing::warn!("{}", lost(&self.client.place));
                    return;
                }
                // The lock stays valid for a time, in which the next renewal may succeed.
                Err(error) => tracing::warn!("the lock is not renewed: {error}"),
            }
        }
    }
}

impl Lock for Held {
    fn loss(&self) -> io::Result<Option<String>> {
        Ok(self.0.held().err().map(|error| error.to_string()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let lease = &self.0;
        let removable = lease.held().is_ok();
        lease.version.lock().state = State::Released;
        lease.stop.notify_all();
        // A renewal that is being sent fails after the removal, because the object does not exist any more.
        if !removable {
            return;
        }
        let doing = format!("releasing the lock of '{}'", lease.client.place);
        let asked = Asked::new(Method::Delete, &lease.key);
        match lease.client.send(&asked, &doing) {
            Ok(answer) if answer.succeeded() || answer.status == 404 => {}
            Ok(answer) => tracing::warn!("{}", lease.client.refusal(&answer, &doing)),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// When a put succeeds.
enum Condition<'a> {
    /// If there is no object.
    Missing,
    /// If the object has this ETag.
    Is(&'a str),
}

/// Puts the lock: its ETag, or `None` if the condition does not hold.
fn put(client: &Client, key: &str, record: &LockRecord, condition: &Condition<'_>) -> Result<Option<String>> {
    let doing = format!("locking the repository '{}'", client.place);
    let header = match condition {
        Condition::Missing => ("if-none-match", "*".to_owned()),
        Condition::Is(etag) => ("if-match", (*etag).to_owned()),
    };
    let body = record.encode()?;
    let answer = client.send(&Asked { headers: vec![header], body: &body, ..Asked::new(Method::Put, key) }, &doing)?;
    let absent = matches!(condition, Condition::Is(_)) && answer.status == 404 && answer.code() != "NoSuchBucket";
    match answer.status {
        412 | 409 => {}
        _ if absent => {}
        501 => return Err(unsupported(client)),
        _ if answer.succeeded() => return etag_of(client, &answer).map(Some),
        _ => return Err(client.refusal(&answer, &doing)),
    }
    // An attempt whose answer was lost may have put the lock.
    match look(client, key)? {
        Some(found) if found.record.as_ref() == Some(record) => Ok(Some(found.etag)),
        _ => Ok(None),
    }
}

fn etag_of(client: &Client, answer: &Answer) -> Result<String> {
    answer.header("etag").map(str::to_owned).ok_or_else(|| unsupported(client))
}

fn unsupported(client: &Client) -> Error {
    let text = format!(
        "the server of '{}' does not support conditional writes (If-None-Match and If-Match), without which writers \
         cannot exclude each other",
        client.place
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// A lock that was found.
struct FoundLock {
    record: Option<LockRecord>,
    etag: String,
    /// Time since its last renewal.
    age: Option<Duration>,
}

fn look(client: &Client, key: &str) -> Result<Option<FoundLock>> {
    let doing = format!("reading the lock of '{}'", client.place);
    let answer = client.send(&Asked { answer_max: KIND.length_max, ..Asked::new(Method::Get, key) }, &doing)?;
    match answer.status {
        404 if answer.code() != "NoSuchBucket" => return Ok(None),
        _ if !answer.succeeded() => return Err(client.refusal(&answer, &doing)),
        _ => {}
    }
    let time = |name: &str| {
        let text = answer.header(name)?;
        DateTimeParser::new().parse_timestamp(text).ok().map(|time| time.as_second())
    };
    let age = time("date").zip(time("last-modified")).map(|(now, renewed)| now.saturating_sub(renewed));
    Ok(Some(FoundLock {
        record: LockRecord::decode(&answer.body).ok(),
        etag: etag_of(client, &answer)?,
        age: age.and_then(|age| u64::try_from(age).ok()).map(Duration::from_secs),
    }))
}

impl FoundLock {
    fn may_be_taken(&self, timing: &Timing) -> bool {
        self.age.is_some_and(|age| age >= timing.expires)
            || self.record.as_ref().is_some_and(LockRecord::holder_has_ended)
    }

    fn busy(&self, client: &Client) -> Error {
        let holder = match &self.record {
            Some(record) => format!(" (process {} on {})", record.process, record.host.escape_debug()),
            None => String::new(),
        };
        let mut text =
            format!("another command changes the repository '{}'{holder}: wait until that command ends", client.place);
        if let Some(age) = self.age {
            let left = client.timing.expires.saturating_sub(age).as_secs();
            text += &format!("; if it was killed or its host has failed, its lock expires in {left} s");
        }
        Error::new(ErrorKind::Busy, text)
    }
}

/// Takes the lock: `Busy` while another writer has it.
pub(super) fn take(client: &Arc<Client>, key: &str) -> Result<Held> {
    let record = LockRecord::new()?;
    let mut found = None;
    for _ in 0..TRIES {
        let sent = Sent::now();
        let etag = match &found {
            None => put(client, key, &record, &Condition::Missing)?,
            Some(FoundLock { etag, .. }) => put(client, key, &record, &Condition::Is(etag))?,
        };
        if let Some(etag) = etag {
            let version = Mutex::new(Version { record, etag, sent, state: State::Taken });
            let lease = Arc::new(Lease { client: client.clone(), key: key.to_owned(), version, stop: Condvar::new() });
            let held = Held(lease);
            verify_conditions(&held.0)?;
            let renewing = held.0.clone();
            let thread = std::thread::Builder::new().name("backup-lock".into());
            thread.spawn(move || renewing.renew()).map_err(|error| Error::io("starting a thread for a lock", error))?;
            return Ok(held);
        }
        found = look(client, key)?;
        if let Some(other) = found.as_ref().filter(|other| !other.may_be_taken(&client.timing)) {
            return Err(other.busy(client));
        }
    }
    let text = format!("other commands change the repository '{}': wait until they end", client.place);
    Err(Error::new(ErrorKind::Busy, text))
}

/// Finds a server that ignores conditions: puts whose conditions do not hold must fail.
fn verify_conditions(lease: &Lease) -> Result<()> {
    let record = {
        let version = lease.version.lock();
        LockRecord { serial: u64::MAX, ..version.record.clone() }
    };
    for condition in [Condition::Missing, Condition::Is("\"00000000000000000000000000000000\"")] {
        if put(&lease.client, &lease.key, &record, &condition)?.is_some() {
            return Err(unsupported(&lease.client));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record() -> LockRecord {
        LockRecord {
            id: "0f0e0d0c-0b0a-4908-8706-050403020106".into(),
            serial: 2,
            host: "host1".into(),
            boot: "0f0e0d0c-0b0a-4908-8706-050403020107".into(),
            namespace: "pid:[4026531836]".into(),
            process: 4711,
            started: 123_456,
            taken: 1_794_900_000,
        }
    }

    #[test]
    fn the_format_page_shows_the_encoded_record() {
        let page = include_str!("../../../../docs/format/backup.md");
        let example = String::from_utf8(record().encode().unwrap()).unwrap();
        assert!(page.contains(&example), "docs/format/backup.md should show:\n{example}");
        assert_eq!(LockRecord::decode(example.as_bytes()).unwrap(), record());
    }

    #[test]
    fn a_change_sent_while_the_lock_is_valid_ends_before_the_lock_expires() {
        let Timing { renew, valid, request, expires, .. } = Timing::USUAL;
        assert!(valid + request < expires && renew * 3 <= valid);
    }
}
