//! Random histories of writes and shares, compared with a model.
//!
//! `LAMINA_SHARED` sets their number, `LAMINA_SHARED_FROM` the first seed.

use super::super::cut::{Features, Histories, cut_histories};
use super::super::packed::histories::history;

fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let from = number("LAMINA_SHARED_FROM", 0);
    from..from + number("LAMINA_SHARED", 4)
}

#[test]
fn random_histories_with_shares_keep_every_content() {
    for seed in seeds() {
        let shared = history(seed, Features { shares: true, ..Features::default() });
        assert!(shared > 200, "{shared}");
    }
}

/// The power is cut at any operation of the medium, also between the steps of a pass.
#[test]
fn power_cuts_between_sharing_and_writes_lose_nothing_durable() {
    let Histories { shared, packed, .. } = cut_histories(seeds(), Features { shares: true, ..Features::default() });
    assert!(shared > 500 && packed > 10, "{shared} {packed}");
}
