//! The read cache of a server: its limit, its counters, and the counters of each disk.

#![allow(clippy::unwrap_used)]

use testkit::nbd::Client;
use testkit::process::Store;

const BLOCK: usize = 4096;

#[test]
fn compressed_blocks_are_read_from_the_cache_of_the_size_that_is_set() {
    let store = Store::new();
    store.run("disk create vm1 1M").ok();
    let content: Vec<u8> = (0..64 * BLOCK).map(|at| (at / 64) as u8).collect();
    let cache = || store.run("status --json").json()["read_cache"].clone();
    // The page cache has what is read first, so it is kept when it is read the second time.
    let read_three_times = || {
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        for _ in 0..3 {
            for at in (0..content.len()).step_by(BLOCK) {
                assert!(client.read(at as u64, BLOCK as u32).unwrap() == content[at..at + BLOCK]);
            }
        }
    };
    let server = store.serve("--read-cache 8M");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    client.write(0, &content).unwrap();
    client.flush().unwrap();
    drop(client);
    store.run("disk optimize vm1").ok();
    assert_eq!((&cache()["limit"], &cache()["misses"]), (&(8 << 20).into(), &0.into()));
    read_three_times();
    let used = cache();
    let (hits, misses) = (used["hits"].as_u64().unwrap(), used["misses"].as_u64().unwrap());
    assert!(hits >= 64 && misses > 0 && hits + misses >= 192, "{used}");
    assert_eq!(used["resident"], 64 * BLOCK);
    let disk = store.run("disk show vm1 --json").json();
    assert_eq!((&disk["cache_hits"], &disk["cache_misses"]), (&used["hits"], &used["misses"]));
    let line = |text: &str| text.lines().find(|line| line.starts_with("read cache")).map(str::to_owned);
    let status = line(&store.run("status").ok()).unwrap();
    assert!(status.contains("256 KiB of at most 8 MiB"), "{status}");
    assert!(line(&store.run("disk show vm1").ok()).is_some());
    drop(server);
    let server = store.serve("--read-cache 0");
    read_three_times();
    assert!(cache().is_null() && line(&store.run("status").ok()).is_none());
    drop(server);
    store.is_clean();
}

#[test]
fn plain_blocks_are_cached_in_direct_mode_with_a_size_that_is_set() {
    let store = Store::new();
    store.run("disk create vm1 1M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    client.write(0, &[1; BLOCK]).unwrap();
    client.flush().unwrap();
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    for (options, cached) in [("--io direct", false), ("--io direct --read-cache 8M", true), ("--read-cache 8M", false)]
    {
        let _server = store.serve(options);
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        for _ in 0..2 {
            assert!(client.read(0, BLOCK as u32).unwrap() == [1; BLOCK]);
        }
        let cache = store.run("status --json").json()["read_cache"].clone();
        assert_eq!(cache["hits"].as_u64().unwrap() > 0, cached, "{options}: {cache}");
    }
}
