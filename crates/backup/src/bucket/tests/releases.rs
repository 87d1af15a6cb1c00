//! The release of the lock, and from when on a renewal counts, if answers are late or lost.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a request is one about the lock.
fn is_of_lock(head: &str) -> bool {
    head.split(' ').nth(1).is_some_and(|path| path.ends_with("/lock"))
}

fn is_put_of_lock(head: &str) -> bool {
    head.starts_with("put ") && is_of_lock(head)
}

#[test]
fn a_lock_that_could_not_be_released_is_free_for_its_process() {
    let server = S3::start();
    // There is no renewal whose requests would be counted.
    let bucket = timed(&server, Timing { renew: Duration::from_secs(60), ..QUICK });
    let lock = bucket.lock().unwrap();
    server.rule(|head| if is_put_of_lock(head) { Fault::status(500) } else { Fault::None });
    server.seen();
    drop(lock);
    // Nothing is gained if a command waits for the release.
    assert_eq!(server.seen().iter().filter(|head| is_put_of_lock(head)).count(), 1);
    server.rule(|_| Fault::None);
    assert!(!held(&bucket).released);
    let lock = bucket.lock().unwrap();
    let own = held(&bucket);
    drop(lock);
    // The server has taken the lock, and says nothing.
    server.rule(|head| if is_put_of_lock(head) { Fault::CutAnswer(0) } else { Fault::None });
    assert_eq!(bucket.lock().err().unwrap().kind(), ErrorKind::Io);
    server.rule(|_| Fault::None);
    assert_ne!(held(&bucket).id, own.id);
    drop(bucket.lock().unwrap());
    assert!(held(&bucket).released);
}

#[test]
fn a_release_does_not_affect_the_lock_of_another_writer() {
    let server = S3::start();
    let bucket = timed(&server, Timing { renew: Duration::from_secs(60), ..QUICK });
    // The loss is not known yet.
    let lock = bucket.lock().unwrap().unwrap();
    let other =
        LockRecord { boot: "another".into(), id: "0f0e0d0c-0b0a-4908-8706-050403020106".into(), ..held(&bucket) };
    foreign(&server, &other);
    assert_eq!(lock.loss().unwrap(), None);
    drop(lock);
    assert_eq!(held(&bucket), other);
    // A renewal whose answer is not known has replaced the object.
    foreign(&server, &LockRecord { released: true, ..other });
    let lock = bucket.lock().unwrap();
    let own = held(&bucket);
    foreign(&server, &LockRecord { serial: own.serial + 1, ..own });
    drop(lock);
    assert!(held(&bucket).released);
}

#[test]
fn a_renewal_counts_from_its_first_attempt() {
    let server = S3::start();
    // The first put, by which the lock is taken, lasts longer than the lock is valid.
    let slow = Timing { renew: Duration::from_secs(60), valid: Duration::from_secs(1), ..QUICK };
    server.faults("put ", [Fault::Wait(Duration::from_millis(1500))]);
    let lock = timed(&server, slow).lock().unwrap().unwrap();
    assert!(lock.loss().unwrap().is_some());
    drop(lock);
    // A renewal lasts so long, and then there is no other one.
    let bucket = timed(&server, Timing { valid: Duration::from_secs(1), ..QUICK });
    let lock = bucket.lock().unwrap().unwrap();
    let (mut puts, delayed) = (0, Arc::new(AtomicBool::new(false)));
    let seen = delayed.clone();
    server.rule(move |head| {
        puts += usize::from(is_put_of_lock(head));
        seen.fetch_or(puts == 1, Ordering::Relaxed);
        match is_put_of_lock(head) {
            true if puts == 1 => Fault::Wait(Duration::from_millis(1500)),
            true => Fault::status(500),
            false => Fault::None,
        }
    });
    // A renewal that began before the rule has arrived before the delayed one begins.
    testkit::process::until("a renewal is delayed", || delayed.load(Ordering::Relaxed));
    let serial = held(&bucket).serial;
    testkit::process::until("it is renewed", || held(&bucket).serial > serial);
    std::thread::sleep(Duration::from_millis(300));
    assert!(lock.loss().unwrap().is_some());
    server.rule(|_| Fault::None);
    testkit::process::until("it is renewed again", || lock.loss().unwrap().is_none());
    drop(lock);
    // The answer to a renewal is lost. It is found later that the renewal has succeeded, which was long ago.
    let bucket = timed(&server, Timing { valid: Duration::from_secs(2), ..QUICK });
    let lock = bucket.lock().unwrap().unwrap();
    let confirmed = Arc::new(AtomicBool::new(false));
    let (mut begun, seen) = (None, confirmed.clone());
    server.rule(move |head| match (is_of_lock(head), begun) {
        (false, _) => Fault::None,
        (true, None) if head.starts_with("put ") => {
            begun = Some(Instant::now());
            Fault::CutAnswer(0)
        }
        (true, Some(begun)) if begun.elapsed() > Duration::from_millis(2500) && !seen.load(Ordering::Relaxed) => {
            seen.store(head.starts_with("get "), Ordering::Relaxed);
            Fault::None
        }
        _ => Fault::status(500),
    });
    testkit::process::until("it is confirmed", || confirmed.load(Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(300));
    assert!(lock.loss().unwrap().is_some());
    server.rule(|_| Fault::None);
    testkit::process::until("it is renewed", || lock.loss().unwrap().is_none());
    drop(lock);
    assert!(held(&bucket).released);
}

#[test]
fn answers_about_the_lock_mean_what_they_say() {
    let server = S3::start();
    let one = bucket(&server);
    // The age of a lock is that by the clock of the server.
    let lock = one.lock().unwrap().unwrap();
    let record = LockRecord { boot: "another".into(), ..held(&one) };
    let body = String::from_utf8(record.encode().unwrap()).unwrap();
    let head = "HTTP/1.1 200 OK\r\netag: \"x\"\r\ndate: Tue, 02 Jan 2001 00:00:10 GMT\r\n\
                last-modified: Tue, 02 Jan 2001 00:00:00 GMT";
    let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    server.faults("get ", [Fault::Answer(answer)]);
    let error = bucket(&server).lock().err().unwrap();
    assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("expires in 50 s"), "{error}");
    // A conflict of two conditional requests passes.
    let problem = |status: &str, code: &str| {
        let body = format!("<Error><Code>{code}</Code></Error>");
        Fault::Answer(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    };
    let conflict = problem("409 Conflict", "ConditionalRequestConflict");
    server.faults("put ", [conflict.clone(), conflict.clone()]);
    let serial = held(&one).serial;
    testkit::process::until("it is renewed", || held(&one).serial > serial + 1);
    assert_eq!(lock.loss().unwrap(), None);
    // The object of the lock is gone.
    server.rule(move |head| match is_put_of_lock(head) {
        true => problem("404 Not Found", "NoSuchKey"),
        false => Fault::None,
    });
    testkit::process::until("the loss is noticed", || lock.loss().unwrap().is_some());
    // It is final.
    server.seen();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!server.seen().iter().any(|head| is_put_of_lock(head)));
    drop(lock);
    server.rule(|_| Fault::None);
    foreign(&server, &LockRecord { released: true, ..record });
    std::fs::remove_file(server.objects("a place/b/lock")).unwrap();
    server.faults("put ", [Fault::Answer("HTTP/1.1 404 Gone\r\ncontent-length: 0\r\n\r\n".into())]);
    assert_eq!(one.lock().err().unwrap().kind(), ErrorKind::Unsupported);
    drop(one.lock().unwrap());
}
