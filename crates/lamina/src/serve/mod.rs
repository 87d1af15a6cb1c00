//! `lamina serve`: the process that owns a datastore while it is in use.
//!
//! ```text
//!  open datastore -> NBD and the receiver listen -> control socket listens -> ready
//!      first SIGTERM or SIGINT -> receiver and NBD stop -> jobs stop -> control stops -> control socket removed
//!      -> datastore closed -> exit 0
//!      second -> exit at once
//!      SIGHUP with --access -> access rules read again, connections without permission closed
//! ```
//!
//! Invariants:
//! 1. The ready line and `READY=1` are sent once every listener accepts connections.
//! 2. No NBD or control request and no job is running when the datastore is closed.
//! 3. Sockets are removed while this process owns the datastore, so that the next owner's sockets are not affected.
//! 4. If the process ends at any moment without closing the datastore, nothing that was acknowledged as durable is
//!    lost. The store guarantees this, and the second signal relies on that guarantee.

mod access;
mod exports;
mod machine_users;
mod notify;
mod receiving;
mod sampling;

use crate::cli::ServeArguments;
use crate::output::Form;
use crate::{exit, follow};
use backend::local::KeptSpace;
use backend::private;
use connections::{Address, Limits, Listen, TlsConfig, group_id};
use control::idle::IdleScheduler;
use control::jobs::Jobs;
use control::scrubs::ScrubScheduler;
use control::{Served, Service, Serving, Target, Watch, socket, uri};
use disk::{Datastore, Location, OpenOptions, file_system};
use error::{Error, ErrorKind, Result};
use export::access::Rules;
use export::clients::Clients;
use export::nbd;
use exports::DatastoreExports;
use machine_users::MachineUsers;
use rustix::process::{Resource, getrlimit};
use sampling::Sampling;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Default NBD socket in the datastore's folder.
const NBD_SOCKET: &str = "nbd.sock";

/// Open files per NBD connection: its socket and its io_uring.
const FILES_BY_CONNECTION: usize = 2;

/// The groups of the sockets, besides the user of this process.
#[derive(Clone, Copy)]
struct Groups {
    control: Option<u32>,
    nbd: Option<u32>,
}

/// Serves until a signal stops the server.
pub fn run(location: &Location, arguments: &ServeArguments, form: Form) -> Result<()> {
    location.require()?;
    // Before a file is written: the limit applies to file systems that are written for the first time.
    backend::dirty::set_limit(arguments.dirty_limit);
    if arguments.access.is_some() && arguments.receive.is_some() && arguments.receive_from.is_empty() {
        let text = "with --access, --receive needs --receive-from: otherwise every client could replace disks there";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // The signal handlers are registered first, so that a signal during journal replay is not lost.
    let mut handled = vec![SIGINT, SIGTERM];
    // Without rules there is no file to read again, so SIGHUP keeps its default effect.
    handled.extend(arguments.access.as_ref().map(|_| SIGHUP));
    let mut signals = Signals::new(handled).map_err(|e| Error::io("registering for signals", e))?;
    let _second_signal = follow::interruption(exit::INTERRUPTED)?;

    let group = arguments.socket_group.as_deref().map(group_id).transpose()?;
    let machine_group = arguments.machine_group.as_deref().map(group_id).transpose()?;
    let groups = Groups { control: group, nbd: group.or(machine_group) };
    // The path is made absolute, because URIs contain it.
    let location = location.resolved()?;
    location.need_folder("a control socket or a server")?;
    if !arguments.any_file_system {
        file_system::check_to_serve(&location)?;
    }
    let mut cancelled = || signals.pending().any(|signal| signal != SIGHUP);
    let datastore = control::open_to_serve(&location, open_options(arguments), &mut cancelled)?;
    datastore.foreground().set_target(arguments.latency_target);
    datastore.set_dedup_memory(arguments.dedup_memory);
    let spare = datastore.spare();
    let held = datastore.kept_space().map(KeptSpace::hold);
    spare.give_up_if_full(held.as_ref());
    let started = || {
        drop(held);
        spare.keep();
    };
    let outcome = serve(&location, &datastore, arguments, groups, form, &mut signals, started);
    let closed = datastore.close();
    outcome?;
    closed?;
    tracing::info!(datastore = %location, "closed");
    Ok(())
}

/// The options for opening the datastore.
pub fn open_options(arguments: &ServeArguments) -> OpenOptions {
    OpenOptions {
        mode: arguments.io.into(),
        queue: arguments.queue.into(),
        metadata_cache: arguments.metadata_cache,
        write_buffer: arguments.write_buffer,
        read_cache: arguments.read_cache,
    }
}

/// Serves an open datastore until no client uses it.
fn serve(
    location: &Location,
    datastore: &Arc<Datastore>,
    arguments: &ServeArguments,
    groups: Groups,
    form: Form,
    signals: &mut Signals,
    started: impl FnOnce(),
) -> Result<()> {
    let status = datastore.status()?;
    let jobs = Arc::new(Jobs::new()?);
    let (served, of_clients) = (Arc::clone(datastore), Arc::clone(&jobs));
    let exports = DatastoreExports { datastore: served, read_only: arguments.read_only, jobs: of_clients };
    let grace = Duration::from_secs(arguments.client_grace);
    let clients = Arc::new(Clients::of_server(Arc::clone(datastore.directory()), grace));
    let config = nbd::ServerConfig { clients: Arc::clone(&clients), ..nbd_config(location, arguments, groups.nbd)? };
    let nbd = Arc::new(nbd::Server::start(config, Arc::new(exports))?);
    let of_replaced = Arc::clone(&clients);
    datastore.refuse_to_replace(move |disk| control::refuse_to_replace(&of_replaced, disk));
    datastore.refuse_names(control::refuse_left);
    let of_waiting = Arc::clone(&jobs);
    datastore.notice_waiting(move |notice| of_waiting.events().publish(vec![notice.into()]));
    let of_imports = Arc::clone(&jobs);
    datastore.run_attempts_by(move |command, disk, attempt| of_imports.of_datastore(command, disk, attempt));
    let receiver = receiving::start(location, datastore, &jobs, arguments)?;
    let mut serving = serving(&nbd, arguments);
    serving.receive = receiver.as_ref().map(|receiver| receiver.address());
    // If a following step fails, `nbd` and `receiver` stop when they are dropped.
    let serving = Arc::new(serving);
    let service = Service {
        datastore: Arc::clone(datastore),
        location: location.clone(),
        clients: Arc::clone(&clients),
        served: Some(Served { nbd: Arc::clone(&nbd), serving: Arc::clone(&serving) }),
        jobs: Some(Arc::clone(&jobs)),
    };
    let target = Target::Open(service.clone());
    let handler = Box::new(move |request, watch: &dyn Watch| control::dispatch(&target, request, watch));
    let control = socket::Server::start(location, groups.control, handler)?;
    let_reach(location, arguments, groups.nbd);
    started();
    for warning in &status.file_system.warnings {
        tracing::warn!(datastore = %location, "{warning}");
    }
    // The record is written after all listeners are open, so that a server that fails to start leaves the record
    // unchanged.
    clients.keep_record()?;
    tracing::info!(
        datastore = %location, engine = status.engine, io_mode = status.io_mode, disks = status.disks,
        snapshots = status.snapshots, read_only = serving.read_only, "serving"
    );
    datastore.start_imports();
    let sampling = Sampling::start(datastore)?;
    let mut scrubs = ScrubScheduler::start(service.clone())?;
    let mut idle = idle_scheduler(service, arguments)?;
    let announced = announce(location, &serving, &status.engine, form);
    if announced.is_ok() {
        notify::service_manager("READY=1");
        for signal in signals.forever() {
            match &arguments.access {
                Some(rules) if signal == SIGHUP => access::read_again(&nbd, rules),
                _ => {
                    tracing::info!(signal, "stopping; a second signal ends this process at once");
                    break;
                }
            }
        }
        notify::service_manager("STOPPING=1");
    }
    // The receiver stops before the control socket, because a reception may end with a control request.
    drop(receiver);
    nbd.stop();
    scrubs.stop();
    drop(scrubs);
    idle.take();
    jobs.stop();
    drop(sampling);
    control.stop();
    clients.close();
    announced
}

/// The thread that compresses and deduplicates cold data, unless the arguments say that this server changes nothing.
fn idle_scheduler(service: Service, arguments: &ServeArguments) -> Result<Option<IdleScheduler>> {
    let after = arguments.optimize_after.0.filter(|_| !arguments.read_only);
    after.map(|seconds| IdleScheduler::start(service, Duration::from_secs(seconds))).transpose()
}

/// Lets the users who may connect to the sockets traverse the folder of the datastore, but not list it.
fn let_reach(location: &Location, arguments: &ServeArguments, group: Option<u32>) {
    let mode = if arguments.socket.is_none() { arguments.socket_mode() } else { 0 };
    if let Some(folder) = location.local_path().filter(|_| group.is_some() || mode & 0o066 != 0)
        && let Err(error) = private::let_traverse(folder, group, mode & 0o006 != 0)
    {
        tracing::warn!(
            datastore = %location, %error,
            "the folder cannot be opened to the users of the sockets in it; only the folder's owner can do that"
        );
    }
}

/// The connection limits; logs a warning if this process cannot open enough files for them.
fn limits(arguments: &ServeArguments) -> Limits {
    let limits = Limits {
        unix: arguments.max_unix_connections.into(),
        authenticated: arguments.max_authenticated_connections.into(),
        unauthenticated: arguments.max_unauthenticated_connections.into(),
    };
    let tcp = if arguments.tcp.is_some() { limits.authenticated + limits.unauthenticated } else { 0 };
    let (files, needed) = (getrlimit(Resource::Nofile).current, (limits.unix + tcp) * FILES_BY_CONNECTION);
    if files.is_some_and(|files| files < needed as u64) {
        let files = files.unwrap_or_default();
        tracing::warn!(
            files,
            needed,
            "the connections allowed need more open files than this process may have: raise its hard limit \
            (ulimit -Hn, LimitNOFILE of systemd) or allow fewer connections"
        );
    }
    limits
}

fn nbd_config(location: &Location, arguments: &ServeArguments, group: Option<u32>) -> Result<nbd::ServerConfig> {
    let socket = match &arguments.socket {
        Some(socket) => socket.clone(),
        None => location.need_folder("an NBD socket")?.join(NBD_SOCKET),
    };
    let socket = std::path::absolute(&socket).map_err(|e| Error::io(format!("finding '{}'", socket.display()), e))?;
    let control = socket::path(location)?;
    let folder = socket.parent().and_then(|folder| folder.canonicalize().ok());
    if folder.as_deref() == control.parent() && socket.file_name() == control.file_name() {
        let text = format!("'{}' is where commands reach the server: give --socket another path", socket.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let unix = Listen::Unix { path: socket, mode: arguments.socket_mode(), group };
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => Some(TlsConfig {
            certificate: certificate.clone(),
            key: key.clone(),
            client_authorities: arguments.tls_client_ca.clone(),
            required: !arguments.insecure_tcp,
        }),
        _ => None,
    };
    Ok(nbd::ServerConfig {
        listen: std::iter::once(unix).chain(arguments.tcp.map(Listen::Tcp)).collect(),
        tls,
        allow_insecure_tcp: arguments.insecure_tcp,
        limits: limits(arguments),
        rules: arguments.access.as_deref().map(Rules::load).transpose()?,
        user_access: match &arguments.machine_group {
            Some(_) => Some(Arc::new(MachineUsers::new(location.need_folder("virtual machines")?))),
            None => None,
        },
        read_only: arguments.read_only,
        ..nbd::ServerConfig::default()
    })
}

/// What `status` and `export list` report about this process, with the addresses actually listened on.
fn serving(nbd: &nbd::Server, arguments: &ServeArguments) -> Serving {
    let mut serving = Serving {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").into(),
        socket: None,
        tcp: None,
        tls: arguments.tls_cert.is_some(),
        read_only: arguments.read_only,
        receive: None,
    };
    for address in nbd.addresses() {
        match address {
            Address::Unix(path) => serving.socket = Some(path.clone()),
            Address::Tcp(address) => serving.tcp = Some(*address),
        }
    }
    serving
}

/// Prints the ready line on stdout.
fn announce(location: &Location, serving: &Serving, engine: &str, form: Form) -> Result<()> {
    let mut uris = uri::of_export(serving, "");
    let receive = serving.receive.map(|address| format!("lamina://{address}/"));
    if form == Form::Text {
        uris.extend(receive.clone());
    }
    let line = match form {
        Form::Text => format!("ready: {}", uris.join(" ")),
        Form::Json => json!({
            "ready": true, "nbd": uris, "control": socket::path(location)?, "pid": serving.pid, "engine": engine,
            "receive": receive,
        })
        .to_string(),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| Error::io("writing the ready line", e))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn a_single_request_opens_the_datastore_with_the_defaults_of_serve() {
        let Command::Serve(arguments) = Cli::try_parse_from(["lamina", "serve", "x"]).unwrap().command else {
            panic!("another command than serve");
        };
        let serve = open_options(&arguments);
        assert_eq!(format!("{serve:?}"), format!("{:?}", control::OPEN_OPTIONS));
    }
}
