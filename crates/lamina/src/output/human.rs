//! Numbers in text output.

use jiff::Timestamp;

/// The binary units from kibibytes on.
const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A size with about three digits: `512 B`, `10 GiB`, `1.46 TiB`. Exact sizes have no digits after the point.
pub fn size(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let power = (63 - bytes.leading_zeros()) / 10;
    let unit = 1u64 << (10 * power);
    let name = UNITS[power as usize - 1];
    if bytes.is_multiple_of(unit) {
        return format!("{} {name}", bytes / unit);
    }
    let value = bytes as f64 / unit as f64;
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {name}")
}

/// A time, given in seconds since 1970, as `2026-11-21 08:30:00Z`; the number itself if it is out of range.
pub fn time(seconds: u64) -> String {
    match i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok()) {
        Some(time) => time.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
        None => format!("{seconds} s after 1970"),
    }
}

/// A difference of sizes: `+512 B`, `-10 GiB`.
pub fn difference(bytes: i64) -> String {
    let sign = if bytes < 0 { '-' } else { '+' };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// A long time in its largest useful unit: `90 s`, `25 min`, `30 h`, `12 days`, `over 10 years`.
pub fn span(seconds: u64) -> String {
    const DAY: u64 = 86_400;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ if seconds < 3650 * DAY => format!("{} days", seconds / DAY),
        _ => "over 10 years".to_owned(),
    }
}

/// `1 disk`, `2 disks`.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.50 KiB"),
            (10 << 30, "10 GiB"),
            ((10 << 30) + 512, "10.0 GiB"),
            (64 << 40, "64 TiB"),
            (1_500_000_000_000, "1.36 TiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn times() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (951_782_399, "2000-02-28 23:59:59Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (1_709_164_800, "2024-02-29 00:00:00Z"),
            (1_795_248_000, "2026-11-21 08:00:00Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
        ] {
            assert_eq!(time(seconds), text);
        }
        assert_eq!(time(u64::MAX), "18446744073709551615 s after 1970");
    }

    #[test]
    fn every_day_of_two_cycles_follows_the_one_before() {
        let (mut year, mut month, mut day) = (1970u64, 1u64, 1u64);
        for number in 0..800 * 366 {
            assert_eq!(time(number * 86_400), format!("{year:04}-{month:02}-{day:02} 00:00:00Z"));
            let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
            let days = match month {
                2 => 28 + u64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > days {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
    }

    #[test]
    fn differences_and_long_times() {
        assert_eq!([0, 512, -(10 << 30), i64::MIN].map(difference), ["+0 B", "+512 B", "-10 GiB", "-8 EiB"]);
        for (seconds, text) in [
            (0, "0 s"),
            (119, "119 s"),
            (120, "2 min"),
            (7200, "2 h"),
            (172_799, "47 h"),
            (172_800, "2 days"),
            (3649 * 86_400, "3649 days"),
            (u64::MAX, "over 10 years"),
        ] {
            assert_eq!(span(seconds), text);
        }
    }
}
