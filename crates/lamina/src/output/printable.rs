//! Text from files and other programs, made harmless for a terminal.
//!
//! Names, descriptions and fields of image files may contain any characters. A terminal carries out control characters
//! and changes the order of letters after bidirectional controls, so text output has them as escapes. JSON output has
//! escapes of its own.

use error::text::is_hidden;
use std::borrow::Cow;

/// Whether a terminal does something else with a character than showing it.
fn is_harmful(character: char) -> bool {
    character.is_control() || is_hidden(character)
}

/// The text with harmful characters as escapes such as `\u{1b}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_harmful(character) {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_of_terminals_are_escaped_and_letters_are_not() {
        assert_eq!(printable("größe 盘"), "größe 盘");
        assert_eq!(printable("\u{1b}]0;title\u{7}\r\n"), "\\u{1b}]0;title\\u{7}\\r\\n");
        assert_eq!(printable("a\u{202e}b\u{200b}\u{9b}"), "a\\u{202e}b\\u{200b}\\u{9b}");
        assert_eq!(printable("a\u{61c}b\u{ad}\u{2028}"), "a\\u{61c}b\\u{ad}\\u{2028}");
    }
}
