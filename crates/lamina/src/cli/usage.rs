//! Messages of the command line parser: help unchanged, and errors on one line like all other errors.

use clap::error::ErrorKind;

/// True for help and version texts, which are printed to stdout and are not errors.
pub fn is_answer(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// The error on one line, with a hint which help to read.
pub fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut help = String::from("lamina --help");
    let mut sentence = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(usage) = line.strip_prefix("Usage: ") {
            let verb: Vec<&str> = usage.split(' ').take_while(|word| word.starts_with(char::is_lowercase)).collect();
            help = format!("{} --help", verb.join(" "));
        } else if let Some(tip) = line.strip_prefix("tip: ") {
            sentence.push_str("; ");
            sentence.push_str(tip);
        } else if !line.is_empty() && !line.starts_with("For more information") {
            if !sentence.is_empty() {
                sentence.push(' ');
            }
            sentence.push_str(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    format!("{sentence} (see '{help}')")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    #[test]
    fn usage_errors_take_one_line() {
        for arguments in [
            &["lamina", "disk", "create"][..],
            &["lamina", "disk", "create", "a", "10X"],
            &["lamina", "disk", "create", "a", "10G", "--provisioning", "thick"],
            &["lamina", "snapshot", "create"],
            &["lamina", "chek"],
            &["lamina", "clone", "a", "b", "--count", "0"],
        ] {
            let sentence = sentence(&Cli::try_parse_from(arguments).unwrap_err());
            assert!(!sentence.contains('\n') && sentence.contains("--help'"), "{sentence}");
            assert!(sentence.contains("(see 'lamina"), "{sentence}");
        }
    }
}
