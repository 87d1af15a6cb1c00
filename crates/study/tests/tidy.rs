//! Rules for the repository: size and form of files, meaningless names, broken links.
//!
//! Each rule is a function from the repository to a list of violations, all of which are printed at once.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Most lines of a file that are neither blank nor comments.
const CODE_LINES_MAX: usize = 600;
/// Most characters of a line of code.
const LINE_LENGTH_MAX: usize = 120;
/// Names that say nothing about the content.
const EMPTY_NAMES: [&str; 8] = ["util", "utils", "common", "helper", "helpers", "misc", "stuff", "manager"];
/// Folders that are not checked, because they are generated or not in the repository.
const PASSED_OVER: [&str; 7] = ["target", ".git", "corpus", "artifacts", "coverage", "seeds", "bench-results"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A file of the repository: its path from the root, with `/`, and its text.
struct Text {
    path: String,
    text: String,
}

fn collect(folder: &Path, root: &Path, endings: &[&str], out: &mut Vec<Text>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !PASSED_OVER.contains(&name.as_str()) {
                collect(&path, root, endings, out);
            }
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            let path_text = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            out.push(Text { path: path_text, text: std::fs::read_to_string(&path).unwrap() });
        }
    }
}

fn files(ending: &str) -> Vec<Text> {
    let mut out = Vec::new();
    collect(&root(), &root(), &[ending], &mut out);
    out.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!out.is_empty());
    out
}

fn is_test(path: &str) -> bool {
    path.starts_with("crates/testkit/")
        || path.contains("/tests/")
        || path.contains("/examples/")
        || path.ends_with("/tests.rs")
        || path.ends_with("/testbed.rs")
}

fn none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn files_are_short_and_begin_with_a_description() {
    let mut complaints = Vec::new();
    for file in files(".rs") {
        let code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        let lines = file.text.lines().filter(code).count();
        if lines > CODE_LINES_MAX {
            complaints.push(format!("{}: {lines} lines of code, at most {CODE_LINES_MAX}", file.path));
        }
        if !file.text.starts_with("//! ") {
            complaints.push(format!("{}: does not begin with //! and what it is", file.path));
        }
        for (number, line) in (1..).zip(file.text.lines()) {
            let length = line.chars().count();
            // A line with a string may be longer, because the string is broken at a suitable point.
            let sentence = line.contains('"') || line.ends_with('\\');
            if length > LINE_LENGTH_MAX && !sentence {
                complaints.push(format!("{}:{number}: {length} characters, at most {LINE_LENGTH_MAX}", file.path));
            }
        }
    }
    none(complaints);
}

#[test]
fn names_are_specific() {
    let mut complaints = Vec::new();
    for file in files(".rs") {
        let parts = file.path.trim_end_matches(".rs").split(['/', '_', '-']);
        complaints.extend(
            parts.filter(|part| EMPTY_NAMES.contains(part)).map(|part| format!("{}: '{part}' says nothing", file.path)),
        );
    }
    none(complaints);
}

#[test]
fn no_markers_of_unfinished_work_are_left() {
    // The markers are assembled here from parts, so that this file does not contain them.
    let markers: Vec<String> = [
        ("TO", "DO"),
        ("FIX", "ME"),
        ("XX", "X:"),
        ("HA", "CK"),
        ("todo", "!("),
        ("dbg", "!("),
        ("unimplemented", "!("),
    ]
    .map(|(a, b)| format!("{a}{b}"))
    .into();
    let mut complaints = Vec::new();
    for file in files(".rs").into_iter().chain(files(".md")) {
        for (number, line) in (1..).zip(file.text.lines()) {
            if let Some(marker) = markers.iter().find(|marker| line.contains(marker.as_str())) {
                complaints.push(format!("{}:{number}: {marker}", file.path));
            }
        }
    }
    none(complaints);
}

#[test]
fn only_tests_may_unwrap_and_only_the_backend_is_unsafe() {
    let mut complaints = Vec::new();
    for file in files(".rs").iter().filter(|file| file.path.starts_with("crates/")) {
        let product = if is_test(&file.path) { "" } else { file.text.split("#[cfg(test)]").next().unwrap() };
        for allowance in ["allow(clippy::unwrap_used", "allow(clippy::undocumented_unsafe_blocks"] {
            if product.contains(allowance) {
                complaints.push(format!("{}: {allowance}) outside tests", file.path));
            }
        }
        let is_root = file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs");
        let backend = file.path.starts_with("crates/backend/");
        if is_root && !backend && !file.text.contains("#![forbid(unsafe_code)]") {
            complaints.push(format!("{}: does not forbid unsafe code", file.path));
        }
    }
    none(complaints);
}

/// The anchor of a heading in common renderers of Markdown.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.trim().to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let mut code = false;
    let headings = text.lines().filter(|line| {
        code ^= line.starts_with("```");
        !code && line.starts_with('#')
    });
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// The targets of inline links outside code blocks.
fn links(text: &str) -> Vec<&str> {
    let mut code = false;
    let mut out = Vec::new();
    for line in text.lines() {
        code ^= line.starts_with("```");
        if !code {
            out.extend(line.split("](").skip(1).filter_map(|rest| rest.split(')').next()));
        }
    }
    out
}

#[test]
fn links_in_documents_have_existing_targets() {
    let root = root();
    let mut complaints = Vec::new();
    for file in files(".md") {
        for link in links(&file.text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let folder = root.join(&file.path).parent().unwrap().to_path_buf();
            let target = if path.is_empty() { root.join(&file.path) } else { folder.join(path) };
            if !target.exists() {
                complaints.push(format!("{}: {link} is not there", file.path));
            } else if !fragment.is_empty() {
                let text = std::fs::read_to_string(&target).unwrap();
                if !anchors(&text).contains(fragment) {
                    complaints.push(format!("{}: {link}: no such heading", file.path));
                }
            }
        }
    }
    none(complaints);
}

#[test]
fn files_named_in_documents_and_comments_exist() {
    let root = root();
    let mut complaints = Vec::new();
    for file in files(".md").into_iter().chain(files(".rs")) {
        for word in file.text.split(|c: char| !(c.is_alphanumeric() || "/._-@".contains(c))) {
            let word = word.trim_end_matches(['.', '/']);
            let ours = ["crates/", "docs/", "scripts/", "packaging/"].iter().any(|start| word.starts_with(start));
            // A path with a placeholder is not checked.
            if ours && !word.contains("..") && !root.join(word).exists() {
                complaints.push(format!("{}: {word} does not exist", file.path));
            }
        }
    }
    none(complaints);
}

#[test]
fn every_decision_is_in_the_index() {
    let folder = root().join("docs/adr");
    let index = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let mut complaints = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        if name != "README.md" && !index.contains(&format!("({name})")) {
            complaints.push(format!("docs/adr/README.md does not list {name}"));
        }
    }
    none(complaints);
}
