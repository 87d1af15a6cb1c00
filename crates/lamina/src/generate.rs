//! Completion scripts and man pages, generated from the definition of the command line.

use crate::cli;
use error::{Error, Result};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Prints the completion script of a shell.
pub fn completion(shell: clap_complete::Shell, out: &mut dyn Write) -> io::Result<()> {
    // The generator panics if writing fails, so it writes to memory first.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut cli::definition(), "lamina", &mut script);
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
