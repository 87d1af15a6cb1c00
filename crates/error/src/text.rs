//! Characters that a text can contain although they are not seen.

/// Characters that are not shown, or change how others are shown, in ascending order: `Default_Ignorable_Code_Point` of
/// Unicode 16, which includes the bidirectional controls, the separators of lines and paragraphs, and the marks of
/// interlinear annotations.
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

/// Whether a character is not shown, or changes how others are shown: two names that look alike can differ in it, and
/// a terminal may show the characters after it in another order.
pub fn is_hidden(character: char) -> bool {
    let at = HIDDEN.partition_point(|(_, last)| *last < character);
    HIDDEN.get(at).is_some_and(|(first, _)| *first <= character)
}

#[cfg(test)]
mod tests {
    use super::*;

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
