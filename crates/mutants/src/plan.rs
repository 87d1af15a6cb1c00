//! Decides which mutants share one build, each behind a switch, and which are planted alone.

use crate::diagnostics::Fault;
use crate::list::Mutant;
use crate::switch::{self, Switched};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The files that mutants change.
pub struct Plan {
    files: BTreeMap<PathBuf, Source>,
    /// Mutants that were removed from the build because they do not compile behind a switch.
    taken_out: BTreeSet<String>,
}

struct Source {
    original: Result<String, String>,
    mutants: Vec<Mutant>,
    switched: Switched,
}

impl Plan {
    /// Reads the files below `root` and puts every mutant behind a switch for which this is possible.
    pub fn make(root: &Path, mutants: &[Mutant]) -> Self {
        let mut files: BTreeMap<PathBuf, Source> = BTreeMap::new();
        for mutant in mutants {
            let file = files.entry(PathBuf::from(&mutant.file)).or_insert_with(|| {
                let path = root.join(&mutant.file);
                let original = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()));
                Source { original, mutants: Vec::new(), switched: Switched::default() }
            });
            file.mutants.push(mutant.clone());
        }
        let mut plan = Self { files, taken_out: BTreeSet::new() };
        plan.files.values_mut().for_each(|file| file.switch(&plan.taken_out));
        plan
    }

    /// The texts of all files with switches, by their path from the root.
    pub fn texts(&self) -> BTreeMap<PathBuf, &str> {
        let readable = self.files.iter().filter(|(_, file)| file.original.is_ok());
        readable.map(|(path, file)| (path.clone(), file.switched.text.as_str())).collect()
    }

    /// The original text of a mutant's file, and the text with switches.
    pub fn file(&self, mutant: &Mutant) -> Result<(&str, &str), String> {
        let file = self.files.get(Path::new(&mutant.file)).ok_or_else(|| format!("{} is not planned", mutant.name))?;
        file.original.as_ref().map(|text| (text.as_str(), file.switched.text.as_str())).map_err(Clone::clone)
    }

    /// The reason why a mutant must be planted alone; `None` if it is behind a switch.
    pub fn alone(&self, mutant: &Mutant) -> Option<String> {
        let file = self.files.get(Path::new(&mutant.file))?;
        if self.taken_out.contains(&mutant.name) {
            return Some("it does not compile behind a switch".into());
        }
        match &file.original {
            Ok(_) => file.switched.alone.get(&mutant.name).cloned(),
            Err(error) => Some(error.clone()),
        }
    }

    /// Removes from the build the mutants in which the compiler has found errors; with `files`, all mutants in files
    /// with errors. Returns their names.
    pub fn take_out(&mut self, faults: &[Fault], files: bool) -> BTreeSet<String> {
        let mut out = BTreeSet::new();
        for fault in faults {
            let Some(file) = self.files.get(&fault.file) else { continue };
            let mutants = if files { file.switched.mutants() } else { file.switched.at(fault.byte) };
            out.extend(mutants.iter().cloned());
        }
        self.taken_out.extend(out.iter().cloned());
        let Self { files, taken_out } = self;
        files.values_mut().for_each(|file| file.switch(taken_out));
        out
    }
}

impl Source {
    fn switch(&mut self, taken_out: &BTreeSet<String>) {
        let mutants: Vec<_> = self.mutants.iter().filter(|mutant| !taken_out.contains(&mutant.name)).collect();
        if let Ok(text) = &self.original {
            self.switched = switch::switch(text, &mutants);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_that_do_not_compile_are_taken_out() {
        let folder = std::env::temp_dir().join(format!("lamina-mutants-plan-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("a.rs"), "fn a() { one() }\nfn b() { two(); three() }\n").expect("a file");
        let mutant = |name: &str, file: &str| Mutant {
            name: name.into(),
            breaks: "a test".into(),
            file: file.into(),
            test: Vec::new(),
            find: format!("{name}()"),
            replace: format!("no_{name}()"),
        };
        let mutants = [mutant("one", "a.rs"), mutant("two", "a.rs"), mutant("three", "a.rs"), mutant("four", "b.rs")];
        let mut plan = Plan::make(&folder, &mutants);
        std::fs::remove_dir_all(&folder).expect("the folder is there");

        assert_eq!(mutants.each_ref().map(|mutant| plan.alone(mutant).is_some()), [false, false, false, true]);
        assert!(plan.file(&mutants[3]).is_err());
        let at = |plan: &Plan, text: &str| plan.texts()[Path::new("a.rs")].find(text).expect("it is in the text");
        let fault = |file: &str, byte| Fault { file: file.into(), byte };
        assert!(plan.take_out(&[fault("c.rs", 0)], true).is_empty());
        let byte = at(&plan, "no_two");
        assert_eq!(plan.take_out(&[fault("a.rs", byte)], false), BTreeSet::from(["two".to_string()]));
        assert_eq!(mutants.each_ref().map(|mutant| plan.alone(mutant).is_some()), [false, true, false, true]);
        assert!(!plan.texts()[Path::new("a.rs")].contains("no_two"));
        assert_eq!(plan.take_out(&[fault("a.rs", 0)], true).len(), 2);
        let (original, switched) = plan.file(&mutants[0]).expect("a file");
        assert_eq!(original, switched);
    }

    #[test]
    fn the_mutants_of_this_repository_are_built_together() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mutants = crate::list::read(&root.join("mutants")).expect("the list");
        let plan = Plan::make(&root, &mutants);
        let alone = mutants.iter().filter(|mutant| plan.alone(mutant).is_some()).count();
        assert!(alone < mutants.len() / 10, "{alone} of {} are planted alone", mutants.len());
        for (path, text) in plan.texts() {
            assert!(syn::parse_file(text).is_ok(), "{} is not a file of Rust any more", path.display());
        }
    }
}
