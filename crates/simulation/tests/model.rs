//! 100,000 random operations over several disks, snapshots and clones, each compared with the model, with closing,
//! killing and opening in between.

use simulation::operation::Profile;
use simulation::scenario;

fn run(seeds: std::ops::Range<u64>) {
    let count = seeds.end - seeds.start;
    let statistics = scenario::all(Profile::Model, seeds);
    assert!(statistics.operations >= count * 5000);
    // Runs with few restarts or checkpoints would prove little.
    assert!(statistics.restarts > count && statistics.checkpoints > count * 20, "{statistics:?}");
}

#[test]
fn fifty_thousand_operations_equal_the_model() {
    run(0..10);
}

#[test]
fn fifty_thousand_more_operations_equal_the_model() {
    run(10..20);
}
