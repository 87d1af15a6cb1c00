//! Completion scripts and man pages, generated from the definition of the command line.

use crate::cli;
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;
use error::{Error, Result};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The environment variable with which a completion script calls this program to query the words that can follow.
const VARIABLE: &str = "LAMINA_COMPLETE";

/// If a completion script has called this program, answers the script and exits.
pub fn complete() {
    CompleteEnv::with_factory(cli::complete::definition_with_names).var(VARIABLE).complete();
}

/// Prints the completion script of a shell.
pub fn completion(shell: clap_complete::Shell, out: &mut dyn Write) -> io::Result<()> {
    let shells = Shells::builtins();
    let Some(completer) = shells.completer(&shell.to_string()) else {
        return Err(io::Error::new(io::ErrorKind::Unsupported, format!("no completion for {shell}")));
    };
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, "lamina", "lamina", "lamina", &mut script)?;
    if shell == clap_complete::Shell::Bash {
        // Otherwise bash would treat the name after '@' as a separate word.
        script.extend_from_slice(b"COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}\n");
    }
    out.write_all(&script)
}

/// Writes `lamina.1` and a page for each command; returns the files, sorted.
pub fn man(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io(format!("writing man pages to '{}'", directory.display()), e);
    std::fs::create_dir_all(directory).map_err(failed)?;
    let mut command = cli::definition().disable_help_subcommand(true);
    command.build();
    let mut written = Vec::new();
    let mut pending = vec![command];
    while let Some(command) = pending.pop() {
        pending.extend(command.get_subcommands().cloned());
        let page = clap_mangen::Man::new(command);
        written.push(page.generate_to(directory).map_err(failed)?);
    }
    written.sort();
    Ok(written)
}
