//! Replacing the access rules of a running server.

use export::access::Rules;
use export::nbd;
use std::path::Path;

/// Reads the rules from their file again. If the file has a mistake, the rules in use stay unchanged.
pub fn read_again(nbd: &nbd::Server, path: &Path) {
    match Rules::load(path) {
        Ok(rules) => {
            let count = rules.len();
            let closed = nbd.replace_rules(rules).unwrap_or_default();
            tracing::info!(file = %path.display(), rules = count, closed, "the access rules were read again");
        }
        Err(error) => tracing::error!(%error, "the access rules were not read again: those in use stay in force"),
    }
}
