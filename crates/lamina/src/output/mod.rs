//! What verbs print on stdout: text for people (aligned tables, rounded sizes), JSON for programs (exact bytes, seconds
//! since 1970). Both are made from the same [`Reply`], wherever it came from.

mod complaints;
mod extents;
pub mod human;
mod json;
mod table;
mod text;
mod tree;
mod words;

pub use complaints::{complain, complain_of_clones};
pub use extents::Extents;

use control::{Event, Reply, Request};
use std::io::{self, Write};

/// In which form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Form {
    /// What `--json` says.
    pub fn new(json: bool) -> Self {
        if json { Self::Json } else { Self::Text }
    }
}

/// Prints the answer to `request`, diffs excepted: those print themselves as they come ([`Extents`]).
pub fn print(out: &mut dyn Write, form: Form, request: &Request, reply: &Reply) -> io::Result<()> {
    match form {
        Form::Text => text::print(out, request, reply),
        Form::Json => print_json(out, &json::value(request, reply)),
    }
}

/// Prints one change on a line of its own, JSON as well.
pub fn print_event(out: &mut dyn Write, form: Form, event: &Event) -> io::Result<()> {
    match form {
        Form::Text => text::print_event(out, event)?,
        Form::Json => writeln!(out, "{}", json::event(event))?,
    }
    out.flush()
}

/// Prints one JSON value.
pub fn print_json(out: &mut dyn Write, value: &serde_json::Value) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}
