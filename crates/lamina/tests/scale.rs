//! Correctness with many clones and many snapshots: small versions of benchmarks.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::Store;

const BLOCK: u64 = 4096;

#[test]
fn ten_thousand_clones() {
    let store = Store::new();
    store.run("disk create base 1G").ok();
    let mut server = store.serve("");
    let content = pattern::bytes(1, 8 << 20);
    let mut base = Client::connect(&store.socket(), "base").unwrap();
    base.write(0, &content).unwrap();
    base.flush().unwrap();
    drop(base);
    store.run("snapshot create base@golden").ok();
    let begin = Instant::now();
    store.run("clone base@golden vm --count 10000").ok();
    let took = begin.elapsed();
    println!("10,000 clones in {took:.1?}");
    assert!(took < Duration::from_secs(60), "{took:?}");
    assert_eq!(store.run("status --json").json()["disks"], 10_001);
    // A write to one clone does not affect another.
    let mut one = Client::connect(&store.socket(), "vm-7777").unwrap();
    assert!(one.read(0, 8 << 20).unwrap() == content);
    one.write(4096, &[9; 4096]).unwrap();
    one.flush().unwrap();
    for other in ["vm-7776", "vm-7778", "base", "base@golden", "vm-10000"] {
        assert!(Client::connect(&store.socket(), other).unwrap().read(0, 8 << 20).unwrap() == content, "{other}");
    }
    assert_eq!(server.stop("KILL"), None);
    let begin = Instant::now();
    let mut server = store.serve("");
    println!("opened after a kill in {:.1?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert_eq!(store.run("status --json").json()["disks"], 10_001);
    let mut one = Client::connect(&store.socket(), "vm-7777").unwrap();
    assert!(one.read(4096, 4096).unwrap() == [9; 4096]);
    drop(one);
    assert_eq!(store.run("disk delete base").code, 4, "it has clones");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_chain_of_a_thousand_snapshots() {
    const DEPTH: u64 = 1000;
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    let mut random = Random(5);
    // The seed of each block's content: for the current state, and for some snapshots.
    let mut now: BTreeMap<u64, u64> = BTreeMap::new();
    let mut then: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
    for number in 0..DEPTH {
        for _ in 0..4 {
            let (block, seed) = (random.below(16 << 10), random.next());
            client.write(block * BLOCK, &pattern::bytes(seed, BLOCK as usize)).unwrap();
            now.insert(block, seed);
        }
        store.run(&format!("snapshot create vm1@s{number}")).ok();
        if number % 100 == 0 || number == DEPTH - 1 {
            then.insert(number, now.clone());
        }
    }
    let verify = |export: &str, expected: &BTreeMap<u64, u64>| {
        let mut client = Client::connect(&store.socket(), export).unwrap();
        let begin = Instant::now();
        for block in (0..16 << 10).step_by(7).chain(expected.keys().copied()) {
            let found = client.read(block * BLOCK, BLOCK as u32).unwrap();
            let content = expected
                .get(&block)
                .map_or_else(|| vec![0; BLOCK as usize], |seed| pattern::bytes(*seed, BLOCK as usize));
            assert!(found == content, "{export}: block {block}");
        }
        begin.elapsed()
    };
    println!("reads through {DEPTH} snapshots: {:.1?}", verify("vm1", &now));
    for (number, expected) in &then {
        verify(&format!("vm1@s{number}"), expected);
    }
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    let mut server = store.serve("");
    verify("vm1", &now);
    assert_eq!(store.run("snapshot list vm1 --json").json()["snapshots"].as_array().unwrap().len(), DEPTH as usize);
    // Snapshots in the middle and at the ends of the chain are deleted. The content of the others must not change.
    for number in (0..DEPTH).filter(|number| !then.contains_key(number)).step_by(3) {
        store.run(&format!("snapshot delete vm1@s{number}")).ok();
    }
    for (number, expected) in &then {
        verify(&format!("vm1@s{number}"), expected);
    }
    store.run("snapshot revert vm1@s500").ok();
    verify("vm1", &then[&500]);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
