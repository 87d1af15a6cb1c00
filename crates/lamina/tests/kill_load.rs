//! A server is killed with SIGKILL at random times under writes, flushes, FUA, discards, snapshots, linked clones and
//! deletions, repeatedly on the same datastore.
//!
//! The number of kills is `LAMINA_KILLS` (20), the seed `LAMINA_SEED` (1). Each kill happens 1 to 300 ms after the load
//! begins or, in a quarter of the cases, while the server recovers from the previous kill. `make kills` runs a thousand
//! kills.

#![allow(clippy::unwrap_used)]

mod family;

use family::{Family, Tally};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::process;
use testkit::process::Store;

const KILLS: u64 = 20;
/// Capacities of the disks in each family. Small disks are read completely. The large disk has a map of many pages.
const CAPACITIES: [u64; 3] = [4 << 20, (3 << 20) + 512, 1 << 40];
/// Options of the server, used in turn.
const OPTIONS: [&str; 5] = [
    "",
    "--io direct --read-cache 8M",
    "--queue threads --metadata-cache 256K",
    "--io direct --queue threads",
    "--metadata-cache 1M --write-buffer 1M",
];
/// Interval of progress messages, in kills.
const TELL: u64 = 100;

fn setting(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap_or_else(|e| panic!("{variable}={text}: {e}")))
}

fn told(kills: u64, began: Instant, families: &[Family]) -> String {
    let sum = |of: fn(&Tally) -> u64| families.iter().map(|family| of(&family.tally)).sum::<u64>();
    let seconds = began.elapsed().as_secs_f64();
    format!(
        "{kills} kills in {seconds:.0} s ({:.2} s each): {} requests, {} flushes, {} snapshots, {} clones, {} deletions; \
         {} sectors were younger than they had to be, every check was clean",
        seconds / kills as f64,
        sum(|tally| tally.requests),
        sum(|tally| tally.flushes),
        sum(|tally| tally.snapshots),
        sum(|tally| tally.clones),
        sum(|tally| tally.deletions),
        sum(|tally| tally.younger),
    )
}

#[test]
fn a_server_killed_under_load_loses_nothing_that_was_flushed() {
    let (kills_asked, seed) = (setting("LAMINA_KILLS", KILLS), setting("LAMINA_SEED", 1));
    let store = Store::at(&std::env::temp_dir(), "4M");
    let families = CAPACITIES.into_iter().enumerate();
    let mut families: Vec<Family> =
        families.map(|(number, capacity)| Family::new(&store, number as u64, capacity, seed)).collect();
    let mut random = Random(seed);
    let began = Instant::now();
    let mut kills = 0;
    // On a slow machine few requests are sent between two kills, so more kills are made until there were enough
    // requests.
    let enough = |families: &[Family], kills: u64| {
        kills >= kills_asked && families.iter().all(|family| family.tally.requests > 5 * kills_asked)
    };
    while !enough(&families, kills) && kills < 4 * kills_asked {
        // In half of the cases `check` is the first to open the datastore, so that the test covers a `check` of a
        // datastore that is not recovered.
        let check_first = random.once_in(2);
        if check_first {
            store.is_clean();
        }
        let mut server = store.serve(&format!("--client-grace 0 {}", OPTIONS[(kills % 5) as usize]));
        std::thread::scope(|scope| {
            families.iter_mut().for_each(|family| drop(scope.spawn(|| family.verify(&store))));
        });
        if !check_first {
            store.is_clean();
        }
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            families.iter_mut().for_each(|family| drop(scope.spawn(|| family.work(&store, &killed))));
            std::thread::sleep(Duration::from_millis(1 + random.below(300)));
            killed.store(true, Ordering::Release);
            server.kill();
        });
        kills += 1;
        if random.once_in(4) {
            let mut opening = store.command("serve").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(random.below(25)));
            opening.kill().unwrap();
            assert_eq!(process::wait(&mut opening), None);
            kills += 1;
        }
        if kills % TELL == 0 {
            println!("{}", told(kills, began, &families));
        }
    }
    store.is_clean();
    let mut server = store.serve("");
    families.iter_mut().for_each(|family| family.verify(&store));
    assert_eq!(server.stop("TERM"), Some(0));
    println!("{}", told(kills, began, &families));
    assert!(enough(&families, kills));
}
