//! Random histories of writes and shares, compared with a model.
//!
//! `LAMINA_SHARED` sets their number, `LAMINA_SHARED_FROM` the first seed.

use super::super::cut::{Features, Histories, cut_histories};
use super::super::packed::histories::history;
use crate::engine::log::VERSION_SHARED_PACKS;

fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let from = number("LAMINA_SHARED_FROM", 0);
    from..from + number("LAMINA_SHARED", 4)
}

#[test]
fn random_histories_with_shares_keep_every_content() {
    for seed in seeds() {
        for packs_writes in [false, true] {
            let (shared, version) = history(seed, Features { shares: true, packs_writes, ..Features::default() });
            assert!(shared > 200, "{shared}");
            assert_eq!(version, VERSION_SHARED_PACKS);
        }
    }
}

/// The power is cut at any operation of the medium, also between the steps of a pass.
#[test]
fn power_cuts_between_sharing_and_writes_lose_nothing_durable() {
    for packs_writes in [false, true] {
        let done = cut_histories(seeds(), Features { shares: true, packs_writes, ..Features::default() });
        let Histories { shared, packed, shared_packs, .. } = done;
        assert!(shared > 300 && packed > 10 && shared_packs > 0, "{shared} {packed} {shared_packs}");
    }
}
