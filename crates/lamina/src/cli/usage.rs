//! Messages of the command line parser: help unchanged, and errors on one line like all other errors.

use super::Cli;
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Options before the verb of `lamina vm` that have their value in a separate word.
const WITH_VALUE: [&str; 6] = ["--datastore", "-D", "-d", "--log", "--qemu", "--memory-folder"];

/// True for help and version texts, which are printed to stdout and are not errors.
pub fn is_answer(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// The words before `--` that are neither options nor values of the options in [`WITH_VALUE`].
fn words(arguments: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut arguments = arguments.into_iter().skip(1).take_while(|word| word != "--");
    std::iter::from_fn(move || {
        loop {
            let word = arguments.next()?;
            if WITH_VALUE.iter().any(|option| word == *option) {
                arguments.next();
            } else if !word.as_encoded_bytes().starts_with(b"-") {
                return Some(word);
            }
        }
    })
}

/// Whether the arguments are those of `vm exec`, even if they cannot be parsed.
pub fn is_exec(arguments: impl IntoIterator<Item = OsString>) -> bool {
    words(arguments).take(2).eq(["vm", "exec"])
}

/// The program and the subcommands in the arguments, such as `lamina disk create`.
fn verb(arguments: impl IntoIterator<Item = OsString>) -> String {
    let mut command = Cli::command();
    let mut verb = String::from("lamina");
    for word in words(arguments) {
        let Some(found) = command.find_subcommand(&word).cloned() else { break };
        verb = format!("{verb} {}", found.get_name());
        command = found;
    }
    verb
}

/// A message of the parser, in which limits of a number in Rust's notation (`1..=5`) are replaced by words.
fn plain_limits(sentence: &str) -> String {
    let Some((before, range)) = sentence.split_once(" is not in ") else { return sentence.to_owned() };
    match range.split_once("..=") {
        Some((least, most)) if least.parse::<i64>().is_ok() => format!("{before} is not from {least} to {most}"),
        _ => sentence.to_owned(),
    }
}

/// The error on one line, with a hint which `--help` to read.
pub fn sentence(error: &clap::Error, arguments: impl IntoIterator<Item = OsString>) -> String {
    let mut text = error.to_string();
    // An address may have credentials before an @.
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue)
        && value.contains("://")
        && let Some((_, rest)) = value.rsplit_once('@')
    {
        text = text.replace(value.as_str(), &format!("***@{rest}"));
    }
    let mut help = format!("{} --help", verb(arguments));
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
            sentence.push_str(&plain_limits(line.strip_prefix("error: ").unwrap_or(line)));
        }
    }
    format!("{sentence} (see '{help}')")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    fn complaint(arguments: &[&str]) -> String {
        let error = Cli::try_parse_from(arguments).unwrap_err();
        sentence(&error, arguments.iter().map(OsString::from))
    }

    #[test]
    fn errors_in_values_name_the_verb_and_limits_without_notation() {
        let told = complaint(&["lamina", "-D", "snapshot", "disk", "create", "a", "10X"]);
        assert!(told.ends_with("(see 'lamina disk create --help')"), "{told}");
        let told = complaint(&["lamina", "clone", "a", "b", "--count", "0"]);
        assert!(told.contains("0 is not from 1 to 100000 (see 'lamina clone --help')"), "{told}");
    }

    #[test]
    fn secrets_in_addresses_are_not_in_messages() {
        let told = complaint(&["lamina", "backup", "list", "s3://ID:hid/hid@lab/x"]);
        assert!(told.contains("'***@lab/x'") && !told.contains("hid"), "{told}");
    }

    #[test]
    fn vm_exec_is_found_among_wrong_arguments() {
        for (line, exec) in [
            ("lamina vm exec web -- true", true),
            ("lamina --json vm --qemu x exec web --wrong", true),
            ("lamina -D exec vm --qemu=x exec", true),
            ("lamina vm show exec", false),
            ("lamina disk show web -- vm exec", false),
            ("lamina exec", false),
        ] {
            assert_eq!(is_exec(line.split(' ').map(OsString::from)), exec, "{line}");
        }
    }

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
            let sentence = complaint(arguments);
            assert!(!sentence.contains('\n') && sentence.contains("--help'"), "{sentence}");
            assert!(sentence.contains("(see 'lamina"), "{sentence}");
        }
    }
}
