//! More than 1,000 seeds of power cuts: at any request to the medium, inside any operation of the datastore, and again
//! in recovery. Unflushed writes are dropped, reordered, and torn at 512 bytes.

use simulation::operation::Profile;
use simulation::scenario;

fn run(profile: Profile, seeds: std::ops::Range<u64>) {
    let count = seeds.end - seeds.start;
    let statistics = scenario::all(profile, seeds);
    assert!(statistics.restarts > 2 * count && statistics.interrupted_recoveries > count / 8, "{statistics:?}");
}

#[test]
fn the_first_250_seeds_lose_nothing() {
    run(Profile::PowerCuts, 0..250);
}

#[test]
fn the_second_250_seeds_lose_nothing() {
    run(Profile::PowerCuts, 250..500);
}

#[test]
fn the_third_250_seeds_lose_nothing() {
    run(Profile::PowerCuts, 500..750);
}

#[test]
fn the_fourth_250_seeds_lose_nothing() {
    run(Profile::PowerCuts, 750..1000);
}

#[test]
fn with_little_space_400_seeds_lose_nothing() {
    run(Profile::Tight, 0..400);
}
