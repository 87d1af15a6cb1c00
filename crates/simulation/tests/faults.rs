//! Media that fail operations and flushes, and file systems that fill up, at random.

use simulation::operation::Profile;
use simulation::scenario;

#[test]
fn after_a_failed_operation_or_flush_nothing_acknowledged_is_lost() {
    let statistics = scenario::all(Profile::Errors, 0..150);
    assert!(statistics.restarts > 150, "{statistics:?}");
}

#[test]
fn a_full_file_system_refuses_writes_and_nothing_else() {
    let statistics = scenario::all(Profile::Full, 0..60);
    assert!(statistics.refused > 1000, "{statistics:?}");
}
