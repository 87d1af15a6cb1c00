//! Findings: what a bar asks, what was measured, whether it is met; as a table for people and JSON for keeping.

use crate::error::{Doing, Error, Result};
use crate::machine::Machine;
use crate::plan::Plan;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Which side of the limit is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// At least the limit.
    AtLeast,
    /// At most the limit.
    AtMost,
}

/// A bar: a number among those of the native format, or among those of VMware's formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bar {
    /// Of the native format.
    Native(u8),
    /// Of VMware's formats.
    Vmdk(u8),
}

impl From<u8> for Bar {
    fn from(number: u8) -> Bar {
        Bar::Native(number)
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bar::Native(number) => write!(to, "{number}"),
            Bar::Vmdk(number) => write!(to, "vmdk {number}"),
        }
    }
}

impl Serialize for Bar {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// One figure, with what is asked of it if anything.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Which bar it belongs to.
    pub bar: Bar,
    /// What was measured.
    pub what: String,
    /// The figure.
    pub measured: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What is asked, if anything.
    pub limit: Option<(Wanted, f64)>,
    /// Whether it is met; nothing asked is met.
    pub met: bool,
}

impl Finding {
    /// A figure that must be at least `limit`.
    pub fn at_least(
        bar: impl Into<Bar>,
        what: impl Into<String>,
        measured: f64,
        limit: f64,
        unit: &'static str,
    ) -> Finding {
        let met = measured >= limit;
        Finding { bar: bar.into(), what: what.into(), measured, unit, limit: Some((Wanted::AtLeast, limit)), met }
    }

    /// A figure that must be at most `limit`.
    pub fn at_most(
        bar: impl Into<Bar>,
        what: impl Into<String>,
        measured: f64,
        limit: f64,
        unit: &'static str,
    ) -> Finding {
        let met = measured <= limit;
        Finding { bar: bar.into(), what: what.into(), measured, unit, limit: Some((Wanted::AtMost, limit)), met }
    }

    /// A figure worth knowing, of which nothing is asked.
    pub fn note(bar: impl Into<Bar>, what: impl Into<String>, measured: f64, unit: &'static str) -> Finding {
        Finding { bar: bar.into(), what: what.into(), measured, unit, limit: None, met: true }
    }

    fn row(&self) -> Vec<String> {
        let asked = match self.limit {
            Some((Wanted::AtLeast, limit)) => format!(">= {}", figure(limit)),
            Some((Wanted::AtMost, limit)) => format!("<= {}", figure(limit)),
            None => String::new(),
        };
        let verdict = match (self.limit, self.met) {
            (None, _) => "",
            (_, true) => "met",
            (_, false) => "MISSED",
        };
        let measured = format!("{} {}", figure(self.measured), self.unit);
        vec![self.bar.to_string(), self.what.clone(), measured, asked, verdict.into()]
    }
}

/// What one study brings home.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Its findings.
    pub findings: Vec<Finding>,
    /// All samples.
    pub raw: Value,
}

/// Four significant digits or whole numbers, whichever is longer.
pub fn figure(number: f64) -> String {
    match number.abs() {
        n if n >= 100.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        n if n >= 1.0 => format!("{number:.2}"),
        _ => format!("{number:.3}"),
    }
}

/// Lines of columns: the first two to the left, the others to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let (before, after) = if i < 2 { ("", pad.as_str()) } else { (pad.as_str(), "") };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Findings as a table.
pub fn shown(findings: &[Finding]) -> String {
    let rows: Vec<Vec<String>> = findings.iter().map(Finding::row).collect();
    table(&["bar", "what", "measured", "asked", ""], &rows)
}

/// Keeps an outcome as JSON in the results folder; where.
pub fn keep(folder: &Path, study: &str, machine: &Machine, plan: &Plan, outcome: &Outcome) -> Result<PathBuf> {
    fs::create_dir_all(folder).doing(|| format!("creating {}", folder.display()))?;
    let stamp: String = machine.date.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    let path = folder.join(format!("{study}-{stamp}.json"));
    let value = json!({
        "study": study, "machine": machine, "plan": plan, "findings": outcome.findings, "raw": outcome.raw,
    });
    let text = serde_json::to_string_pretty(&value).map_err(|e| Error::Answer(format!("writing results: {e}")))?;
    fs::write(&path, text + "\n").doing(|| format!("writing {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_met_at_the_limit_and_missed_beyond() {
        assert!(Finding::at_least(3, "a", 0.95, 0.95, "x").met);
        assert!(!Finding::at_least(3, "a", 0.949, 0.95, "x").met);
        assert!(Finding::at_most(6, "a", 2.0, 2.0, "ms").met);
        assert!(!Finding::at_most(6, "a", f64::NAN, 2.0, "ms").met);
        let text = shown(&[Finding::at_most(6, "p99", 2.5, 2.0, "ms"), Finding::note(6, "count", 300.0, "")]);
        assert!(text.contains("<= 2.00") && text.contains("MISSED") && text.contains("300"), "{text}");
    }
}
