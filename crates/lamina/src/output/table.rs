//! Tables with aligned columns.

use super::printable::printable;
use std::io::{self, Write};

/// Space between columns.
const GAP: &str = "  ";

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows under a heading, each column as wide as its widest cell.
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

/// Width of a text in a terminal. Names may have any letters, so characters are counted, not bytes.
fn width(text: &str) -> usize {
    text.chars().count()
}

impl Table {
    /// A table without rows.
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row with a cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells.iter().map(|cell| printable(cell).into_owned()).collect());
    }

    /// Prints the table, without spaces at the ends of lines.
    pub fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| self.rows.iter().map(|row| width(&row[i])).fold(width(self.columns[i].0), usize::max))
            .collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut text = String::new();
            for ((cell, width), (_, align)) in cells.zip(&widths).zip(&self.columns) {
                match align {
                    Align::Left => text.push_str(&format!("{cell:<width$}{GAP}")),
                    Align::Right => text.push_str(&format!("{cell:>width$}{GAP}")),
                }
            }
            text.truncate(text.trim_end().len());
            text
        };
        writeln!(out, "{}", line(&mut self.columns.iter().map(|(head, _)| *head)))?;
        for row in &self.rows {
            writeln!(out, "{}", line(&mut row.iter().map(String::as_str)))?;
        }
        Ok(())
    }
}

/// Prints `name: value` lines with the values aligned.
pub fn print_facts(out: &mut dyn Write, facts: &[(&str, String)]) -> io::Result<()> {
    let widest = facts.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
    for (name, value) in facts {
        let pad = widest - width(name);
        // Only the first line of a value with several lines has the name.
        let colon = if name.is_empty() { ' ' } else { ':' };
        writeln!(out, "{name}{colon}{:pad$} {}", "", printable(value))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn columns_of_a_table_are_aligned() {
        let mut table = Table::new(&[("NAME", Align::Left), ("SIZE", Align::Right), ("TYPE", Align::Left)]);
        table.row(vec!["größe".into(), "1 B".into(), "thin".into()]);
        table.row(vec!["a".into(), "10 GiB".into(), String::new()]);
        let mut out = Vec::new();
        table.print(&mut out).unwrap();
        let expected = "NAME     SIZE  TYPE\ngröße     1 B  thin\na      10 GiB\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
