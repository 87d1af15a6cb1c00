//! Runs the built `lamina` program from tests.

use crate::nbd::Client;
use crate::pattern;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Default time limit of a step before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of a command or of the start of a server, sufficient for a check of all data on a busy machine.
const COMMAND_MAX: Duration = Duration::from_secs(300);

/// The built program, next to the test program.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("lamina");
    assert!(program.exists(), "{} is built for the tests of crates/lamina", program.display());
    program
}

/// A command that runs the program, in an environment without the variables that lamina reads.
pub fn lamina() -> Command {
    let mut command = Command::new(program());
    let foreign = std::env::vars_os().map(|(name, _)| name);
    let foreign = foreign.filter(|name| name.to_str().is_some_and(|name| name.starts_with("AWS_")));
    for variable in ["LAMINA_DATASTORE", "RUST_LOG", "NOTIFY_SOCKET"].into_iter().map(Into::into).chain(foreign) {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null());
    command
}

/// Result of a command.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("ended by a signal"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Done {
    /// Asserts that the command succeeded without messages on stderr; returns its output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{self:?}");
        self.stdout
    }

    /// Asserts success, and parses the output as one JSON value.
    #[track_caller]
    pub fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// Asserts that the command failed with `code`, printed nothing to stdout, and printed one line to stderr. The line
    /// contains `words`, and begins with `lamina:` or is an error as JSON.
    #[track_caller]
    pub fn fails(self, code: i32, words: &str) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{self:?}");
        assert!(self.stderr.ends_with('\n'), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        if self.stderr.starts_with('{') {
            let value: Value = serde_json::from_str(&self.stderr).unwrap();
            assert_eq!(value["error"]["exit_code"], code, "{self:?}");
            assert!(value["error"]["message"].as_str().is_some_and(|text| text.contains(words)), "{words}: {self:?}");
            return;
        }
        assert!(self.stderr.starts_with("lamina: "), "{self:?}");
        assert!(self.stderr.contains(words), "'{words}' is not in: {self:?}");
    }
}

/// Runs `lamina` with arguments separated by spaces.
pub fn run(arguments: &str) -> Done {
    output(lamina().args(arguments.split_whitespace())).into()
}

/// Runs a command. If the command does not end, the test fails, and prints the system call in which each thread of the
/// command waits.
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (pid, said) = (child.id(), format!("{command:?}"));
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match ended.recv_timeout(COMMAND_MAX) {
        Ok(output) => output.unwrap(),
        Err(_) => stuck(pid, &said),
    }
}

/// Ends a process that does not end or answer by itself, and fails the test.
#[track_caller]
fn stuck(pid: u32, what: &str) -> ! {
    let mut threads = String::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let [name, system_call, stack] = ["comm", "syscall", "stack"].map(read);
        threads += &format!("{} {}: system call {}\n{stack}", thread.path().display(), name.trim(), system_call.trim());
    }
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    panic!("{what} has not ended after {COMMAND_MAX:?}; its threads:\n{threads}");
}

/// A datastore in a temporary folder.
pub struct Store {
    folder: tempfile::TempDir,
}

impl Store {
    /// A new datastore.
    pub fn new() -> Self {
        let store = Self { folder: tempfile::tempdir().unwrap() };
        let done: Done = output(lamina().args(["init", "--journal-size", "8M"]).arg(store.path())).into();
        done.ok();
        store
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// A command on the datastore, not started yet.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = lamina();
        command.arg("--datastore").arg(self.path()).args(arguments.split_whitespace());
        command
    }

    pub fn run(&self, arguments: &str) -> Done {
        output(&mut self.command(arguments)).into()
    }

    /// Creates a datastore in a given folder.
    pub fn at(folder: &Path, journal_size: &str) -> Self {
        let folder = tempfile::Builder::new().tempdir_in(folder).unwrap();
        let store = Self { folder };
        let done: Done = output(lamina().args(["init", "--journal-size", journal_size]).arg(store.path())).into();
        done.ok();
        store
    }

    /// The datastore's NBD socket, which exists while the datastore is served.
    pub fn socket(&self) -> PathBuf {
        self.path().join("nbd.sock")
    }

    /// The whole content of an export.
    pub fn content(&self, export: &str) -> Vec<u8> {
        Client::connect(&self.socket(), export).unwrap().read_all().unwrap()
    }

    /// Writes pieces of 1 MiB that cannot be compressed, by their numbers, and flushes them.
    pub fn fill(&self, disk: &str, seed: u64, pieces: impl IntoIterator<Item = u64>) {
        let mut client = Client::connect(&self.socket(), disk).unwrap();
        for piece in pieces {
            client.write(piece << 20, &pattern::bytes(seed + piece, 1 << 20)).unwrap();
        }
        client.flush().unwrap();
    }

    /// The URI of an export whose name needs no escaping.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// Checks that a check of the datastore, including the checksums of all data, finds no problems. The datastore need
    /// not be served.
    #[track_caller]
    pub fn is_clean(&self) {
        let text = self.run("check --data").ok();
        assert!(text.ends_with("clean\n"), "{text}");
    }

    /// Serves the datastore until the result is dropped or stopped.
    pub fn serve(&self, arguments: &str) -> Serving {
        Serving::start(self.command(&format!("serve {arguments}")))
    }
}

impl Drop for Store {
    /// If the test has failed, its datastore is kept for inspection.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.folder.disable_cleanup(true);
            eprintln!("the datastore is kept: {}", self.path().display());
        }
    }
}

/// A running server.
pub struct Serving {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    log: File,
    /// The line that the server printed when it was ready.
    pub ready: String,
}

impl Serving {
    /// Starts a server and waits for the ready line.
    pub fn start(mut command: Command) -> Self {
        let log = tempfile::tempfile().unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log.try_clone().unwrap()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, first) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut ready = String::new();
            let _ = stdout.read_line(&mut ready);
            sender.send((ready, stdout))
        });
        let Ok((ready, stdout)) = first.recv_timeout(COMMAND_MAX) else { stuck(child.id(), &format!("{command:?}")) };
        let serving = Self { child, _stdout: stdout, log, ready: ready.trim_end().into() };
        assert!(!serving.ready.is_empty(), "the server ended before it was ready: {}", serving.log());
        serving
    }

    /// The server's log.
    pub fn log(&self) -> String {
        let mut bytes = vec![0; self.log.metadata().unwrap().len() as usize];
        self.log.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the server and waits for its end. Returns the exit code, or `None` if the signal killed the
    /// server.
    pub fn stop(&mut self, signal: &str) -> Option<i32> {
        send(self.pid(), signal);
        wait(&mut self.child)
    }

    /// Kills the server with SIGKILL by a system call, without running another program.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        assert_eq!(wait(&mut self.child), None, "it was killed");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // In every test, the server must not have panicked.
        let log = self.log();
        if std::thread::panicking() {
            eprintln!("the server's log:\n{log}");
        } else {
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

/// Sends a signal to a process that the test has started.
pub fn send(pid: u32, signal: &str) {
    let status = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{signal} {pid}");
}

/// Waits for the end of a process; returns its exit code.
pub fn wait(child: &mut Child) -> Option<i32> {
    wait_within(child, PATIENCE)
}

/// Like [`wait`], with a limit.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<i32> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(begin.elapsed() < limit, "process {} does not end", child.id());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a process handles SIGINT, so that a test can interrupt it.
pub fn wait_until_interruptible(pid: u32) {
    until("SIGINT is caught", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
        u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 1) != 0
    });
}

/// Waits until a condition holds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs another program, which must succeed; returns its output.
pub fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}; the tests need it"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stdout}{stderr}");
    stdout
}

/// The names of all files in a folder.
pub fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Processes that have lock files of a folder open. Between fork and exec, a process that becomes QEMU has the locks of
/// the command that starts it, and may have an empty command line.
pub fn lockers(folder: &Path) -> Vec<u32> {
    let folder = folder.canonicalize().unwrap();
    let is_lock = |file: &Path| {
        file.starts_with(&folder) && (file.is_dir() || file.file_name().is_some_and(|name| name == ".working"))
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let numbers = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<u32>().ok());
    let has_one = |pid: &u32| {
        // A process that has just ended has no open files.
        let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        open.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok()).any(|file| is_lock(&file))
    };
    numbers.filter(has_one).collect()
}
