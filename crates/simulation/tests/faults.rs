//! Media that fail operations and flushes, and file systems that fill up, at random.

use simulation::operation::Profile;
use simulation::scenario;

#[test]
fn failed_operations_and_flushes_lose_no_acknowledged_data() {
    let statistics = scenario::all(Profile::Errors, 0..150);
    assert!(statistics.restarts > 150, "{statistics:?}");
}

#[test]
fn a_full_file_system_fails_only_writes() {
    let statistics = scenario::all(Profile::Full, 0..60);
    assert!(statistics.refused > 1000, "{statistics:?}");
}
