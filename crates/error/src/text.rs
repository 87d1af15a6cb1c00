//! Text in messages and settings: sizes, times, and invisible characters.

/// Characters that are invisible or change how others are shown, in ascending order: those with the property
/// `Default_Ignorable_Code_Point` of Unicode 16, which include the bidirectional controls; the separators of lines and
/// paragraphs (U+2028, U+2029); and the marks of interlinear annotations (U+FFF9 to U+FFFB).
const HIDDEN: [(char, char); 18] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{2029}'),
    ('\u{202a}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

/// Whether a character is invisible or changes how others are shown. Names that differ only in such characters look
/// alike, and a terminal may show the characters that follow in another order.
pub fn is_hidden(character: char) -> bool {
    let at = HIDDEN.partition_point(|(_, last)| *last < character);
    HIDDEN.get(at).is_some_and(|(first, _)| *first <= character)
}

/// A number of bytes for a message, exact, in the largest binary unit without a fraction: `10 GiB`, `5000001 bytes`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = bytes.trailing_zeros() / 10;
    match (bytes, power) {
        (0, _) => "0 bytes".to_owned(),
        (1, _) => "1 byte".to_owned(),
        (_, 0) => format!("{bytes} bytes"),
        _ => format!("{} {}", bytes >> (10 * power), UNITS[power as usize - 1]),
    }
}

/// Units of times with their lengths in seconds, smallest first.
pub const TIME_UNITS: [(&str, u64); 5] = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 7 * 86_400)];

/// A time in the largest of some units of which it is a multiple: `36h`, `2w`.
pub fn time(seconds: u64, units: &[(&str, u64)]) -> String {
    let largest = units.iter().rev().find(|(_, length)| seconds.is_multiple_of(*length) && seconds >= *length);
    largest.map_or_else(|| format!("{seconds}s"), |(name, length)| format!("{}{name}", seconds / length))
}

/// Parses a number with one of some units, in seconds. `None` if the text is anything else, or if the time is too long.
pub fn parse_time(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, length) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (513, "513 bytes"),
            (1 << 10, "1 KiB"),
            (3 << 19, "1536 KiB"),
            (5_000_001, "5000001 bytes"),
            (65 << 40, "65 TiB"),
            (1 << 63, "8 EiB"),
            (u64::MAX, "18446744073709551615 bytes"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn controls_of_direction_and_characters_without_a_glyph_are_hidden_and_letters_are_not() {
        assert!(HIDDEN.is_sorted() && HIDDEN.iter().all(|(first, last)| first <= last));
        for hidden in ['\u{ad}', '\u{61c}', '\u{200b}', '\u{200f}', '\u{202e}', '\u{2067}', '\u{feff}', '\u{e0041}'] {
            assert!(is_hidden(hidden), "{}", hidden.escape_unicode());
        }
        for shown in ['a', '-', 'ß', '盘', 'ש', 'ع', '\u{2010}', '😀', '\u{301}', '\u{fffd}'] {
            assert!(!is_hidden(shown), "{}", shown.escape_unicode());
        }
    }
}
