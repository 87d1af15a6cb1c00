//! Background work slows down for active clients, but not for idle ones. What is dirty in the page cache is bounded.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::Store;

const BLOCK: usize = 4096;
const SIZE: u64 = 48 << 20;

fn filled() -> Store {
    let store = Store::new();
    store.run("disk create vm1 48M").ok();
    store.run("disk create busy 16M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    for at in (0..SIZE).step_by(1 << 20) {
        client.write(at, &pattern::bytes(at, 1 << 20)).unwrap();
    }
    client.flush().unwrap();
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store
}

/// Makes a full clone while a client of another disk writes (if `active`) or is idle. Returns the duration, and the
/// rates that `status` reported.
fn clone_beside_a_client(store: &Store, name: &str, active: bool) -> (Duration, Vec<u64>) {
    let done = AtomicBool::new(!active);
    let mut rates = Vec::new();
    let taken = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Client::connect(&store.socket(), "busy").unwrap();
            for at in (0..16 << 20).step_by(BLOCK).cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                client.write(at, &[7; BLOCK]).unwrap();
            }
        });
        let begun = Instant::now();
        let mut clone = store.command(&format!("clone vm1 {name} --full")).spawn().unwrap();
        while clone.try_wait().unwrap().is_none() {
            let status = store.run("status --json").json();
            if status["background_work"] == 1 {
                rates.push(status["background_rate"].as_u64().unwrap());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        done.store(true, Ordering::Relaxed);
        assert!(clone.wait().unwrap().success());
        begun.elapsed()
    });
    (taken, rates)
}

/// Makes full clones until one is as `wanted`: a stall of the medium can slow down a copy too.
fn some_clone(store: &Store, name: &str, active: bool, wanted: impl Fn(Duration, &[u64]) -> bool) {
    let mut outcomes = Vec::new();
    for attempt in 0..5 {
        let (taken, rates) = clone_beside_a_client(store, &format!("{name}{attempt}"), active);
        if wanted(taken, &rates) {
            return;
        }
        outcomes.push((taken, rates));
    }
    panic!("{name}: {outcomes:?}");
}

#[test]
fn a_copy_slows_down_for_late_requests_only() {
    let store = filled();
    // Every request is later than this target, so the copy has the minimum rate of 8 MiB/s.
    let server = store.serve("--latency-target 0.0001");
    let (slowed, rates) = clone_beside_a_client(&store, "slowed", true);
    assert!(slowed > Duration::from_secs(3), "{slowed:?}");
    assert!(rates.contains(&(8 << 20)), "{rates:?}");
    let status = store.run("status").ok();
    assert!(status.lines().any(|line| line.starts_with("background work") && line.ends_with("none")), "{status}");
    some_clone(&store, "idle", false, |taken, _| taken < slowed / 2);
    drop(server);
    // This target is so high that no request exceeds it.
    let server = store.serve("--latency-target 60000 --dirty-limit off");
    some_clone(&store, "gained", true, |taken, rates| {
        taken < slowed / 2 && rates.iter().all(|rate| *rate == 0 || *rate >= 64 << 20)
    });
    drop(server);
    let server = store.serve("--latency-target 0");
    some_clone(&store, "full", true, |taken, _| taken < slowed / 2);
    drop(server);
    for name in ["slowed", "idle0", "gained0", "full0"] {
        store.run(&format!("disk show {name}")).ok();
    }
    store.is_clean();
}

#[test]
fn what_a_server_leaves_dirty_is_bounded() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let dirty = || store.run("status --json").json()["dirty"].clone();
    let server = store.serve("--dirty-limit 8M");
    assert_eq!(dirty()["bound"], 8 << 20);
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    let mut most = 0;
    for at in (0..64 << 20).step_by(1 << 20) {
        client.write(at, &pattern::bytes(at, 1 << 20)).unwrap();
        most = most.max(dirty()["bytes"].as_u64().unwrap());
    }
    // On a slow medium, each thread that writes may exceed the bound by some writes.
    assert!((1..=48 << 20).contains(&most), "{most}");
    client.flush().unwrap();
    drop(client);
    let status = store.run("status").ok();
    assert!(
        status.lines().any(|line| line.starts_with("dirty data") && line.contains(" of at most 8 MiB,")),
        "{status}"
    );
    drop(server);
    let server = store.serve("--dirty-limit off");
    assert!(dirty().is_null());
    assert!(!store.run("status").ok().contains("dirty data"));
    drop(server);
    store.is_clean();
}
