//! Compares the output that a page shows with the output of a command. Before the comparison, parts that differ between
//! machines or runs are removed from both:
//!
//! * UUIDs, and MAC addresses of machines;
//! * times of day, and durations in seconds or milliseconds;
//! * process ids;
//! * sizes and counts that depend on the file system of the host or on the tools that fill a disk: the values after the
//!   labels in [`OF_THE_HOST`], and the values in a line about a transfer;
//! * warnings about the file system of the host.
//!
//! Spaces at the end of a line are ignored.

/// Labels of the values that depend on the host.
const OF_THE_HOST: [&str; 17] = [
    "uuid:",
    "available:",
    "allocated:",
    "data:",
    "metadata:",
    "reclaimable:",
    "held:",
    "over-commit ratio:",
    "file system:",
    "blocks allocated:",
    "exclusive:",
    "I/O:",
    "accelerator:",
    "fragments:",
    "fingerprint:",
    "background work:",
    "dirty data:",
];

/// Units of sizes.
const SIZES: [&str; 4] = ["B", "KiB", "MiB", "GiB"];

/// Prefix of a warning about a file system.
const WARNING: &str = "warning:";

/// Units that follow the number of a duration.
const DURATIONS: [&str; 4] = ["ms", "ms,", "s", "s,"];

/// Compares the output on the page, if there is any, with the actual output.
pub fn compare(shown: &[String], printed: &str) -> Result<(), String> {
    if shown.is_empty() {
        return Ok(());
    }
    let shown: Vec<String> = shown.iter().map(|line| plain(line)).collect();
    let printed_lines: Vec<String> = printed.lines().filter(|line| !line.starts_with(WARNING)).map(plain).collect();
    if matches(&shown, &printed_lines) {
        return Ok(());
    }
    let lost: Vec<&String> = shown.iter().filter(|line| *line != "..." && !printed_lines.contains(line)).collect();
    Err(format!("printed:\n{printed}\nwhat the page shows and nothing printed: {lost:#?}"))
}

fn matches(shown: &[String], printed: &[String]) -> bool {
    match shown.split_first() {
        None => printed.is_empty(),
        Some((line, rest)) if line == "..." => (0..=printed.len()).any(|from| matches(rest, &printed[from..])),
        Some((line, rest)) => {
            printed.split_first().is_some_and(|(first, others)| first == line && matches(rest, others))
        }
    }
}

/// A line without the parts that may differ.
fn plain(line: &str) -> String {
    let line = line.trim_end();
    let label = OF_THE_HOST.iter().find(|label| line.trim_start().starts_with(**label));
    if let Some(label) = label {
        let indent = line.len() - line.trim_start().len();
        return format!("{}{label} HOST", &line[..indent]);
    }
    if line.trim_start().starts_with("capacity:") && line.ends_with("(file system)") {
        return "capacity: HOST".into();
    }
    if line.contains(" metadata pages walked, ") {
        return line.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).filter(not_repeated('0')).collect();
    }
    let mut words: Vec<String> = line.split(' ').map(word).collect();
    if line.starts_with("sent ") || line.starts_with("backed up ") {
        for word in words.iter_mut().filter(|word| is_number(word) || SIZES.contains(&word.as_str())) {
            *word = "N".into();
        }
    }
    for at in 1..words.len() {
        if DURATIONS.contains(&words[at].trim_end_matches(')')) && is_number(&words[at - 1]) {
            words[at - 1] = "N".into();
        }
        if words[at - 1].ends_with("process") && is_number(words[at].trim_end_matches([')', ',', ':'])) {
            words[at] = words[at].replace(|c: char| c.is_ascii_digit(), "").to_string();
        }
    }
    words.join(" ")
}

/// A filter that drops all but the first of repeated characters `same`.
fn not_repeated(same: char) -> impl FnMut(&char) -> bool {
    let mut before = None;
    move |c| before.replace(*c) != Some(same) || *c != same
}

fn is_number(word: &str) -> bool {
    word.trim_start_matches('(').chars().all(|c| c.is_ascii_digit() || c == '.' || c == ',')
        && word.chars().any(|c| c.is_ascii_digit())
}

/// A word with its variable parts replaced.
fn word(word: &str) -> String {
    let inner = word.trim_matches(['(', ')', ',', '.', ':', '"']);
    let shape: String = inner.chars().map(|c| if c.is_ascii_hexdigit() { 'x' } else { c }).collect();
    let groups = |separator: char, lengths: &[usize]| {
        let parts: Vec<&str> = shape.split(separator).collect();
        parts.len() == lengths.len()
            && parts.iter().zip(lengths).all(|(part, length)| part.len() == *length && part.chars().all(|c| c == 'x'))
    };
    let kind = if groups('-', &[8, 4, 4, 4, 12]) {
        "UUID"
    } else if groups(':', &[2; 6]) {
        "ADDRESS"
    } else if groups('-', &[4, 2, 2]) {
        "DATE"
    } else if inner.ends_with('Z') && shape.trim_end_matches('Z').split(':').all(|p| p == "xx") && shape.len() == 9 {
        "TIME"
    } else {
        return word.into();
    };
    word.replace(inner, kind)
}

#[test]
fn values_that_differ_between_runs_are_removed() {
    let same = [
        ("uuid: fe33ac8a-f9a7-492f-bd94-8ddbd4dc1d75", "uuid: aa753d0d-8759-4c09-89ba-7ada65de2e93"),
        ("  golden  2026-11-21 10:12:47Z  clones: a", "  golden  2027-01-02 00:00:00Z  clones: a"),
        ("served by: lamina 0.1.0 (process 21404)", "served by: lamina 0.1.0 (process 7)"),
        ("was paused for 11.6 ms", "was paused for 9 ms"),
        ("capacity:          252 GiB (file system)", "capacity:          1.1 TiB (file system)"),
        ("  metadata:        130 MiB", "  metadata:        12 MiB"),
        (
            "sent web: 10.9 MiB of data, 11.0 MiB on the wire in 0.7 s",
            "sent web: 2 KiB of data, 3 B on the wire in 2 s",
        ),
        ("2 metadata pages walked, 36256 data blocks", "12 metadata pages walked, 7 data blocks"),
    ];
    for (a, b) in same {
        assert_eq!(plain(a), plain(b));
    }
    let different = [
        ("created disk vm1: 10 GiB, thin", "created disk vm1: 20 GiB, thin"),
        ("capacity:            10 GiB (10737418240 bytes)", "capacity:            1 GiB (1073741824 bytes)"),
        ("4 MiB in 1 changed extent", "4 MiB in 2 changed extents"),
    ];
    for (a, b) in different {
        assert_ne!(plain(a), plain(b));
    }
    let lines = |text: &str| text.lines().map(String::from).collect::<Vec<_>>();
    assert!(compare(&lines("a\n...\nd"), "a\nb\nc\nd\n").is_ok());
    assert!(compare(&lines("a\n...\nd"), "a\nb\nc\n").is_err());
    assert!(compare(&lines("a"), "a\nb\n").is_err());
    assert!(compare(&lines("a"), "a\nwarning: the datastore is on tmpfs\n").is_ok());
}
