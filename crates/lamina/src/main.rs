//! `lamina`: the command line, and the server process behind `lamina serve`.
//!
//! The program has no storage logic: every command becomes a [`control::Request`], [`control::dispatch()`] carries out
//! the request on a [`disk::Datastore`] (in this process, or in the server of the datastore), and [`output`] prints the
//! reply. The modules in this order: [`cli`] (arguments to requests), [`output`], and [`serve`].

#![forbid(unsafe_code)]

mod cli;
mod console;
mod exit;
mod follow;
mod generate;
mod log;
mod output;
mod serve;
mod stream;

use clap::Parser;
use cli::{Cli, Command, VmArguments, VmCommand};
use control::{JobRequest, MachineReply, MachineVerb, Reply, Request, SnapshotRequest, Target};
use disk::{Datastore, InitOptions, Location, file_system};
use error::{Error, ErrorKind};
use follow::{Follow, Parts};
use output::{Extents, Form};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use stream::Stream;
use tracing_subscriber::EnvFilter;
use vm::agent::Execution;

/// Result of a command.
enum End {
    /// The exit code of a command whose reply was printed.
    Code(u8),
    /// An error.
    Failed(Error),
    /// An error with an exit code that does not depend on its kind.
    Coded(u8, Error),
    /// An error in the arguments.
    Usage(String),
    /// The reader of the output has closed it: exit without a message.
    Unread,
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<io::Error> for End {
    /// An error of writing the output.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Unread,
            _ => Self::Failed(Error::io("writing the output", error)),
        }
    }
}

fn main() -> ExitCode {
    generate::complete();
    let exec = cli::usage::is_exec(std::env::args_os());
    // The form of the output is determined before parsing, so that errors of parsing have this form too.
    let form = Form::new(std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json"));
    let usage = if exec { exit::EXEC_FAILED } else { exit::USAGE };
    let end = match Cli::try_parse() {
        Ok(cli) => match run(cli).unwrap_or_else(|end| end) {
            // For `vm exec`, all other exit codes belong to the program in the guest.
            End::Failed(error) if exec && error.kind() != ErrorKind::Interrupted => {
                End::Coded(exit::EXEC_FAILED, error)
            }
            end => end,
        },
        Err(error) if cli::usage::is_answer(&error) => error.print().map_or_else(End::from, |()| End::Code(0)),
        Err(error) => End::Usage(cli::usage::sentence(&error, std::env::args_os())),
    };
    let (code, error) = match end {
        End::Code(code) => (code, None),
        End::Failed(error) => (exit::code(error.kind()), Some((error.kind().name(), error.to_string()))),
        End::Coded(code, error) => (code, Some((error.kind().name(), error.to_string()))),
        End::Usage(sentence) => (usage, Some(("usage", sentence))),
        End::Unread => (exit::INTERRUPTED, None),
    };
    if let Some((kind, sentence)) = error {
        output::complain_of_error(form, kind, &sentence, code);
    }
    ExitCode::from(code)
}

fn run(mut cli: Cli) -> Result<End, End> {
    if let Some(before) = cli.datastore_before.take() {
        cli.datastore = Some(before);
    }
    let form = Form::new(cli.json);
    start_logging(&cli)?;
    follow::survive_size_limit()?;
    raise_file_limit();
    let mut request = cli.command.request().map_err(End::Usage)?;
    if cli.background {
        let Some(work) = request else {
            return Err(End::Usage("only long operations can run in the background".into()));
        };
        stream::refuse_background(&work)?;
        request = Some(Request::Job(JobRequest::Start(Box::new(work))));
    }
    match (cli.command, request) {
        (Command::Vm(VmArguments { command: VmCommand::Console { said, quiet, .. }, .. }), Some(request)) => {
            let target = Target::At(datastore(cli.datastore)?);
            let reply =
                control::dispatch(&target, request.clone(), &Follow::new(&request, Arc::default(), Parts::None))?;
            console::attach(&reply, said, Duration::from_secs(quiet))
        }
        (_, Some(request)) if !request.needs_datastore() => ask(&Target::Files, form, request),
        (_, Some(request)) => ask(&Target::At(datastore(cli.datastore)?), form, request),
        (Command::Init { location, journal_size, any_file_system }, _) => {
            init(&location, journal_size, any_file_system, form)
        }
        (Command::Serve(arguments), _) => {
            let location = datastore(arguments.location.clone().or(cli.datastore))?;
            serve::run(&location, &arguments, form)?;
            Ok(End::Code(0))
        }
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
        // All commands without a request are handled above.
        (_, None) => Err(End::Usage("unknown command".into())),
    }
}

fn datastore(location: Option<Location>) -> Result<Location, End> {
    location
        .filter(|location| location.local_path().is_none_or(|path| !path.as_os_str().is_empty()))
        .ok_or_else(|| End::Usage("which datastore? give --datastore PATH or set LAMINA_DATASTORE".into()))
}

/// Starts logging to stderr. The default is `info` for the server and `warn` for other commands.
fn start_logging(cli: &Cli) -> Result<(), End> {
    let default = if matches!(cli.command, Command::Serve(_)) { "info" } else { "warn" };
    let wanted = cli.log.clone().or_else(|| std::env::var("RUST_LOG").ok()).filter(|filter| !filter.is_empty());
    let filter = EnvFilter::try_new(wanted.as_deref().unwrap_or(default)).map_err(|e| {
        let wanted = wanted.unwrap_or_default();
        End::Usage(format!("'{wanted}' is not a log filter: {e}; give a level such as debug, or export=trace"))
    })?;
    tracing_subscriber::fmt()
        .fmt_fields(log::Escaped)
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .try_init()
        .map_err(|e| End::Failed(Error::new(ErrorKind::Unsupported, format!("logging cannot start: {e}"))))
}

/// Raises the limit of open files as far as this process may, because every disk in a VMware format keeps files open.
/// If the limit cannot be raised, fewer disks can be open, and opening one disk too many fails with an error.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

fn init(location: &Location, journal_size: u64, any_file_system: bool, form: Form) -> Result<End, End> {
    if location.local_path().is_some_and(|path| path.as_os_str().is_empty()) {
        return Err(End::Usage("the path of the new datastore is empty: give the path of a folder".into()));
    }
    if !any_file_system {
        file_system::check_for_new(location)?;
    }
    Datastore::init(location, InitOptions { journal_size })?;
    let file_system = file_system::look_at(location);
    let mut out = io::stdout().lock();
    match form {
        Form::Json => output::print_json(
            &mut out,
            &json!({ "datastore": location, "journal_size": journal_size, "file_system": file_system }),
        )?,
        Form::Text => {
            writeln!(out, "made datastore {location}")?;
            file_system.warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?;
        }
    }
    Ok(End::Code(0))
}

/// Carries out a request, and prints its reply.
fn ask(target: &Target, form: Form, mut request: Request) -> Result<End, End> {
    let interrupted = match is_interruptible(&request) {
        true => follow::interruption(exit::INTERRUPTED)?,
        false => Arc::default(),
    };
    let mut out = BufWriter::new(io::stdout());
    let parts = match &request {
        Request::Snapshot(SnapshotRequest::Diff { disk, from, to }) => {
            Parts::Extents(Extents::new(Box::new(BufWriter::new(io::stdout())), form, disk, from, to))
        }
        Request::Events => Parts::Events(form),
        _ => Parts::None,
    };
    let follow = Follow::new(&request, interrupted, parts);
    let stream = match target {
        Target::At(location) => Stream::prepare(&mut request, location)?,
        _ => None,
    };
    let outcome = control::dispatch(target, request.clone(), &follow);
    // After an error, the rest of the stream is not awaited: its reader may be one that reads no more.
    let streamed = stream.filter(|_| outcome.is_ok()).map(Stream::finish);
    let unread = follow.unread();
    let parts = follow.finish();
    let reply = match outcome {
        Err(_) if unread => return Err(End::Unread),
        outcome => outcome?,
    };
    if let Some(streamed) = streamed {
        streamed?;
        if matches!(reply, Reply::BackedUp(_)) {
            // Standard output has the backup.
            return Ok(End::Code(0));
        }
    }
    match (&reply, parts) {
        (Reply::Diff { extents, bytes }, Parts::Extents(printer)) => printer.end(*extents, *bytes)?,
        _ => output::print(&mut out, form, &request, &reply)?,
    }
    out.flush()?;
    end(form, &reply)
}

/// The result of a command whose reply was printed: failures are printed to stderr, and set the exit code.
fn end(form: Form, reply: &Reply) -> Result<End, End> {
    Ok(End::Code(match reply {
        Reply::Machine(MachineReply::Each { failed, .. } | MachineReply::Imported { failed, .. }) => {
            output::complain(form, failed)
        }
        Reply::Machine(MachineReply::Cloned(cloned)) => output::complain_of_clones(form, cloned),
        Reply::Machine(MachineReply::Executed { name, execution }) => return executed(form, name, execution),
        Reply::JobEnded(ended) => match &ended.outcome {
            Some((_, reply)) => return end(form, reply),
            None => 0,
        },
        reply if finds_fault(reply) => exit::CORRUPT,
        _ => 0,
    }))
}

/// The result of `vm exec`, after the program's standard output was printed: the program's exit code, or a code that
/// says why there is none.
fn executed(form: Form, machine: &str, execution: &Execution) -> Result<End, End> {
    let failed =
        |code, text: String| Ok(End::Coded(code, Error::new(ErrorKind::Io, format!("machine '{machine}': {text}"))));
    let ended = match execution {
        Execution::Ended(ended) => ended,
        Execution::NotFound(why) => return failed(exit::PROGRAM_NOT_FOUND, format!("there is no such program: {why}")),
        Execution::NotRunnable(why) => return failed(exit::NOT_RUNNABLE, format!("the program did not start: {why}")),
        Execution::StillRuns { pid } => {
            let text = format!(
                "the program has not ended within --timeout; it continues in the guest, as process {pid}, and its output \
                 is lost"
            );
            return failed(exit::STILL_RUNS, text);
        }
    };
    if form == Form::Text {
        io::stderr().write_all(&ended.errors)?;
    }
    let how = match (ended.code, ended.signal) {
        (Some(code), _) => format!("the program ended with exit code {code}"),
        (None, Some(signal)) => format!("the program was ended by signal {signal}"),
        (None, None) => "the program was ended by a signal".to_owned(),
    };
    let cut = [("standard output", ended.output_cut), ("standard error", ended.errors_cut)];
    let cut: Vec<&str> = cut.iter().filter(|(_, cut)| *cut).map(|(what, _)| *what).collect();
    if !cut.is_empty() {
        let text = format!(
            "{how}, but the guest's agent kept only the first 16 MiB of its {}: write more output to a file in the guest",
            cut.join(" and its ")
        );
        return failed(exit::EXEC_FAILED, text);
    }
    match ended.code {
        Some(code) => Ok(End::Code(u8::try_from(code).unwrap_or(1))),
        None => {
            failed(exit::SIGNAL.saturating_add(ended.signal.and_then(|it| u8::try_from(it).ok()).unwrap_or(0)), how)
        }
    }
}

/// Whether the operation checks for an interruption. The signal ends the process of any other operation; the next
/// command completes or undoes that operation.
fn is_interruptible(request: &Request) -> bool {
    match request {
        Request::Machine(request) => {
            matches!(
                request.verb,
                MachineVerb::Clone { .. }
                    | MachineVerb::Send { .. }
                    | MachineVerb::Import(_)
                    | MachineVerb::Export { .. }
                    | MachineVerb::BackUp(_)
                    | MachineVerb::Restore(_)
            )
        }
        _ => true,
    }
}

/// Whether the reply reports a problem that still exists.
fn finds_fault(reply: &Reply) -> bool {
    match reply {
        Reply::Check(report) => report.findings.iter().any(|finding| finding.repaired.is_none()),
        Reply::Scrub(report) => report.summary.damaged > 0,
        Reply::ImageCheck(check) => check.problems > 0,
        Reply::Image(info) => info.problem.is_some(),
        Reply::Converted(made) => !made.lost.is_empty(),
        Reply::Verified(verified) => !verified.problems.is_empty(),
        Reply::Backups(backups) => backups.iter().any(|backup| backup.problem.is_some()),
        Reply::SalvageList(list) => {
            let doubtful = list.objects.iter().any(|object| object.lost > 0 || !object.proven);
            doubtful || list.incomplete || list.behind
        }
        Reply::Salvaged(report) => report.behind || !report.proven || !report.lost.is_empty(),
        _ => false,
    }
}
