//! Findings: a measured figure with its limit and whether the limit is met, as a table for users and as JSON.

use crate::error::{Doing, Error, Result};
use crate::machine::Machine;
use crate::plan::Plan;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Direction of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// The figure must be at least the limit.
    AtLeast,
    /// The figure must be at most the limit.
    AtMost,
}

/// A measured figure, with its limit if it has one.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The property of lamina that was measured.
    pub property: &'static str,
    /// What was measured.
    pub what: String,
    /// The figure.
    pub measured: f64,
    /// The unit of the figure.
    pub unit: &'static str,
    /// The limit; `None` if the figure has none.
    pub limit: Option<(Wanted, f64)>,
    /// Whether the limit is met; true if there is none.
    pub met: bool,
}

impl Finding {
    /// A figure without a limit.
    pub fn new(property: &'static str, what: impl Into<String>, measured: f64, unit: &'static str) -> Finding {
        Finding { property, what: what.into(), measured, unit, limit: None, met: true }
    }

    /// The same figure, which must be at least `limit`.
    pub fn at_least(self, limit: f64) -> Finding {
        Finding { met: self.measured >= limit, limit: Some((Wanted::AtLeast, limit)), ..self }
    }

    /// The same figure, which must be at most `limit`.
    pub fn at_most(self, limit: f64) -> Finding {
        Finding { met: self.measured <= limit, limit: Some((Wanted::AtMost, limit)), ..self }
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
        vec![self.property.to_owned(), self.what.clone(), measured, asked, verdict.into()]
    }
}

/// The results of one study.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The findings of the study.
    pub findings: Vec<Finding>,
    /// Raw samples.
    pub raw: Value,
}

/// Formats a number with four significant digits, or as a whole number if it is larger.
pub fn figure(number: f64) -> String {
    match number.abs() {
        n if n >= 100.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        n if n >= 1.0 => format!("{number:.2}"),
        _ => format!("{number:.3}"),
    }
}

/// A table whose first two columns are left-aligned, and the others right-aligned.
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
    table(&["property", "what", "measured", "asked", ""], &rows)
}

/// Stores an outcome as JSON in the results folder; returns the path.
pub fn keep(folder: &Path, study: &str, machine: &Machine, plan: &Plan, outcome: &Outcome) -> Result<PathBuf> {
    fs::create_dir_all(folder).doing(|| format!("creating {}", folder.display()))?;
    let stamp: String = machine.date.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    let path = folder.join(format!("{study}-{stamp}.json"));
    let value = json!({
        "study": study, "command": command(), "machine": machine, "plan": plan, "findings": outcome.findings, "raw": outcome.raw,
    });
    let text = serde_json::to_string_pretty(&value).map_err(|e| Error::Answer(format!("writing results: {e}")))?;
    fs::write(&path, text + "\n").doing(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// The command line of this run, with only the name of the program.
fn command() -> String {
    std::iter::once("lamina-study".to_owned()).chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ")
}

/// The latest samples of each cell that earlier runs of a study have stored in the results folder.
pub fn earlier(folder: &Path, study: &str) -> Result<Vec<Value>> {
    let listed = fs::read_dir(folder).doing(|| format!("listing {}", folder.display()))?;
    let mut paths: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
    let name = |path: &PathBuf| path.file_name().is_some_and(|name| is_of(&name.to_string_lossy(), study));
    paths.retain(name);
    // The names end with the time, so this order is the order of the measurements.
    paths.sort();
    let mut cells: Vec<Value> = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).doing(|| format!("reading {}", path.display()))?;
        let value: Value =
            serde_json::from_str(&text).map_err(|e| Error::Answer(format!("{}: {e}", path.display())))?;
        for cell in value["raw"].as_array().into_iter().flatten() {
            cells.retain(|other| other["cell"] != cell["cell"]);
            cells.push(cell.clone());
        }
    }
    Ok(cells)
}

fn is_of(name: &str, study: &str) -> bool {
    let stamp = name.strip_prefix(study).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".json"));
    stamp.is_some_and(|stamp| stamp.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn merged_reports_use_the_latest_samples_of_each_cell() {
        let folder = std::env::temp_dir().join(format!("study-earlier-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let put = |name: &str, raw: Value| fs::write(folder.join(name), json!({ "raw": raw }).to_string()).unwrap();
        put("grains-20260102T000000Z.json", json!([{ "cell": "a", "flat": 2 }]));
        put("grains-20260101T000000Z.json", json!([{ "cell": "a", "flat": 1 }, { "cell": "b", "flat": 1 }]));
        put("grains-of-something-else.json", json!([{ "cell": "b", "flat": 3 }]));
        let found = earlier(&folder, "grains").unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [json!({ "cell": "b", "flat": 1 }), json!({ "cell": "a", "flat": 2 })]);
    }

    #[test]
    fn a_value_equal_to_its_limit_passes_and_one_beyond_fails() {
        assert!(Finding::new("latency", "a", 0.95, "x").at_least(0.95).met);
        assert!(!Finding::new("latency", "a", 0.949, "x").at_least(0.95).met);
        assert!(Finding::new("latency", "a", 2.0, "ms").at_most(2.0).met);
        assert!(!Finding::new("latency", "a", f64::NAN, "ms").at_most(2.0).met);
        let text = shown(&[
            Finding::new("latency", "p99", 2.5, "ms").at_most(2.0),
            Finding::new("latency", "count", 300.0, ""),
        ]);
        assert!(text.contains("<= 2.00") && text.contains("MISSED") && text.contains("300"), "{text}");
    }
}
