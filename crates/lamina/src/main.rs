//! `lamina`: the command line, and the server process behind `lamina serve`.
//!
//! A face, not a place for storage logic: but for machines ([`machines`]), every verb becomes a [`control::Request`],
//! is carried out by [`control::dispatch()`] on a [`disk::Datastore`] (in this process, or in the one that serves the
//! datastore), and the reply is printed by [`output`]. The folders in that order: [`cli`] (arguments to requests),
//! [`output`], and [`serve`].

#![forbid(unsafe_code)]

mod cli;
mod exit;
mod follow;
mod generate;
mod machines;
mod output;
mod serve;

use clap::Parser;
use cli::{Cli, Command};
use control::{DiskRequest, Reply, Request, SnapshotRequest};
use disk::{Datastore, InitOptions, file_system};
use error::{Error, ErrorKind};
use follow::Follow;
use output::{Extents, Form};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// How a command ended.
enum End {
    /// With an answer, and the exit code that goes with it.
    Code(u8),
    /// With an error.
    Failed(Error),
    /// With a complaint about the command line.
    Usage(String),
    /// The reader of the output has closed it: end without a message.
    Unread,
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<io::Error> for End {
    /// Of the output.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Unread,
            _ => Self::Failed(Error::io("writing the output", error)),
        }
    }
}

fn main() -> ExitCode {
    let end = match Cli::try_parse() {
        Ok(cli) => run(cli).unwrap_or_else(|end| end),
        Err(error) if cli::usage::is_answer(&error) => error.print().map_or_else(End::from, |()| End::Code(0)),
        Err(error) => End::Usage(cli::usage::sentence(&error)),
    };
    let (code, sentence) = match end {
        End::Code(code) => (code, None),
        End::Failed(error) => (exit::code(error.kind()), Some(error.to_string())),
        End::Usage(sentence) => (exit::USAGE, Some(sentence)),
        End::Unread => (exit::INTERRUPTED, None),
    };
    if let Some(sentence) = sentence {
        // One line, whatever an error brought along; stderr may be closed.
        let line: Vec<&str> = sentence.lines().map(str::trim).collect();
        let _ = writeln!(io::stderr(), "lamina: {}", line.join(" "));
    }
    ExitCode::from(code)
}

fn run(cli: Cli) -> Result<End, End> {
    let form = Form::new(cli.json);
    start_logging(&cli)?;
    raise_file_limit();
    let request = cli.command.request().map_err(End::Usage)?;
    match (cli.command, request) {
        (_, Some(request)) if !request.needs_datastore() => ask(None, form, request),
        (_, Some(request)) => {
            let path = datastore(cli.datastore)?;
            match &request {
                Request::Disk(DiskRequest::Resize { name, shrink: false, .. }) => {
                    match machines::resize::affected(&path, name)? {
                        Some(machine) => machines::resize::run(&path, machine, request, form),
                        None => ask(Some(&path), form, request),
                    }
                }
                _ => ask(Some(&path), form, request),
            }
        }
        (Command::Init { path, journal_size, any_file_system }, _) => init(&path, journal_size, any_file_system, form),
        (Command::Serve(arguments), _) => {
            let path = datastore(arguments.path.clone().or(cli.datastore))?;
            serve::run(&path, &arguments, form)?;
            Ok(End::Code(0))
        }
        (Command::Vm(arguments), _) => machines::run(&datastore(cli.datastore)?, arguments, form),
        (Command::Completion { shell }, _) => {
            generate::completion(shell, &mut io::stdout())?;
            Ok(End::Code(0))
        }
        (Command::Man { directory }, _) => {
            let pages = generate::man(&directory)?;
            let mut out = io::stdout().lock();
            match form {
                Form::Json => output::print_json(&mut out, &json!({ "pages": pages }))?,
                Form::Text => pages.iter().try_for_each(|page| writeln!(out, "{}", page.display()))?,
            }
            Ok(End::Code(0))
        }
        // Every other verb has a request.
        (_, None) => Err(End::Usage("unknown command".into())),
    }
}

fn datastore(path: Option<PathBuf>) -> Result<PathBuf, End> {
    path.filter(|path| !path.as_os_str().is_empty())
        .ok_or_else(|| End::Usage("which datastore? give --datastore PATH or set LAMINA_DATASTORE".into()))
}

/// Logs go to stderr: a server tells what it does, a verb only what is wrong.
fn start_logging(cli: &Cli) -> Result<(), End> {
    let default = if matches!(cli.command, Command::Serve(_)) { "info" } else { "warn" };
    let wanted = cli.log.clone().or_else(|| std::env::var("RUST_LOG").ok()).filter(|filter| !filter.is_empty());
    let filter = EnvFilter::try_new(wanted.as_deref().unwrap_or(default))
        .map_err(|e| End::Usage(format!("'{}' is not a log filter: {e}", wanted.unwrap_or_default())))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .try_init()
        .map_err(|e| End::Failed(Error::new(ErrorKind::Unsupported, format!("logging cannot start: {e}"))))
}

/// Every disk made of images keeps files open: as many as this process may have. Where that cannot be raised, fewer
/// disks can be open at once, and opening one more says so.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

fn init(path: &Path, journal_size: u64, any_file_system: bool, form: Form) -> Result<End, End> {
    if !any_file_system {
        file_system::check_for_new(path)?;
    }
    Datastore::init(path, InitOptions { journal_size })?;
    let file_system = file_system::look_at(path);
    let mut out = io::stdout().lock();
    match form {
        Form::Json => output::print_json(
            &mut out,
            &json!({ "datastore": path, "journal_size": journal_size, "file_system": file_system }),
        )?,
        Form::Text => {
            writeln!(out, "made datastore {}", path.display())?;
            file_system.warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?;
        }
    }
    Ok(End::Code(0))
}

/// Asks the datastore, if the request is about one, and prints what it says.
fn ask(path: Option<&Path>, form: Form, request: Request) -> Result<End, End> {
    let interrupted = follow::interruption(exit::INTERRUPTED)?;
    let mut out = BufWriter::new(io::stdout());
    let extents = match &request {
        Request::Snapshot(SnapshotRequest::Diff { disk, from, to }) => {
            Some(Extents::new(Box::new(BufWriter::new(io::stdout())), form, disk, from, to))
        }
        _ => None,
    };
    let follow = Follow::new(&request, interrupted, extents);
    let outcome = match path {
        Some(path) => control::ask(path, request.clone(), &follow),
        None => control::alone(request.clone(), &follow),
    };
    let unread = follow.unread();
    let extents = follow.finish();
    let reply = match outcome {
        Err(_) if unread => return Err(End::Unread),
        outcome => outcome?,
    };
    match (&reply, extents) {
        (Reply::Diff { extents, bytes }, Some(printer)) => printer.end(*extents, *bytes)?,
        _ => output::print(&mut out, form, &request, &reply)?,
    }
    out.flush()?;
    Ok(End::Code(if finds_fault(&reply) { exit::CORRUPT } else { 0 }))
}

/// Whether the answer tells of something wrong that still is.
fn finds_fault(reply: &Reply) -> bool {
    match reply {
        Reply::Check(report) => report.findings.iter().any(|finding| finding.repaired.is_none()),
        Reply::ImageCheck(check) => check.problems > 0,
        Reply::Image(info) => info.problem.is_some(),
        Reply::SalvageList(list) => list.behind || list.objects.iter().any(|object| object.lost > 0 || !object.proven),
        Reply::Salvaged(report) => report.behind || !report.proven || !report.lost.is_empty(),
        _ => false,
    }
}
