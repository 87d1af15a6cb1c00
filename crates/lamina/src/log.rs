//! The form of entries of the log: each is one line, whatever its fields contain.
//!
//! Fields contain text of clients, of other servers and of files. Without escapes, such a text could begin a line that
//! looks like an entry, or control the terminal that shows the log.

use crate::output::printable;
use std::fmt;
use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// Writes the message of an entry and its fields, as `name=value`, with escapes for control characters.
pub struct Escaped;

impl<'writer> FormatFields<'writer> for Escaped {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut shown = Shown { writer, first: true, result: Ok(()) };
        fields.record(&mut shown);
        shown.result
    }
}

struct Shown<'writer> {
    writer: Writer<'writer>,
    first: bool,
    result: fmt::Result,
}

impl Visit for Shown<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Fields with this prefix repeat the head of an entry that a library has written with the crate `log`.
        if self.result.is_err() || field.name().starts_with("log.") {
            return;
        }
        let value = format!("{value:?}");
        let gap = if self.first { "" } else { " " };
        self.first = false;
        self.result = match field.name() {
            "message" => write!(self.writer, "{gap}{}", printable(&value)),
            name => write!(self.writer, "{gap}{}={}", name.trim_start_matches("r#"), printable(&value)),
        };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_text_of_a_client_cannot_look_like_an_entry() {
        let kept = Kept::default();
        let writer = kept.clone();
        let log = tracing_subscriber::fmt().fmt_fields(Escaped).with_ansi(false).with_writer(move || writer.clone());
        tracing::subscriber::with_default(log.finish(), || {
            let evil = "x\u{1b}[31m\nERROR all is lost";
            tracing::info_span!("receive", peer = %evil).in_scope(|| {
                tracing::warn!(error = %evil, number = 5, text = "a b", "ended by {evil}");
            });
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let shown = "x\\u{1b}[31m\\nERROR all is lost";
        assert_eq!(text.lines().count(), 1, "{text:?}");
        assert!(text.contains(&format!("receive{{peer={shown}}}:")), "{text:?}");
        assert!(text.ends_with(&format!("ended by {shown} error={shown} number=5 text=\"a b\"\n")), "{text:?}");
    }
}
