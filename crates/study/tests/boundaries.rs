//! Checks manifests and imports against the tables of allowed dependencies in ARCHITECTURE.md.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Names = BTreeSet<String>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The names in backquotes in a cell.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The rows of the table under a heading of ARCHITECTURE.md: first and second cell.
fn table(heading: &str) -> Vec<(String, String)> {
    let page = read(&root().join("ARCHITECTURE.md"));
    let section = page.split(&format!("\n## {heading}\n")).nth(1).expect("the heading is there");
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>());
    cells.map(|cells| (cells[0].to_owned(), cells.get(1).copied().unwrap_or_default().to_owned())).collect()
}

/// The keys in each section of a crate's manifest.
fn sections(manifest: &str) -> BTreeMap<String, Names> {
    let (mut out, mut section) = (BTreeMap::<String, Names>::new(), String::new());
    for line in manifest.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if let Some((key, _)) = line.split_once('=').filter(|_| !line.starts_with(['#', ' '])) {
            let key = key.trim().split('.').next().unwrap().to_owned();
            out.entry(section.clone()).or_default().insert(key);
        }
    }
    out
}

/// The folder of each crate, by the crate's name.
fn crates() -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path)).collect()
}

fn sources(folder: &Path, out: &mut Vec<(PathBuf, String)>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = read(&path);
            out.push((path, text));
        }
    }
}

/// The lines of a source file without comments and unit tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

fn none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn crates_use_what_the_page_allows() {
    let crates = crates();
    let allowed: BTreeMap<String, Names> = table("Dependencies")
        .into_iter()
        .flat_map(|(users, used)| {
            let used: Names = quoted(&used).into_iter().collect();
            quoted(&users).into_iter().map(move |user| (user, used.clone()))
        })
        .collect();
    let mut complaints: Vec<String> =
        allowed.keys().filter(|name| !crates.contains_key(*name)).map(|name| format!("no crate {name}")).collect();
    for (name, path) in &crates {
        let Some(allowed) = allowed.get(name) else {
            complaints.push(format!("{name} is not in the table of dependencies"));
            continue;
        };
        let sections = sections(&read(&path.join("Cargo.toml")));
        let keys = sections.iter().filter(|(section, _)| {
            *section == "dependencies" || (section.starts_with("target.") && section.ends_with(".dependencies"))
        });
        let used: Names = keys.flat_map(|(_, keys)| keys).filter(|key| crates.contains_key(*key)).cloned().collect();
        complaints.extend(used.difference(allowed).map(|other| format!("{name} may not depend on {other}")));
        complaints.extend(allowed.difference(&used).map(|other| format!("{name} does not depend on {other}")));
    }
    none(complaints);
}

#[test]
fn every_dependency_is_used() {
    let mut complaints = Vec::new();
    for (name, path) in crates() {
        // This crate compiles the sources of another crate.
        if name == "schedules" {
            continue;
        }
        let (mut product, mut tests) = (Vec::new(), Vec::new());
        sources(&path.join("src"), &mut product);
        ["tests", "examples", "benches"].iter().for_each(|folder| sources(&path.join(folder), &mut tests));
        let product: String = product.iter().map(|(_, text)| text.as_str()).collect();
        let tests: String = tests.iter().map(|(_, text)| text.as_str()).collect();
        for (section, keys) in sections(&read(&path.join("Cargo.toml"))) {
            let is_dev = section == "dev-dependencies";
            if !is_dev && !section.ends_with("dependencies") {
                continue;
            }
            for key in keys {
                let word = match key.as_str() {
                    "rustls-webpki" => "webpki".to_owned(),
                    _ => key.replace('-', "_"),
                };
                let used = |text: &str| {
                    let paths = [format!("{word}::"), format!("use {word};"), format!("use {word} as")];
                    paths.iter().any(|path| text.contains(path.as_str()))
                };
                if !(used(&product) || is_dev && used(&tests)) {
                    complaints.push(format!("{name}: {key} of its {section} is not used"));
                }
            }
        }
    }
    none(complaints);
}

/// Expands `a/{b,c}` to `a/b` and `a/c`.
fn expanded(path: &str) -> Vec<String> {
    match path.split_once('{').and_then(|(start, rest)| Some((start, rest.split_once('}')?.0))) {
        Some((start, names)) => names.split(',').map(|name| format!("{start}{name}")).collect(),
        None => vec![path.to_owned()],
    }
}

/// Adds the paths at the beginning of `text`, which are one path or a group in braces, to `out`, each after `prefix`
/// and with every beginning of the path.
fn paths(text: &str, prefix: &str, out: &mut Names) {
    if let Some(group) = text.strip_prefix('{') {
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    paths(group[start..at].trim(), prefix, out);
                    start = at + 1;
                    if c == '}' {
                        return;
                    }
                }
                _ => {}
            }
        }
        return;
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    if end > 0 {
        let path = format!("{prefix}{}", &text[..end]);
        if let Some(rest) = text[end..].strip_prefix("::") {
            paths(rest, &format!("{path}::"), out);
        }
        out.insert(path);
    }
}

/// The paths from the crate's root that a source file names. `levels` is the number of `super` that lead to the module
/// `parent`, which ends with `::` unless it is the root.
fn named(code: &str, levels: usize, parent: &str) -> Names {
    let mut out = Names::new();
    for (start, prefix) in [("crate::".to_owned(), ""), ("super::".repeat(levels), parent)] {
        for (at, _) in code.match_indices(&start) {
            if !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                paths(&code[at + start.len()..], prefix, &mut out);
            }
        }
    }
    out
}

#[test]
fn folders_import_nothing_that_the_page_forbids() {
    let mut complaints = Vec::new();
    let rules = table("Folders that do not import each other");
    assert!(!rules.is_empty());
    for (folders, forbidden) in rules {
        let folders: Vec<String> = quoted(&folders).iter().flat_map(|folder| expanded(folder)).collect();
        let last = |folder: &String| folder.rsplit('/').next().unwrap().to_owned();
        let mut forbidden_names: Names = quoted(&forbidden).into_iter().collect();
        if forbidden.starts_with("each other") {
            forbidden_names.extend(folders.iter().map(last));
        }
        for folder in &folders {
            let path = root().join(folder);
            let module = folder.split("/src/").nth(1).expect("a folder of sources").replace('/', "::");
            let parent = module.rsplit_once("::").map_or_else(String::new, |(parent, _)| format!("{parent}::"));
            let mut files = Vec::new();
            sources(&path, &mut files);
            let file = path.with_extension("rs");
            if file.exists() {
                files.push((file.clone(), read(&file)));
            }
            assert!(!files.is_empty(), "{folder} of ARCHITECTURE.md has no sources");
            for (file, text) in files.iter().filter(|(file, _)| !file.to_string_lossy().contains("/tests")) {
                let within = file.strip_prefix(&path).map_or(0, |rest| rest.components().count());
                let is_head = file.file_name().is_some_and(|name| name == "mod.rs");
                let levels = if within == 0 { 1 } else { within + usize::from(!is_head) };
                let names = named(&code(text), levels, &parent);
                let is_named = |name: &&String| names.contains(*name) || names.contains(&format!("{parent}{name}"));
                for name in forbidden_names.iter().filter(|name| **name != last(folder)).filter(is_named) {
                    let file = file.strip_prefix(root()).unwrap().display();
                    complaints.push(format!("{file} imports {name}, which {folder} must not import"));
                }
            }
        }
    }
    none(complaints);
}

#[test]
fn imports_are_found_in_every_form() {
    let code = "use crate::hosted::{Header, x};\nuse crate::{Error, flat::Flat, sesparse::{self, y}};\nsuper::super::ova::f();";
    let found: Vec<String> = named(code, 2, "").into_iter().collect();
    let expected = [
        "Error",
        "flat",
        "flat::Flat",
        "hosted",
        "hosted::Header",
        "hosted::x",
        "ova",
        "ova::f",
        "sesparse",
        "sesparse::self",
        "sesparse::y",
    ];
    assert_eq!(found, expected);
    let part = "use crate::engine::{Engine, log::{Cost, images}};\nuse crate::{engine::reserve::Claim, Error};";
    let found = named(&format!("{part}\nsuper::running::f();"), 1, "engine::");
    assert!(["Engine", "log", "reserve", "running"].iter().all(|name| found.contains(&format!("engine::{name}"))));
    assert_eq!(expanded("a/{b,c}"), ["a/b", "a/c"]);
}
