//! The extents of a diff, printed as they arrive, because a diff may be larger than memory.

use super::{Form, human};
use disk::{ChangedExtent, Point};
use std::io::{self, Write};

/// Width of a byte offset in the text output.
const OFFSET_WIDTH: usize = 16;

/// Printer of a diff.
pub struct Extents {
    out: Box<dyn Write + Send>,
    form: Form,
    head: (String, String, String),
    begun: bool,
    first: bool,
}

fn point(disk: &str, point: &Point) -> String {
    match point {
        Point::Head => disk.into(),
        Point::Snapshot(name) => format!("{disk}@{name}"),
    }
}

impl Extents {
    /// A printer to `out`.
    pub fn new(out: Box<dyn Write + Send>, form: Form, disk: &str, from: &Point, to: &Point) -> Self {
        let head = (disk.to_string(), point(disk, from), point(disk, to));
        Self { out, form, head, begun: false, first: true }
    }

    /// Prints the heading before the first extents, so that nothing is printed if the diff fails at once.
    fn begin(&mut self) -> io::Result<()> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        match self.form {
            Form::Text => writeln!(self.out, "{:>OFFSET_WIDTH$}  {:>OFFSET_WIDTH$}  CONTENT", "OFFSET", "LENGTH"),
            Form::Json => {
                let (disk, from, to) = &self.head;
                write!(
                    self.out,
                    "{{\n  \"disk\": {},\n  \"from\": {},\n  \"to\": {},\n  \"extents\": [",
                    serde_json::to_string(disk)?,
                    serde_json::to_string(from)?,
                    serde_json::to_string(to)?
                )
            }
        }
    }

    /// Prints the next extents.
    pub fn print(&mut self, batch: &[ChangedExtent]) -> io::Result<()> {
        self.begin()?;
        for extent in batch {
            let ChangedExtent { offset, length, zero } = *extent;
            match self.form {
                Form::Text => {
                    let content = if zero { "zero" } else { "data" };
                    writeln!(self.out, "{offset:>OFFSET_WIDTH$}  {length:>OFFSET_WIDTH$}  {content}")?;
                }
                Form::Json => {
                    let comma = if self.first { "" } else { "," };
                    self.first = false;
                    write!(self.out, "{comma}\n    {{\"offset\": {offset}, \"length\": {length}, \"zero\": {zero}}}")?;
                }
            }
        }
        Ok(())
    }

    /// Prints the end of a diff with these totals.
    pub fn end(mut self, extents: u64, bytes: u64) -> io::Result<()> {
        match self.form {
            Form::Text if extents == 0 => writeln!(self.out, "'{}' and '{}' do not differ", self.head.1, self.head.2)?,
            Form::Text => {
                writeln!(self.out, "{} in {}", human::size(bytes), human::count(extents, "changed extent"))?;
            }
            Form::Json => {
                self.begin()?;
                let close = if self.first { "]" } else { "\n  ]" };
                writeln!(self.out, "{close},\n  \"count\": {extents},\n  \"changed\": {bytes}\n}}")?;
            }
        }
        self.out.flush()
    }
}
