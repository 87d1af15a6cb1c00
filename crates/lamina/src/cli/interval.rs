//! Intervals on the command line: `90s`, `30m`, `12h`, `7d`, `2w`.

use error::text::{TIME_UNITS, parse_time, time};

/// An interval in seconds, or `never`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Option<u64>);

/// Parses an interval, or `never`.
pub fn parse_interval(text: &str) -> Result<Interval, String> {
    if text == "never" {
        return Ok(Interval(None));
    }
    let wrong =
        || format!("'{text}' is no interval: write a number with s, m, h, d or w, such as 12h or 7d, or 'never'");
    let all = parse_time(text, &TIME_UNITS).filter(|all| *all > 0).ok_or_else(wrong)?;
    Ok(Interval(Some(all)))
}

/// An interval in its largest whole unit.
pub fn interval(seconds: u64) -> String {
    time(seconds, &TIME_UNITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_parsed_and_printed() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("12h", 43_200), ("1d", 86_400), ("2w", 1_209_600)] {
            assert_eq!(parse_interval(text), Ok(Interval(Some(seconds))));
            assert_eq!(interval(seconds), text);
        }
        assert_eq!(parse_interval("never"), Ok(Interval(None)));
        assert_eq!((interval(7 * 86_400), interval(61)), ("1w".to_owned(), "61s".to_owned()));
        for text in ["", "7", "d", "0d", "-1d", "7 d", "7D", "1.5h", "99999999999999999999d", "Never"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
