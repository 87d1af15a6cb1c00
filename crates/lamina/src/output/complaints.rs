//! Errors, and failed parts of a request, printed to stderr with one line each, in addition to the reply. With `--json`
//! each line is a JSON object with the member `error` or `warning`.

use super::Form;
use super::printable::printable;
use crate::exit;
use control::{Cloned, Failure};
use error::ErrorKind;
use serde_json::{Value, json};
use std::io::{self, Write};

/// Prints an error. `kind` is the name that all protocols use for the error's kind, or `usage`.
pub fn complain_of_error(form: Form, kind: &str, sentence: &str, code: u8) {
    print_line(
        form,
        &line_of(sentence),
        || json!({ "error": { "kind": kind, "message": line_of(sentence), "exit_code": code } }),
    );
}

/// Prints the failures; returns the exit code of the first one.
pub fn complain<'a>(form: Form, failed: impl IntoIterator<Item = &'a (String, Failure)>) -> u8 {
    let mut first = 0;
    for (name, failure) in failed {
        let (message, code) = (line_of(failure.message()), exit::code(failure.kind()));
        print_line(form, &format!("{name}: {message}"), || {
            let kind = failure.kind().name();
            json!({ "error": { "name": name, "kind": kind, "message": message, "exit_code": code } })
        });
        if first == 0 {
            first = code;
        }
    }
    first
}

/// Prints which clones are incomplete or were not made; returns the exit code.
pub fn complain_of_clones(form: Form, cloned: &Cloned) -> u8 {
    let Cloned { made, failed, .. } = cloned;
    let warn = |text: String| print_line(form, &text, || json!({ "warning": text }));
    // The reason is printed only once, because the clones are copies of one guest and so have the same reason.
    let without = made.iter().filter(|one| one.without_identity.is_some()).count();
    if let Some(why) = made.iter().find_map(|one| one.without_identity.as_ref()) {
        warn(format!("{without} of {} still have their parent's identity: {why}", made.len()));
    }
    let same = made.iter().filter(|one| one.same_randomness).count();
    if same > 0 {
        warn(format!(
            "{same} of {} may draw their parent's random numbers for up to a minute: their guests have neither \
             reseed-kernel nor Perl nor Python to reseed the kernel",
            made.len()
        ));
    }
    // Clones that were not begun because of an interruption are counted on one line.
    let (stopped, failed): (Vec<_>, Vec<_>) =
        failed.iter().partition(|(_, failure)| failure.kind() == ErrorKind::Interrupted);
    if !stopped.is_empty() {
        warn(format!("stopped on request; {} were not made", stopped.len()));
    }
    match complain(form, failed) {
        0 if !stopped.is_empty() => exit::INTERRUPTED,
        code => code,
    }
}

/// A sentence with its line breaks removed.
fn line_of(sentence: &str) -> String {
    let lines: Vec<&str> = sentence.lines().map(str::trim).collect();
    lines.join(" ")
}

/// Prints a line. If stderr is closed, this fails, and the failure is ignored.
fn print_line(form: Form, text: &str, value: impl FnOnce() -> Value) {
    let mut err = io::stderr().lock();
    let _ = match form {
        Form::Text => writeln!(err, "lamina: {}", printable(text)),
        Form::Json => writeln!(err, "{}", value()),
    };
}
