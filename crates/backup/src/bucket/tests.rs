//! Repositories in a bucket of a real S3 server, with faults between the server and the client.

#![allow(clippy::unwrap_used)]

mod releases;

use super::*;
use crate::testbed::{Fixture, SMALL_PACKS, content_of};
use crate::{Chain, Created, Keep, Repository};
use disk::NoProgress;
use disk::transfer::SEGMENT;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testkit::s3::{BUCKET, Fault, KEY_ID, S3, SECRET};

/// Short times, so that tests of failures end soon.
const QUICK: Timing = Timing {
    attempts: 4,
    delay: Duration::from_millis(2),
    delay_max: Duration::from_millis(10),
    request: Duration::from_secs(20),
    brief: Duration::from_secs(10),
    idle: Duration::from_secs(10),
    renew: Duration::from_millis(100),
    valid: Duration::from_secs(30),
    expires: Duration::from_secs(60),
};

fn address(server: &S3) -> BucketAddress {
    let address: BucketAddress = format!("s3://{BUCKET}/a place/b").parse().unwrap();
    BucketAddress { endpoint: Some(server.endpoint()), ..address }
}

fn credentials() -> Option<Credentials> {
    Some(Credentials { key_id: KEY_ID.into(), secret: SECRET.into(), token: None })
}

fn timed(server: &S3, timing: Timing) -> Bucket {
    Bucket::timed(&address(server), credentials(), timing).unwrap()
}

fn bucket(server: &S3) -> Bucket {
    timed(server, QUICK)
}

fn create(repository: &Repository, disk: &Fixture, snapshot: &str) -> Result<Created> {
    repository.create(&disk.outgoing(snapshot), "vm", false, SMALL_PACKS, &NoProgress)
}

/// The names in the requests that put an object.
fn puts(seen: &[String]) -> Vec<String> {
    let put = seen.iter().filter_map(|head| head.strip_prefix("put ")?.split(' ').next());
    put.map(|path| path.rsplit('/').next().unwrap().to_owned()).collect()
}

#[test]
fn objects_are_put_read_listed_and_removed() {
    let server = S3::start();
    let bucket = bucket(&server);
    assert_eq!(bucket.list().unwrap(), Vec::<String>::new());
    let bytes: Vec<u8> = (0..100_000u32).map(|number| number as u8).collect();
    bucket.put("pack-1", &bytes).unwrap();
    bucket.put("other", b"text").unwrap();
    bucket.put("other", b"texts").unwrap();
    assert_eq!(std::fs::read(server.objects("a place/b").join("other")).unwrap(), b"texts");
    for range in [0..100_000, 1..2, 99_999..100_000, 50..50, 100_000..100_000] {
        let read = bucket.read("pack-1", range.clone()).unwrap();
        assert!(read == bytes[range.start as usize..range.end as usize], "{range:?}");
    }
    // A range is read without the rest of the object.
    server.seen();
    bucket.read("pack-1", 10..20).unwrap();
    assert!(server.seen().iter().any(|head| head.contains("range: bytes=10-19\r\n")));
    for range in [99_999..100_001, 100_000..100_001, 200_000..200_010, 100_001..100_001] {
        assert_eq!(bucket.read("pack-1", range.clone()).unwrap_err().kind(), ErrorKind::Corrupt, "{range:?}");
    }
    assert_eq!(bucket.read("none", 0..1).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!((bucket.length("pack-1").unwrap(), bucket.length("none").unwrap()), (Some(100_000), None));
    assert_eq!(bucket.whole("other", 5).unwrap().unwrap(), b"texts");
    assert_eq!(bucket.whole("none", 5).unwrap(), None);
    assert_eq!(bucket.whole("other", 4).unwrap_err().kind(), ErrorKind::Corrupt);
    // Objects of other repositories and the lock are not listed.
    std::fs::create_dir(server.objects("a place/b/deeper")).unwrap();
    std::fs::write(server.objects("a place/b/deeper/repository"), "x").unwrap();
    std::fs::write(server.objects("a place/beside"), "x").unwrap();
    let lock = bucket.lock().unwrap();
    assert_eq!(bucket.list().unwrap(), ["other", "pack-1"]);
    drop(lock);
    bucket.remove("pack-1").unwrap();
    bucket.remove("pack-1").unwrap();
    assert_eq!(bucket.list().unwrap(), ["other"]);
}

#[test]
fn all_parts_of_a_listing_are_read() {
    let server = S3::start();
    let part = |keys: &[&str], next: &str| {
        let keys: String = keys.iter().map(|key| format!("<Contents><Key>{key}</Key></Contents>")).collect();
        let body = format!("<ListBucketResult><EncodingType>url</EncodingType>{keys}{next}</ListBucketResult>");
        Fault::Answer(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    };
    let next = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+/=</NextContinuationToken>";
    let first = part(&["a%20place/b/c", "a+place/b/%C3%A4%3C"], next);
    server.faults("list-type=2", [first, part(&["a%20place/b/b"], "<IsTruncated>false</IsTruncated>")]);
    assert_eq!(bucket(&server).list().unwrap(), ["b", "c", "ä<"]);
    let seen = server.seen();
    assert!(seen[1].contains("continuation-token=a%2b%2f%3d&delimiter=%2f"), "{seen:?}");
    server.faults("list-type=2", [part(&["%zz"], "")]);
    assert_eq!(bucket(&server).list().unwrap_err().kind(), ErrorKind::Io);
    // What is not complete is not taken for the whole list.
    let empty = "<IsTruncated>true</IsTruncated><NextContinuationToken></NextContinuationToken>";
    for rest in ["<IsTruncated>true</IsTruncated>", empty] {
        server.faults("list-type=2", [part(&["a%20place/b/c"], rest)]);
        assert_eq!(bucket(&server).list().unwrap_err().kind(), ErrorKind::Io, "{rest}");
    }
    server.faults("list-type=2", [part(&["a%20place/b/c"], next), part(&["a%20place/b/c"], next)]);
    let error = bucket(&server).list().unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("continues with itself"), "{error}");
}

#[test]
fn a_manifest_that_cannot_be_read_now_is_not_left_out() {
    let server = S3::start();
    let mut disk = Fixture::new(2 * SEGMENT, 3);
    disk.snapshot("one");
    let repository = Repository::open_or_create(Arc::new(bucket(&server))).unwrap();
    let first = create(&repository, &disk, "one").unwrap().id;
    disk.write(0, &[7; 4096]);
    disk.snapshot("two");
    let second = create(&repository, &disk, "two").unwrap().id;
    disk.write(0, &[8; 4096]);
    disk.snapshot("three");
    let names = repository.objects().list().unwrap();
    // With the number of answers before the failure: the manifest of a base is read again as a part of its chain.
    for (id, good) in [(&second, 0), (&first, 1)] {
        let (name, mut read) = (format!("/backup-{id}"), 0);
        server.rule(move |head| {
            read += usize::from(head.starts_with("get ") && head.contains(&name));
            if read > good && head.contains(&name) { Fault::status(403) } else { Fault::None }
        });
        assert_eq!(create(&repository, &disk, "three").unwrap_err().kind(), ErrorKind::Io, "{good}");
        assert_eq!(repository.manifests().unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(repository.find("vm").unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(repository.prune(&"last=1".parse().unwrap(), false).unwrap_err().kind(), ErrorKind::Io);
    }
    assert_eq!(repository.objects().list().unwrap(), names);
    // A list shows it with its problem, and reads each manifest once.
    server.seen();
    let listed = repository.list().unwrap();
    assert!(listed.len() == 2 && listed[1].id == first && listed[1].problem.is_some(), "{listed:?}");
    let read = server.seen().iter().filter(|head| head.starts_with("get ") && head.contains("/backup-")).count();
    assert_eq!(read, 2);
    server.rule(|_| Fault::None);
    assert_eq!(create(&repository, &disk, "three").unwrap().based_on.as_deref(), Some("two"));
    // A damaged manifest is left out.
    repository.objects().put(&format!("backup-{second}"), b"x").unwrap();
    assert_eq!(repository.manifests().unwrap().len(), 2);
}

#[test]
fn a_part_of_an_object_is_not_taken_for_the_whole() {
    let server = S3::start();
    let bucket = bucket(&server);
    bucket.put("x", b"whole").unwrap();
    let cut = Fault::Answer("HTTP/1.1 200 OK\r\n\r\nwho".into());
    server.faults("get ", [cut.clone()]);
    assert_eq!(bucket.whole("x", 9).unwrap().unwrap(), b"whole");
    server.faults("get ", std::iter::repeat_n(cut, 4));
    let error = bucket.whole("x", 9).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("no length"), "{error}");
    for range in ["bytes 0-2/5", "bytes 2-4/5", "bytes 0-2/*"] {
        let answer = format!("HTTP/1.1 206 Partial\r\ncontent-range: {range}\r\ncontent-length: 3\r\n\r\nwho");
        server.faults("get ", [Fault::Answer(answer)]);
        assert_eq!(bucket.whole("x", 9).unwrap_err().kind(), ErrorKind::Io, "{range}");
    }
    // Pieces that say their lengths are complete.
    let pieces = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nwho\r\n0\r\n\r\n";
    server.faults("get ", [Fault::Answer(pieces.into())]);
    assert_eq!(bucket.whole("x", 9).unwrap().unwrap(), b"who");
}

#[test]
fn backups_are_made_restored_verified_and_deleted() {
    let server = S3::start();
    let mut disk = Fixture::new(5 * SEGMENT + 512, 1);
    let first = disk.snapshot("one");
    let repository = Repository::open_or_create(Arc::new(bucket(&server))).unwrap();
    create(&repository, &disk, "one").unwrap();
    let put = puts(&server.seen());
    // The manifest comes last, besides the lock.
    let place = |prefix: &str| put.iter().rposition(|name| name.starts_with(prefix)).unwrap();
    assert!(place("unfinished-") < place("pack-") && place("pack-") < place("backup-"), "{put:?}");
    disk.write(SEGMENT + 4096, &[7; 8192]);
    let second = disk.snapshot("two");
    let increment = create(&repository, &disk, "two").unwrap();
    assert_eq!((increment.based_on.as_deref(), increment.data), (Some("one"), 8192));
    assert!(create(&repository, &disk, "two").unwrap().already);
    let again = Repository::open_or_create(Arc::new(bucket(&server))).unwrap();
    assert_eq!(again.id(), repository.id());
    for (which, content) in [("vm@one", &first), ("vm", &second)] {
        let (_, mut chain) = Chain::of(&again, which, None).unwrap();
        assert!(content_of(&mut chain) == *content, "{which}");
    }
    assert!(again.verify(&[], None, &NoProgress).unwrap().problems.is_empty());
    let keep: Keep = "last=1".parse().unwrap();
    assert_eq!(again.prune(&keep, false).unwrap().deleted, 0);
    let all = again.manifests().unwrap();
    assert_eq!(again.delete(&all[..1]).unwrap_err().kind(), ErrorKind::Busy);
    again.delete(&all).unwrap();
    assert_eq!(again.objects().list().unwrap(), ["repository"]);
    assert!(Repository::open(Arc::new(Bucket::new(&address(&server), credentials()).unwrap())).is_ok());
}

#[test]
fn an_interrupted_backup_continues_and_leaves_nothing_after_a_deletion() {
    let server = S3::start();
    let disk = Fixture::new(4 * SEGMENT, 2);
    let content = disk.snapshot("s");
    let repository = Repository::open_or_create(Arc::new(bucket(&server))).unwrap();
    // Whatever is put fails from the third pack on.
    let mut packs = 0;
    server.rule(move |head| {
        packs += usize::from(head.starts_with("put ") && head.contains("/pack-"));
        if packs > 2 { Fault::CutRequest(1000) } else { Fault::None }
    });
    let error = create(&repository, &disk, "s").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    server.rule(|_| Fault::None);
    assert!(repository.manifests().unwrap().is_empty());
    let [begun] = &repository.unfinished().unwrap()[..] else { panic!("one backup has begun") };
    let names = repository.objects().list().unwrap();
    assert_eq!(names.iter().filter(|name| name.starts_with("pack-")).count(), 2, "{names:?}");
    // The upload of the manifest is interrupted.
    server.rule(|head| match head.starts_with("put ") && head.contains("/backup-") {
        true => Fault::CutRequest(100),
        false => Fault::None,
    });
    create(&repository, &disk, "s").unwrap_err();
    assert!(repository.manifests().unwrap().is_empty());
    server.rule(|_| Fault::None);
    let made = create(&repository, &disk, "s").unwrap();
    assert_eq!(made.id, begun.id);
    assert_eq!(made.resumed, made.stored);
    let (_, mut chain) = Chain::of(&repository, "vm", None).unwrap();
    assert!(content_of(&mut chain) == content);
    // A deletion that is interrupted after the manifest leaves packs, which the next prune removes.
    server.rule(|head| match head.starts_with("delete ") && head.contains("/pack-") {
        true => Fault::status(500),
        false => Fault::None,
    });
    let all = repository.manifests().unwrap();
    repository.delete(&all).unwrap_err();
    server.rule(|_| Fault::None);
    assert!(repository.manifests().unwrap().is_empty());
    let pruned = repository.prune(&"last=1".parse().unwrap(), false).unwrap();
    assert_eq!(pruned.swept, 4);
    assert_eq!(repository.objects().list().unwrap(), ["repository"]);
}

#[test]
fn failures_that_pass_are_not_seen() {
    let server = S3::start();
    let bucket = bucket(&server);
    let bytes = vec![3; 3 << 20];
    let passing = [
        Fault::status(500),
        Fault::status(503),
        Fault::status(429),
        Fault::CutRequest(0),
        Fault::CutRequest(2 << 20),
        Fault::CutAnswer(0),
        Fault::CutAnswer(30),
    ];
    for (number, fault) in passing.into_iter().enumerate() {
        let name = format!("pack-{number}");
        server.faults("put ", [fault.clone(), fault.clone(), fault.clone()]);
        bucket.put(&name, &bytes).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        server.faults("get ", [fault.clone(), fault]);
        assert!(bucket.read(&name, 0..3 << 20).unwrap() == bytes);
    }
    // An answer that is cut in the middle is not taken for a shorter object.
    server.faults("get ", [Fault::CutAnswer(1 << 20), Fault::CutAnswer(2 << 20)]);
    assert!(bucket.read("pack-0", 0..3 << 20).unwrap() == bytes);
    assert_eq!(bucket.list().unwrap().len(), 7);
    // A server that is slow, but not slower than a request may be.
    server.faults("get ", [Fault::Wait(Duration::from_millis(300))]);
    assert!(bucket.read("pack-0", 0..3 << 20).unwrap() == bytes);
    let impatient = timed(&server, Timing { idle: Duration::from_millis(400), ..QUICK });
    server.faults("get ", [Fault::Wait(Duration::from_secs(3))]);
    let begun = Instant::now();
    assert!(impatient.read("pack-0", 0..10).unwrap() == bytes[..10]);
    assert!(begun.elapsed() < Duration::from_millis(2900), "{:?}", begun.elapsed());
}

#[test]
fn errors_name_the_bucket_the_object_and_the_remedy() {
    let server = S3::start();
    let bucket = bucket(&server);
    bucket.put("x", b"x").unwrap();
    let fails = |outcome: Result<Vec<u8>>, kind: ErrorKind, words: &[&str]| {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for words in words.iter().chain(&["'x' in 's3://"]) {
            assert!(error.to_string().contains(words), "'{words}' is not in: {error}");
        }
        assert!(!error.to_string().contains(SECRET), "{error}");
    };
    let read = |bucket: &Bucket| bucket.read("x", 0..1);
    server.faults("get ", std::iter::repeat_n(Fault::status(503), 4));
    fails(read(&bucket), ErrorKind::Io, &["HTTP status 503", &server.endpoint()]);
    let wrong = Some(Credentials { key_id: KEY_ID.into(), secret: "wrong".into(), token: None });
    let other = Bucket::timed(&address(&server), wrong, QUICK).unwrap();
    fails(read(&other), ErrorKind::Io, &["access is denied: check the credentials", "SignatureDoesNotMatch"]);
    let other = Bucket::timed(&address(&server), None, QUICK).unwrap();
    fails(read(&other), ErrorKind::Io, &["there are no credentials: set AWS_ACCESS_KEY_ID"]);
    let elsewhere = BucketAddress { bucket: "elsewhere".into(), ..address(&server) };
    let other = Bucket::timed(&elsewhere, credentials(), QUICK).unwrap();
    let error = other.list().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("'s3://elsewhere/a place/b'") && error.to_string().contains("no such bucket"));
    let redirect = "HTTP/1.1 301 Moved\r\nx-amz-bucket-region: eu-west-1\r\nlocation: http://127.0.0.1:1/\r\n\
                    content-length: 0\r\n\r\n";
    server.faults("get ", [Fault::Answer(redirect.into())]);
    fails(read(&bucket), ErrorKind::Invalid, &["in the region 'eu-west-1': set AWS_REGION=eu-west-1"]);
    let body = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-2</Region></Error>";
    let malformed = format!("HTTP/1.1 400 Bad\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    server.faults("get ", [Fault::Answer(malformed)]);
    fails(read(&bucket), ErrorKind::Invalid, &["set AWS_REGION=eu-west-2"]);
    let nowhere = BucketAddress { endpoint: Some("http://127.0.0.1:1".into()), ..address(&server) };
    let other = Bucket::timed(&nowhere, credentials(), QUICK).unwrap();
    fails(read(&other), ErrorKind::Io, &["failed 4 times", "http://127.0.0.1:1: Connection refused"]);
    // What is not HTTP, too long, or not what was asked is an error too.
    for answer in ["nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123456789"] {
        server.faults("get ", std::iter::repeat_n(Fault::Answer(answer.into()), 4));
        fails(read(&bucket), ErrorKind::Io, &["failed"]);
    }
    let shifted = "HTTP/1.1 206 Partial\r\ncontent-range: bytes 5-5/9\r\ncontent-length: 1\r\n\r\n5";
    server.faults("get ", [Fault::Answer(shifted.into())]);
    fails(read(&bucket), ErrorKind::Io, &["1 bytes from 5 on"]);
}

/// Puts the lock of a holder that is not this process.
fn foreign(server: &S3, holder: &LockRecord) {
    bucket(server).put(LOCK, &holder.encode().unwrap()).unwrap();
}

fn held(bucket: &Bucket) -> LockRecord {
    LockRecord::decode(&bucket.whole(LOCK, 4096).unwrap().unwrap()).unwrap()
}

#[test]
fn one_writer_has_the_lock() {
    let server = S3::start();
    let (one, other) = (bucket(&server), bucket(&server));
    let lock = one.lock().unwrap().unwrap();
    let error = other.lock().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let words = format!("(process {} on ", std::process::id());
    assert!(error.to_string().contains(&words) && error.to_string().contains("expires in"), "{error}");
    assert_eq!(lock.loss().unwrap(), None);
    one.put("x", b"x").unwrap();
    drop(lock);
    drop(other.lock().unwrap());
    // After the lock was released, changes that need no lock are possible.
    one.remove("x").unwrap();
    // The answer to the put of the lock is lost.
    server.faults("put ", [Fault::CutAnswer(0)]);
    let lock = one.lock().unwrap();
    assert_eq!(other.lock().err().unwrap().kind(), ErrorKind::Busy);
    drop(lock);
    let ignored = "HTTP/1.1 200 OK\r\netag: \"x\"\r\ncontent-length: 0\r\n\r\n";
    for ignored_header in ["if-none-match", "if-match"] {
        server.rule(move |head| match head.starts_with("put ") && head.contains(&format!("\r\n{ignored_header}:")) {
            true => Fault::Answer(ignored.into()),
            false => Fault::None,
        });
        assert_eq!(one.lock().err().unwrap().kind(), ErrorKind::Unsupported, "{ignored_header}");
        server.rule(|_| Fault::None);
        assert!(held(&one).released);
    }
}

#[test]
fn the_lock_of_an_ended_process_or_a_silent_host_is_taken_over() {
    let server = S3::start();
    let bucket = bucket(&server);
    let lock = bucket.lock().unwrap();
    let own = held(&bucket);
    drop(lock);
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let identity = backend::process::ProcessIdentity::own();
    let other = LockRecord { process: child.id(), started: own.started, ..own.clone() };
    assert_eq!(other.boot, identity.boot);
    // The number belongs to another process now.
    foreign(&server, &LockRecord { started: 1, ..other.clone() });
    drop(bucket.lock().unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    foreign(&server, &other);
    drop(bucket.lock().unwrap());
    // Nothing is known about a process of another host, except that it has not renewed its lock.
    let far = LockRecord { boot: "another".into(), ..other };
    let begun = Instant::now();
    foreign(&server, &far);
    let patient = timed(&server, Timing { expires: Duration::from_secs(5), ..QUICK });
    let mut refused = 0;
    let lock = loop {
        match patient.lock() {
            Ok(lock) => break lock,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy),
        }
        refused += 1;
        std::thread::sleep(Duration::from_millis(50));
    };
    // Times of HTTP are whole seconds.
    assert!(refused > 0 && begun.elapsed() > Duration::from_millis(3900), "{:?}", begun.elapsed());
    // A lock that is renewed does not expire, although it is held for longer.
    std::thread::sleep(Duration::from_millis(6500));
    assert_eq!(patient.lock().err().unwrap().kind(), ErrorKind::Busy);
    patient.put("x", b"x").unwrap();
    assert!(held(&patient).serial > 3);
    drop(lock);
    // What is not a lock is one until it expires.
    bucket.put(LOCK, b"text").unwrap();
    assert_eq!(bucket.lock().err().unwrap().kind(), ErrorKind::Busy);
}

#[test]
fn a_writer_that_may_have_lost_the_lock_changes_nothing() {
    let server = S3::start();
    // Another writer took the lock over.
    let bucket = bucket(&server);
    bucket.put("kept", b"x").unwrap();
    let lock = bucket.lock().unwrap().unwrap();
    let other = LockRecord { boot: "another".into(), ..held(&bucket) };
    testkit::process::until("the loss is noticed", || {
        // The server may overwrite it by a renewal that it has checked before, also only in part.
        foreign(&server, &other);
        std::thread::sleep(Duration::from_millis(300));
        lock.loss().unwrap().is_some()
    });
    foreign(&server, &other);
    let refused = |bucket: &Bucket| {
        server.seen();
        for outcome in [bucket.put("x", b"x"), bucket.remove("kept")] {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.to_string().contains("was lost"), "{error}");
        }
        assert!(puts(&server.seen()).iter().all(|name| name == LOCK));
    };
    refused(&bucket);
    drop(lock);
    // The lock of the other writer stays.
    let found = held(&bucket);
    assert!(found.boot == "another" && !found.released);
    foreign(&server, &LockRecord { released: true, ..found });
    // The lock cannot be renewed.
    let bucket = timed(&server, Timing { valid: Duration::from_secs(2), ..QUICK });
    let lock = bucket.lock().unwrap().unwrap();
    server.rule(|head| match head.starts_with("put ") && head.contains("/lock ") {
        true => Fault::status(500),
        false => Fault::None,
    });
    std::thread::sleep(Duration::from_millis(2500));
    assert!(lock.loss().unwrap().is_some());
    refused(&bucket);
    drop(lock);
    server.rule(|_| Fault::None);
    assert!(!held(&bucket).released);
    // An upload is not repeated after the lock may have been lost meanwhile.
    let bucket = timed(&server, Timing { valid: Duration::from_secs(2), ..QUICK });
    let lock = bucket.lock().unwrap().unwrap();
    // From a renewal on, the whole time is left for the upload.
    let serial = held(&bucket).serial;
    testkit::process::until("the lock is renewed", || held(&bucket).serial > serial);
    server.rule(|head| match (head.starts_with("put "), head.contains("/lock ")) {
        (true, true) => Fault::status(500),
        (true, false) => {
            std::thread::sleep(Duration::from_millis(2200));
            Fault::status(500)
        }
        _ => Fault::None,
    });
    assert_eq!(bucket.put("x", b"x").unwrap_err().kind(), ErrorKind::Busy);
    let tried = puts(&server.seen()).into_iter().filter(|name| name == "x").count();
    assert_eq!(tried, 1);
    drop(lock);
}
