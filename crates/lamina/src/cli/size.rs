//! Sizes on the command line: `512`, `64K`, `10G`, `1.5T`, in binary units as in qemu-img.
//!
//! Parsing is exact, without floating point: `1.5T` is exactly 1.5 * 2^40 bytes, and a fraction that is not a whole
//! number of bytes is refused.

use disk::RATE_MIN;
use error::text::size;

/// The units, each 1024 times the one before it.
const UNITS: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// Most digits after the point: enough for every byte of the largest unit.
const FRACTION_DIGITS_MAX: usize = 18;

/// Parses a size in bytes. `10G`, `10GiB` and `10g` mean the same; `10GB` is refused, because it is ambiguous.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("'{text}' is not a size: write bytes, or a number with K, M, G, T, P or E, such as 10G or 1.5T");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let power = match unit {
        "" => 0,
        _ => {
            let (first, rest) = unit.split_at(unit.chars().next().map_or(0, char::len_utf8));
            let letter = first.chars().next().ok_or_else(wrong)?.to_ascii_uppercase();
            let power = UNITS.iter().position(|u| *u == letter).ok_or_else(wrong)?;
            if !(rest.is_empty() || power > 0 && rest == "iB") {
                return Err(wrong());
            }
            power
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.contains('.') || fraction.len() > FRACTION_DIGITS_MAX {
        return Err(wrong());
    }
    let too_large = || format!("'{text}' is larger than any disk can be");
    let scale = 1u128 << (10 * power);
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) * scale;
    if !fraction.is_empty() {
        let numerator: u128 = fraction.parse().map_err(|_| wrong())?;
        let denominator = 10u128.pow(fraction.len() as u32);
        let product = numerator * scale;
        if !product.is_multiple_of(denominator) {
            return Err(format!("'{text}' is not a whole number of bytes"));
        }
        bytes += product / denominator;
    }
    u64::try_from(bytes).map_err(|_| too_large())
}

/// Parses a rate in bytes per second: as a size, of at least [`RATE_MIN`], or 0 for no limit.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        1..RATE_MIN => Err(format!("the least is {} per second, and 0 is no limit", size(RATE_MIN))),
        rate => Ok(rate),
    }
}

/// A parser as [`parse_size`] for sizes of memory, which are at least `least` bytes.
pub fn memory(least: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let bytes = usize::try_from(parse_size(text)?);
        let bytes = bytes.map_err(|_| format!("'{text}' is more than this machine can address"))?;
        match bytes >= least {
            true => Ok(bytes),
            false => Err(format!("the least is {}", size(least as u64))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_are_parsed_in_all_usual_forms() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("1k", 1024),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("1.5T", 3 << 39),
            ("0.5K", 512),
            ("64T", 64 << 40),
            ("15.9990234375E", u64::MAX - (1 << 50) + 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in [
            "",
            " ",
            "G",
            ".",
            ".5G",
            "5.",
            "1..5G",
            "1.2.3G",
            "-1",
            "+1",
            "1e9",
            "0x10",
            "10GB",
            "10 G",
            "10Gi",
            "10X",
            "1KK",
            "10Gé",
            "é",
            "16E",
            "18446744073709551616",
            "99999999999999999999999999",
            "0.3K",
            "1.5",
            "NaN",
            "inf",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn memory_below_the_least_is_refused() {
        let parse = memory(1 << 20);
        assert_eq!((parse("1M"), parse("2M")), (Ok(1 << 20), Ok(2 << 20)));
        for text in ["0", "1", "1048575"] {
            assert_eq!(parse(text), Err("the least is 1 MiB".to_owned()), "{text}");
        }
        assert!(parse("1X").unwrap_err().contains("is not a size"));
    }

    #[test]
    fn a_rate_at_which_work_would_not_end_is_refused() {
        assert_eq!((parse_rate("0"), parse_rate("64K"), parse_rate("100M")), (Ok(0), Ok(64 << 10), Ok(100 << 20)));
        for text in ["1", "65535"] {
            assert_eq!(parse_rate(text), Err("the least is 64 KiB per second, and 0 is no limit".to_owned()), "{text}");
        }
        assert!(parse_rate("1X").unwrap_err().contains("is not a size"));
    }

    #[test]
    fn every_exact_fraction_of_every_unit() {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let power = 1 + (state >> 60) as usize % 6;
            let quarters = (state >> 20) % 0x3F + 1;
            let text = format!("{}.{:02}{}", quarters / 4, quarters % 4 * 25, UNITS[power]);
            let expected = u128::from(quarters) << (10 * power - 2);
            match u64::try_from(expected) {
                Ok(bytes) => assert_eq!(parse_size(&text), Ok(bytes), "{text}"),
                Err(_) => assert!(parse_size(&text).is_err(), "{text}"),
            }
        }
    }
}
