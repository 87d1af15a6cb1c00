//! Environment variables by which a user runs more or other random cases than the usual ones.

/// The number in an environment variable; `usual` if the variable is not set.
pub fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}
