//! The list of mutants: text files in `mutants/`, each with several blocks.
//!
//! ```text
//! === name
//! breaks: the effect of the fault, in one sentence
//! file: path from the root of the repository
//! test: arguments of `cargo test` that must fail
//! --- find
//! text that occurs exactly once in the file
//! --- replace
//! text that replaces it
//! ```
//!
//! Lines before the first block, and lines that begin with `#` between blocks, are comments.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

/// One deliberate fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// Name, unique in the list.
    pub name: String,
    /// The fault, in one sentence.
    pub breaks: String,
    /// The file that the fault changes, relative to the root of the repository.
    pub file: String,
    /// Arguments of `cargo test`.
    pub test: Vec<String>,
    /// The text that is replaced.
    pub find: String,
    /// The replacement.
    pub replace: String,
}

/// Why a mutant cannot be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// The text does not occur.
    Missing,
    /// The text occurs more than once.
    Ambiguous(usize),
}

impl Mutant {
    /// The text of the file with the fault planted.
    pub fn plant(&self, text: &str) -> Result<String, Stale> {
        let (range, new) = self.change(text)?;
        Ok(format!("{}{new}{}", &text[..range.start], &text[range.end..]))
    }

    /// The range of the file that the fault changes, and its replacement, without the text that `find` and `replace`
    /// have in common at their beginnings and ends.
    pub fn change(&self, text: &str) -> Result<(Range<usize>, &str), Stale> {
        let at = match text.matches(&self.find).count() {
            0 => return Err(Stale::Missing),
            1 => text.find(&self.find).ok_or(Stale::Missing)?,
            many => return Err(Stale::Ambiguous(many)),
        };
        let (old, new) = (self.find.as_str(), self.replace.as_str());
        let before = common(old.chars(), new.chars());
        let (old, new) = (&old[before..], &new[before..]);
        let after = common(old.chars().rev(), new.chars().rev());
        let start = at + before;
        Ok((start..start + old.len() - after, &new[..new.len() - after]))
    }
}

/// Number of bytes at the beginning that two texts have in common.
fn common(one: impl Iterator<Item = char>, other: impl Iterator<Item = char>) -> usize {
    one.zip(other).take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8()).sum()
}

impl Stale {
    /// The message for a stale mutant.
    pub fn explain(self, mutant: &Mutant) -> String {
        let what = match self {
            Stale::Missing => "does not contain its text any more".to_string(),
            Stale::Ambiguous(count) => format!("contains its text {count} times, and must contain it once"),
        };
        format!("{}: {} {what}: adapt the mutant to the code as it is now", mutant.name, mutant.file)
    }
}

/// Reads all lists of a folder, in the order of their names.
pub fn read(folder: &Path) -> Result<Vec<Mutant>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        if path.extension().is_some_and(|ending| ending == "txt") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        all.extend(parse(&text).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    let mut names = BTreeSet::new();
    match all.iter().find(|mutant| !names.insert(mutant.name.clone())) {
        Some(twice) => Err(format!("two mutants have the name {}", twice.name)),
        None => Ok(all),
    }
}

/// Reads one list.
pub fn parse(text: &str) -> Result<Vec<Mutant>, String> {
    let mut out = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("=== ") else { continue };
        let missing = |what: &str| format!("mutant {name} has no line '{what}'");
        let mut field = |what: &str| {
            let value = lines.next().and_then(|line| line.strip_prefix(what)).map(|value| value.trim().to_string());
            value.filter(|value| !value.is_empty()).ok_or_else(|| missing(what))
        };
        let (breaks, file, test) = (field("breaks:")?, field("file:")?, field("test:")?);
        if lines.next() != Some("--- find") {
            return Err(missing("--- find"));
        }
        let mut find = Vec::new();
        loop {
            match lines.next() {
                Some("--- replace") => break,
                Some(line) => find.push(line),
                None => return Err(missing("--- replace")),
            }
        }
        let mut replace = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with("=== ") && !line.starts_with('#')) {
            replace.push(line);
        }
        while replace.last().is_some_and(|line| line.is_empty()) {
            replace.pop();
        }
        let (find, replace) = (find.join("\n"), replace.join("\n"));
        if find.trim().is_empty() || find == replace {
            return Err(format!("mutant {name} changes nothing"));
        }
        let test = test.split_whitespace().map(String::from).collect();
        out.push(Mutant { name: name.trim().into(), breaks, file, test, find, replace });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "A comment.\n\n=== one\nbreaks: adds\nfile: a.rs\ntest: -p a --lib\n--- find\n    1 + 1\n--- replace\n    \
                        1 - 1\n\n# more\n=== two\nbreaks: loses\nfile: b.rs\ntest: -p b\n--- find\nx();\ny();\n--- replace\ny();\n";

    #[test]
    fn a_list_is_read_as_it_is_written() {
        let list = parse(LIST).expect("a list");
        assert_eq!(list.len(), 2);
        assert_eq!((list[0].find.as_str(), list[0].replace.as_str()), ("    1 + 1", "    1 - 1"));
        assert_eq!(list[0].test, ["-p", "a", "--lib"]);
        assert_eq!((list[1].find.as_str(), list[1].replace.as_str()), ("x();\ny();", "y();"));
        assert!(parse("=== one\nbreaks: adds\n").is_err());
        assert!(parse("=== one\nbreaks: a\nfile: a\ntest: a\n--- find\nx\n--- replace\nx\n").is_err());
    }

    #[test]
    fn a_fault_is_planted_once_or_not_at_all() {
        let list = parse(LIST).expect("a list");
        assert_eq!(list[0].plant("a\n    1 + 1\nb").as_deref(), Ok("a\n    1 - 1\nb"));
        assert_eq!(list[0].plant("a"), Err(Stale::Missing));
        assert_eq!(list[1].plant("x();\ny();\nx();\ny();\n"), Err(Stale::Ambiguous(2)));
        assert!(Stale::Missing.explain(&list[0]).contains("a.rs"));
    }

    #[test]
    fn a_change_has_only_what_differs() {
        let list = parse(LIST).expect("a list");
        assert_eq!(list[0].change("a\n    1 + 1\nb"), Ok((8..9, "-")));
        assert_eq!(list[1].change("x();\ny();"), Ok((0..5, "")));
        let mutant = Mutant { find: "f(„a“)".into(), replace: "f(„b“, „a“)".into(), ..list[0].clone() };
        assert_eq!(mutant.plant("ä f(„a“);").as_deref(), Ok("ä f(„b“, „a“);"));
    }

    #[test]
    fn the_list_of_this_repository_is_well_formed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../mutants");
        let list = read(&folder).expect("the list");
        assert!(list.len() >= 60);
        assert!(list.iter().all(|mutant| mutant.test.contains(&"-p".to_string())), "a test command names its crate");
    }
}
