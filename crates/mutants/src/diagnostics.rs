//! Finds the places of errors in the messages of cargo and rustc.

use serde_json::Value;
use std::path::{Component, Path, PathBuf};

/// A place in a file at which the compiler has reported an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file, relative to the root of the workspace.
    pub file: PathBuf,
    /// The byte offset of the place in the file.
    pub byte: usize,
}

/// The places to which errors refer, from the lines of `cargo --message-format=json`.
pub fn faults(lines: &str) -> Vec<Fault> {
    let mut out = Vec::new();
    for message in errors(lines) {
        let spans = message["spans"].as_array().map_or(&[][..], Vec::as_slice);
        spans.iter().filter(|span| span["is_primary"] == true).for_each(|span| add(span, &mut out));
    }
    out
}

/// The errors in the form that rustc prints on a terminal.
pub fn rendered(lines: &str) -> String {
    errors(lines).filter_map(|message| message["rendered"].as_str().map(String::from)).collect()
}

fn errors(lines: &str) -> impl Iterator<Item = Value> + '_ {
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let messages = lines.filter(|line| line["reason"] == "compiler-message").map(|mut line| line["message"].take());
    messages.filter(|message| message["level"] == "error")
}

/// Adds the place of a span, and the places of the macro calls from which it was expanded.
fn add(span: &Value, out: &mut Vec<Fault>) {
    if let (Some(file), Some(byte)) = (span["file_name"].as_str(), span["byte_start"].as_u64()) {
        out.push(Fault { file: plain(Path::new(file)), byte: byte as usize });
    }
    if let Some(call) = span["expansion"].get("span") {
        add(call, out);
    }
}

/// Removes `..` from a path, as in the path of a file that two crates share.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_errors_are_found() {
        let lines = concat!(
            "not JSON\n",
            r#"{"reason":"compiler-message","message":{"level":"warning","spans":[{"file_name":"a.rs","byte_start":1,"#,
            r#""is_primary":true,"expansion":null}]}}"#,
            "\n",
            r#"{"reason":"compiler-message","message":{"level":"error","rendered":"wrong\n","spans":[{"#,
            r#""file_name":"x/../b/c.rs","#,
            r#""byte_start":7,"is_primary":true,"expansion":null},{"file_name":"d.rs","byte_start":9,"#,
            r#""is_primary":false,"expansion":null}]}}"#,
            "\n",
            r#"{"reason":"compiler-message","message":{"level":"error","spans":[{"file_name":"/std/macros.rs","#,
            r#""byte_start":2,"is_primary":true,"expansion":{"span":{"file_name":"e.rs","byte_start":3,"#,
            r#""is_primary":false,"expansion":null}}}]}}"#,
            "\n",
        );
        let fault = |file: &str, byte| Fault { file: file.into(), byte };
        assert_eq!(faults(lines), [fault("b/c.rs", 7), fault("/std/macros.rs", 2), fault("e.rs", 3)]);
        assert_eq!(rendered(lines), "wrong\n");
    }
}
