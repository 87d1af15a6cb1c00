//! The lock of a repository in a bucket: an object that says which writer changes the repository.
//!
//! 1. The object is made by a put that succeeds only if there is none (`If-None-Match: *`), and replaced by puts that
//!    succeed only if it has not changed (`If-Match`). The serial number in it differs at each put, so that its ETag
//!    does too. A server that ignores these conditions is detected, and refused.
//! 2. The holder renews the object. It may change the repository only for [`Timing::valid`] after it has sent the last
//!    renewal that succeeded.
//! 3. Another writer takes the lock over if its holder has released it, or has certainly ended, which is known on the
//!    same host, or if the object was not renewed for [`Timing::expires`]: both times are read from the server's clock.
//! 4. The object is never removed, because a removal has no condition: one that arrives late, or is repeated after its
//!    answer was lost, would remove the lock of the next writer. The holder releases the lock by a put on the condition
//!    that the object has not changed.

use super::client::{Answer, Asked, Client, Method, Timing};
use backend::process::{self, ProcessIdentity};
use backend::{Lock, clock};
use disk::sealed::Kind;
use disk::transfer::new_identity;
use error::{Error, ErrorKind, Result};
use jiff::fmt::rfc2822::DateTimeParser;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The name of the object.
pub(super) const LOCK: &str = "lock";
const KIND: Kind = Kind { word: "backup lock", version: 1, length_max: 4096 };
/// How often taking is tried while other writers take and release the lock at the same time, and releasing while
/// renewals are under way.
const TRIES: u32 = 5;

/// Identities of locks that this process has had and may not have released, because the server did not answer. No part
/// of the process needs them, so another lock of the process replaces them.
static LEFT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The content of the lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockRecord {
    /// Identity of the lock, a UUID.
    pub id: String,
    /// Number of renewals.
    pub serial: u64,
    /// Whether the holder has released the lock.
    pub released: bool,
    /// The host of the holder, for messages.
    pub host: String,
    /// Identity of the boot of the host.
    pub boot: String,
    /// The namespaces of process numbers and of times on the host.
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
        let own = ProcessIdentity::own();
        Ok(Self {
            id: new_identity()?,
            serial: 0,
            released: false,
            host: process::host_name(),
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

    /// Whether the holder certainly does not need the lock any more.
    fn is_free(&self) -> bool {
        self.released || LEFT.lock().contains(&self.id) || self.holder_has_ended()
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
    /// When the put that made the version was sent first.
    sent: Sent,
    state: State,
    /// Whether a renewal is under way.
    renewing: bool,
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
        let mut delay = renew;
        // When the put of the next version was sent first. If its answer was lost, the version may be as old as that.
        let mut begun = None;
        loop {
            let (record, etag) = {
                let mut version = self.version.lock();
                let until = Instant::now() + delay;
                while version.state == State::Taken && !self.stop.wait_until(&mut version, until).timed_out() {}
                if version.state != State::Taken {
                    return;
                }
                version.renewing = true;
                (LockRecord { serial: version.record.serial + 1, ..version.record.clone() }, version.etag.clone())
            };
            let is_repeated = begun.is_some();
            let sent = *begun.get_or_insert_with(Sent::now);
            let put = put(&self.client, &self.key, &record, &Condition::Is(&etag), &Sending::Needed(self));
            let mut version = self.version.lock();
            version.renewing = false;
            self.stop.notify_all();
            match put {
                Ok(Some(etag)) => {
                    *version = Version { record, etag, sent, state: version.state, renewing: false };
                    begun = None;
                    delay = if is_repeated { Duration::ZERO } else { renew };
                }
                _ if version.state != State::Taken => return,
                Ok(None) => {
                    version.state = State::Lost;
                    tracing::warn!("{}", lost(&self.client.place));
                    return;
                }
                // The lock stays valid for a time, in which the next renewal may succeed.
                Err(error) => {
                    tracing::warn!("the lock is not renewed: {error}");
                    delay = renew;
                }
            }
        }
    }

    /// Ends the use of the lock, and says so in the object.
    fn release(&self) -> Result<()> {
        let (mut record, mut etag) = {
            let mut version = self.version.lock();
            let is_lost = version.state == State::Lost;
            version.state = State::Released;
            self.stop.notify_all();
            if is_lost {
                return Ok(());
            }
            let until = Instant::now() + self.client.timing.brief;
            while version.renewing && !self.stop.wait_until(&mut version, until).timed_out() {}
            (version.record.clone(), version.etag.clone())
        };
        record.released = true;
        for _ in 0..TRIES {
            if put(&self.client, &self.key, &record, &Condition::Is(&etag), &Sending::Briefly)?.is_some() {
                return Ok(());
            }
            // A renewal whose answer is late or was lost may have replaced the object.
            match look(&self.client, &self.key, &Sending::Briefly)? {
                Some(FoundLock { record: Some(found), etag: newer, .. }) if found.id == record.id => etag = newer,
                _ => return Ok(()),
            }
        }
        let text = format!("the lock of '{}' is not released: it was replaced {TRIES} times", self.client.place);
        Err(Error::new(ErrorKind::Busy, text))
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
        if let Err(error) = lease.release() {
            LEFT.lock().insert(lease.version.lock().record.id.clone());
            tracing::warn!("the lock is not released, and excludes other processes until it expires: {error}");
        }
    }
}

/// How a request about the lock is sent.
enum Sending<'a> {
    /// With repetitions.
    Usually,
    /// With repetitions as long as a lock is needed.
    Needed(&'a Lease),
    /// Once, for a short time, because a command waits for nothing else.
    Briefly,
}

impl Sending<'_> {
    fn send(&self, client: &Client, asked: Asked<'_>, doing: &str) -> Result<Answer> {
        match self {
            Self::Usually => client.send(&asked, doing),
            Self::Needed(lease) => client.send_while(&asked, doing, &|| match lease.version.lock().state {
                State::Taken => Ok(()),
                State::Lost | State::Released => {
                    Err(Error::new(ErrorKind::Interrupted, format!("{doing}: the lock is not needed any more")))
                }
            }),
            Self::Briefly => client.send(&Asked { brief: true, ..asked }, doing),
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
fn put(
    client: &Client,
    key: &str,
    record: &LockRecord,
    condition: &Condition<'_>,
    sending: &Sending<'_>,
) -> Result<Option<String>> {
    let doing = format!("locking the repository '{}'", client.place);
    let header = match condition {
        Condition::Missing => ("if-none-match", "*".to_owned()),
        Condition::Is(etag) => ("if-match", (*etag).to_owned()),
    };
    let body = record.encode()?;
    let asked = Asked { headers: vec![header], body: &body, ..Asked::new(Method::Put, key) };
    let answer = sending.send(client, asked, &doing)?;
    let is_absent = answer.status == 404 && answer.code() != "NoSuchBucket";
    match (answer.status, condition) {
        (412 | 409, _) => {}
        (_, Condition::Is(_)) if is_absent => {}
        // The condition was that the object is absent.
        (_, Condition::Missing) if is_absent => return Err(unsupported(client)),
        (501, _) => return Err(unsupported(client)),
        _ if answer.succeeded() => return etag_of(client, &answer).map(Some),
        _ => return Err(client.refusal(&answer, &doing)),
    }
    // An attempt whose answer was lost may have put the lock.
    match look(client, key, sending)? {
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

fn look(client: &Client, key: &str, sending: &Sending<'_>) -> Result<Option<FoundLock>> {
    let doing = format!("reading the lock of '{}'", client.place);
    let asked = Asked { answer_max: KIND.length_max, ..Asked::new(Method::Get, key) };
    let answer = sending.send(client, asked, &doing)?;
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
        self.age.is_some_and(|age| age >= timing.expires) || self.record.as_ref().is_some_and(LockRecord::is_free)
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
    let taken = take_as(client, key, &record);
    if taken.as_ref().is_err_and(|error| error.kind() != ErrorKind::Busy) {
        // A put whose answer was lost may have taken the lock.
        LEFT.lock().insert(record.id);
    }
    taken
}

fn take_as(client: &Arc<Client>, key: &str, record: &LockRecord) -> Result<Held> {
    // The time of the first attempt: it may have taken the lock although only a later attempt finds that.
    let sent = Sent::now();
    for _ in 0..TRIES {
        let found = look(client, key, &Sending::Usually)?;
        if let Some(other) = found.as_ref().filter(|other| !other.may_be_taken(&client.timing)) {
            return Err(other.busy(client));
        }
        let condition = match &found {
            None => Condition::Missing,
            Some(FoundLock { etag, .. }) => Condition::Is(etag),
        };
        let Some(etag) = put(client, key, record, &condition, &Sending::Usually)? else { continue };
        if let Some(other) = found.and_then(|found| found.record) {
            LEFT.lock().remove(&other.id);
        }
        let version = Mutex::new(Version { record: record.clone(), etag, sent, state: State::Taken, renewing: false });
        let lease = Arc::new(Lease { client: client.clone(), key: key.to_owned(), version, stop: Condvar::new() });
        let held = Held(lease);
        verify_conditions(&held.0)?;
        let renewing = held.0.clone();
        let thread = std::thread::Builder::new().name("backup-lock".into());
        thread.spawn(move || renewing.renew()).map_err(|error| Error::io("starting a thread for a lock", error))?;
        return Ok(held);
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
        if put(&lease.client, &lease.key, &record, &condition, &Sending::Usually)?.is_some() {
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
            released: false,
            host: "host1".into(),
            boot: "0f0e0d0c-0b0a-4908-8706-050403020107".into(),
            namespace: "pid:[4026531836] time:[4026531834]".into(),
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
    fn a_lock_does_not_stay_valid_while_the_host_sleeps_or_its_clock_is_set_back() {
        let long = Duration::from_secs(100);
        assert!(Sent(Instant::now(), clock::seconds() - 100).elapsed() >= long);
        // The host may have started shortly before.
        if let Some(before) = Instant::now().checked_sub(long) {
            assert!(Sent(before, clock::seconds()).elapsed() >= long);
            assert!(Sent(before, clock::seconds() + 50).elapsed() >= long);
        }
    }

    #[test]
    fn a_change_sent_while_the_lock_is_valid_ends_before_the_lock_expires() {
        let Timing { renew, valid, request, expires, .. } = Timing::USUAL;
        assert!(valid + request < expires && renew * 3 <= valid);
    }
}
