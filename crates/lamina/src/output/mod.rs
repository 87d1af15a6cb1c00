//! Output on stdout: text for users (aligned tables, rounded sizes), JSON for programs (exact bytes, seconds since
//! 1970). Both forms are made from the same [`Reply`].

mod complaints;
mod extents;
pub mod human;
mod json;
mod printable;
mod table;
mod text;
mod tree;
mod words;

pub use complaints::{complain, complain_of_clones, complain_of_error};
pub use extents::Extents;
pub use printable::printable;

use control::{Event, Reply, Request};
use std::io::{self, Write};

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Text for users.
    Text,
    /// JSON for programs.
    Json,
}

impl Form {
    /// The form that the option `--json` selects.
    pub fn new(json: bool) -> Self {
        if json { Self::Json } else { Self::Text }
    }
}

/// Prints the reply to `request`, except for diffs, which [`Extents`] prints.
pub fn print(out: &mut dyn Write, form: Form, request: &Request, reply: &Reply) -> io::Result<()> {
    match form {
        Form::Text => text::print(out, request, reply),
        Form::Json => print_json(out, &json::value(request, reply)),
    }
}

/// Prints an event on one line, also as JSON.
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
