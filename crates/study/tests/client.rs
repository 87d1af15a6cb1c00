//! The study's NBD client, tested with nbdkit as the server.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use study::fio::Endpoint;
use study::nbd::{Client, Request};
use study::peers::wait_ready;
use study::process::{self, Service};

struct Memory {
    folder: PathBuf,
    endpoint: Endpoint,
    service: Option<Service>,
}

/// Starts nbdkit with a disk of 64 MiB in memory and the given filters.
fn serve(name: &str, words: &[&str]) -> Memory {
    let folder = std::env::temp_dir().join(format!("study-client-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("socket");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "--exit-with-parent", "-U"]).arg(&socket).args(words);
    let service = Service::start(&mut command, &folder.join("log")).unwrap();
    let endpoint = Endpoint { socket, export: String::new() };
    wait_ready(&service, &endpoint).unwrap();
    Memory { folder, endpoint, service: Some(service) }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.service.take());
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn client(memory: &Memory) -> Client {
    Client::connect(&memory.endpoint.socket, "").unwrap()
}

/// The content of the disk as `nbdcopy` reads it.
fn content(memory: &Memory) -> Vec<u8> {
    let path = memory.folder.join("content");
    process::run(Command::new("nbdcopy").arg(memory.endpoint.uri()).arg(&path)).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn every_request_is_answered_once_and_writes_its_own_range() {
    let memory = serve("memory", &["memory", "64M"]);
    let mut client = client(&memory);
    assert_eq!(client.size(), 64 << 20);
    for depth in [1, 3, 64] {
        // Writes every third block, then discards every second one of these blocks.
        let write = (0..3000).step_by(3).map(|b| Request::Write { offset: b * 4096, length: 4096 });
        let mut answered = 0;
        let count = client.run(depth, write, |t| {
            assert!(t.answered >= t.sent);
            answered += 1;
        });
        assert_eq!((count.unwrap(), answered), (1000, 1000));
        let trim = (0..3000).step_by(6).map(|b| Request::Trim { offset: b * 4096, length: 4096 });
        assert_eq!(client.run(depth, trim, |_| ()).unwrap(), 500);
        client.flush().unwrap();
        for (block, bytes) in content(&memory)[..3000 * 4096].chunks(4096).enumerate() {
            let written = block % 3 == 0 && block % 6 != 0;
            assert_eq!(bytes.iter().any(|b| *b != 0), written, "block {block} at depth {depth}");
        }
        let read = (0..64).map(|m| Request::Read { offset: m << 20, length: 1 << 20 });
        assert_eq!(client.run(depth, read, |_| ()).unwrap(), 64);
    }
}

#[test]
fn stamped_blocks_differ_from_older_versions_and_other_blocks() {
    let memory = serve("stamped", &["memory", "64M"]);
    let mut client = client(&memory);
    let stamped =
        |block: u64, count: u32, version| Request::Stamped { offset: block * 4096, length: count * 4096, version };
    client.run(4, [stamped(0, 8, 1), stamped(8, 8, 1)], |_| ()).unwrap();
    client.run(4, [stamped(3, 2, 2)], |_| ()).unwrap();
    let mut versions = [1; 16];
    assert_eq!(client.compare(0, &versions).unwrap(), 2);
    versions[3..5].fill(2);
    assert_eq!(client.compare(0, &versions).unwrap(), 0);
    assert_eq!(client.compare(4096, &versions[..8]).unwrap(), 2, "the same versions, a block further");
    let other = Request::Write { offset: 9 * 4096, length: 4096 };
    client.run(1, [other], |_| ()).unwrap();
    assert_eq!(client.compare(8 * 4096, &versions[8..]).unwrap(), 1);
    let mut told = Vec::new();
    client.run_told(1, [stamped(20, 1, 5), Request::Flush], |request, _| told.push(request)).unwrap();
    assert_eq!(told, [stamped(20, 1, 5), Request::Flush]);
}

#[test]
fn measured_latencies_equal_the_delays_of_the_server() {
    let memory = serve("slow", &["--filter=delay", "memory", "64M", "rdelay=30ms"]);
    let mut slowest: f64 = 0.0;
    let mut fastest = f64::INFINITY;
    let read = (0..32).map(|b| Request::Read { offset: b * 4096, length: 4096 });
    let each = |t: study::nbd::Timing| {
        slowest = slowest.max(t.microseconds());
        fastest = fastest.min(t.microseconds());
    };
    client(&memory).run(8, read, each).unwrap();
    assert!(fastest >= 30_000.0 && slowest < 5_000_000.0, "{fastest} to {slowest} us");
}

#[test]
fn refused_requests_are_errors_of_the_client() {
    let memory = serve("failing", &["--filter=error", "memory", "64M", "error-pwrite=ENOSPC", "error-pwrite-rate=1"]);
    let error = client(&memory).run(4, [Request::Write { offset: 0, length: 4096 }], |_| ()).unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
    let too_long = Request::Read { offset: 0, length: study::nbd::LENGTH_MAX + 1 };
    assert!(client(&memory).run(1, [too_long], |_| ()).is_err());
    assert!(Client::connect(Path::new("/no/such/socket"), "").is_err());
}
