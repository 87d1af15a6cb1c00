//! Power cuts in every regime: metadata and maps larger than memory and journal, disks of 16 TiB, journals of several
//! sizes, hardly any free space, shared blocks without a snapshot, consecutive cuts, data
//! reduction. `lamina-soak --cuts 10000` makes many more.

use simulation::operation::Profile;
use simulation::run::Statistics;
use simulation::scenario;

fn run(profile: Profile, seeds: u64) -> Statistics {
    let statistics = scenario::all(profile, 0..seeds);
    assert!(statistics.cuts > 2 * seeds && statistics.checkpoints > 5 * seeds, "{statistics:?}");
    statistics
}

#[test]
fn with_more_dirty_metadata_than_the_journal_holds_nothing_is_lost() {
    let statistics = run(Profile::Scattered, 6);
    // The journal has room for 1,024 pages.
    assert!(statistics.dirty_max > 1024, "{statistics:?}");
}

#[test]
fn with_maps_beyond_the_metadata_cache_nothing_is_lost() {
    let statistics = run(Profile::Maps, 3);
    // The larger of the two caches has room for 256 pages.
    assert!(statistics.nodes_max > 256, "{statistics:?}");
}

#[test]
fn on_disks_of_16_tib_nothing_is_lost() {
    run(Profile::Wide, 60);
}

#[test]
fn with_journals_of_any_size_nothing_is_lost() {
    run(Profile::Journals, 60);
}

#[test]
fn on_a_file_system_that_is_nearly_full_nothing_is_lost() {
    let statistics = run(Profile::NearlyFull, 100);
    assert!(statistics.refused > 100, "{statistics:?}");
}

#[test]
fn with_blocks_that_heads_share_without_a_snapshot_nothing_is_lost() {
    run(Profile::Shared, 100);
}

#[test]
fn with_power_cuts_during_recovery_nothing_is_lost() {
    let statistics = run(Profile::Again, 80);
    assert!(statistics.interrupted_recoveries > 800, "{statistics:?}");
}

#[test]
fn with_compressed_and_deduplicated_blocks_nothing_is_lost() {
    let statistics = run(Profile::Reduced, 80);
    assert!(statistics.packed > 8000 && statistics.shared > 4000, "{statistics:?}");
}
