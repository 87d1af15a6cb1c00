//! The copy of the repository in which faults are planted.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders that are not copied.
const LEFT_OUT: [&str; 3] = ["target", ".git", "bench-results"];

/// Makes `to` a copy of `from` in which some files have another text, and removes all other files from `to`. Files that
/// have the right content already keep their modification times, so that cargo does not build them again.
pub fn mirror(from: &Path, to: &Path, texts: &BTreeMap<PathBuf, &str>) -> Result<(), String> {
    mirror_folder(from, to, Path::new(""), texts)
}

/// Writes a text to a file, unless the file has this text already.
pub fn write(path: &Path, text: &[u8]) -> Result<(), String> {
    if fs::read(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    fs::write(path, text).map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn mirror_folder(from: &Path, to: &Path, below: &Path, texts: &BTreeMap<PathBuf, &str>) -> Result<(), String> {
    fs::create_dir_all(to).map_err(|error| failed(to, error))?;
    let mut kept = Vec::new();
    for entry in fs::read_dir(from).map_err(|error| failed(from, error))? {
        let entry = entry.map_err(|error| failed(from, error))?;
        let (name, path) = (entry.file_name(), entry.path());
        let kind = entry.file_type().map_err(|error| failed(&path, error))?;
        if LEFT_OUT.iter().any(|left_out| name == *left_out) {
            continue;
        }
        let (target, below) = (to.join(&name), below.join(&name));
        if kind.is_dir() {
            mirror_folder(&path, &target, &below, texts)?;
        } else if let Some(text) = texts.get(&below) {
            write(&target, text.as_bytes())?;
        } else if kind.is_file() {
            let content = fs::read(&path).map_err(|error| failed(&path, error))?;
            if fs::read(&target).ok().as_ref() != Some(&content) {
                fs::copy(&path, &target).map_err(|error| failed(&target, error))?;
            }
        } else {
            continue;
        }
        kept.push(name);
    }
    for entry in fs::read_dir(to).map_err(|error| failed(to, error))? {
        let entry = entry.map_err(|error| failed(to, error))?;
        let path = entry.path();
        if kept.contains(&entry.file_name()) || LEFT_OUT.iter().any(|left_out| entry.file_name() == *left_out) {
            continue;
        }
        let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_given_texts_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("lamina-mutants-tree-{}", std::process::id()));
        let (from, to) = (folder.join("from"), folder.join("to"));
        for (path, text) in [("from/a/b.rs", "b"), ("from/a/c.rs", "c"), ("from/target/d", "d"), ("to/a/old.rs", "old")]
        {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        let texts = BTreeMap::from([(PathBuf::from("a/c.rs"), "other")]);
        mirror(&from, &to, &texts).expect("a copy");
        let time = |path: &str| fs::metadata(to.join(path)).and_then(|data| data.modified()).expect("a file");
        let times = [time("a/b.rs"), time("a/c.rs")];
        mirror(&from, &to, &texts).expect("a second copy");
        assert_eq!(times, [time("a/b.rs"), time("a/c.rs")]);
        assert_eq!(fs::read_to_string(to.join("a/b.rs")).expect("a file"), "b");
        assert_eq!(fs::read_to_string(to.join("a/c.rs")).expect("a file"), "other");
        assert!(!to.join("a/old.rs").exists() && !to.join("target").exists());
        fs::remove_dir_all(&folder).expect("the folder is there");
    }
}
