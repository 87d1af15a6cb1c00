//! A shell in its own mount, process and network namespaces. `/tmp`, `/srv`, `/mnt`, `/var/lib` and `/dev/shm` are
//! empty folders of the test, `/etc` is a copy of the host's, and all of these are removed at the end. Processes that a
//! page leaves running, such as a server or a guest, end with the shell.
//!
//! | path or name | what it is |
//! |---|---|
//! | `/tmp/tour` | the working directory of the page |
//! | `~/lamina` | the source; `~/lamina/target/guest` has the guests of `scripts/guest` and `scripts/debian` |
//! | `*.example.org`, `store.example` | this host, over the loopback device of the namespace |

use std::io::{PipeReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use testkit::machines;

/// Time limit of a command on a loaded machine. Guests run without KVM.
const COMMAND_MAX: Duration = Duration::from_secs(1800);
/// How long to wait for the output of a background command.
const BACKGROUND_MAX: Duration = Duration::from_secs(60);
/// Mark that the shell prints after each command, followed by the exit code.
const MARK: &str = "\u{1}ended ";

const HOSTS: &str = "127.0.0.1 localhost backup.example.org build.example.org store.example\n";

/// All paths are resolved before other folders are mounted over them, because the source may be inside one of these.
const BEGIN: &str = r#"
set -e
mkdir -p "$SCRATCH"/{tmp/tour,srv,var-lib/lamina,home,source,program,tools} "$TOOLS"
mkdir -p "$SOURCE/target/guest"
mount --rbind "$SOURCE" "$SCRATCH/source"
mount --rbind "$PROGRAM" "$SCRATCH/program"
mount --rbind "$TOOLS" "$SCRATCH/tools"
mount --bind "$GUEST" "$SCRATCH/source/target/guest"
cp -a /etc "$SCRATCH/etc" 2>/dev/null || true
cp "$SCRATCH/hosts" "$SCRATCH/etc/hosts"
mount --rbind "$SCRATCH" /mnt
mount -t tmpfs tmpfs /dev/shm
for folder in tmp srv etc var-lib; do mount --bind /mnt/$folder /${folder/-//}; done
ln -s /mnt/source /mnt/home/lamina
ip link set lo up
export HOME=/mnt/home PATH=/mnt/program:/mnt/tools:$PATH:/usr/local/sbin:/usr/sbin:/sbin LC_ALL=C.UTF-8
export FOLDER=/mnt
cd /tmp/tour
set +e
"#;

/// Result of a command.
pub struct Done {
    pub code: i32,
    /// Standard output and error, interleaved as on a terminal.
    pub output: String,
}

/// A shell that keeps variables, working directory and background processes between commands.
pub struct Shell {
    child: Child,
    stdin: ChildStdin,
    output: Receiver<Vec<u8>>,
    scratch: TempDir,
}

impl Shell {
    pub fn new(root: &Path) -> Self {
        let scratch = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_lamina")).parent().unwrap();
        // The tools that `scripts/setup` builds.
        let tools = program.parent().unwrap().join("tools/bin");
        std::fs::write(scratch.path().join("hosts"), HOSTS).unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command
            .args(["--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"])
            .args(["bash", "--noprofile", "--norc"])
            .envs([("SCRATCH", scratch.path()), ("SOURCE", root), ("PROGRAM", program), ("GUEST", machines::guest())])
            .env("TOOLS", tools)
            .env_remove("LAMINA_DATASTORE")
            .env_remove("RUST_LOG")
            .stdin(Stdio::piped())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer)
            // The shell is in another process group than the test, so that signals of the terminal reach only the test.
            .process_group(0);
        let mut child = command.spawn().expect("unshare, of util-linux");
        drop(command);
        let stdin = child.stdin.take().unwrap();
        let mut shell = Self { child, stdin, output: collected(reader), scratch };
        let done = shell.run(BEGIN, 0);
        assert_eq!(done.code, 0, "the namespaces of a page: {}", done.output);
        shell
    }

    /// Runs a command. A background command (`&`) must print `lines` lines before the next one is run.
    pub fn run(&mut self, command: &str, lines: usize) -> Done {
        // The shell reads commands from its standard input, so programs that it starts have another standard input.
        std::fs::write(self.scratch.path().join("command"), command).unwrap();
        let mut output = Vec::new();
        let step = format!("eval \"$(<{}/command)\" </dev/null; __code=$?\n", self.folder());
        self.stdin.write_all(step.as_bytes()).unwrap();
        if command.ends_with('&') {
            let begin = Instant::now();
            while output.iter().filter(|byte| **byte == b'\n').count() < lines && begin.elapsed() < BACKGROUND_MAX {
                output.extend(self.output.recv_timeout(Duration::from_millis(100)).unwrap_or_default());
            }
        }
        let mark = "printf '\\n\\001ended %d\\n' \"$__code\"\n".to_string();
        self.stdin.write_all(mark.as_bytes()).unwrap();
        let begin = Instant::now();
        loop {
            let text = String::from_utf8_lossy(&output).into_owned();
            if let Some((text, code)) = text.split_once(&format!("\n{MARK}"))
                && let Some(code) = code.strip_suffix('\n')
            {
                return Done { code: code.parse().unwrap(), output: text.into() };
            }
            assert!(begin.elapsed() < COMMAND_MAX, "no end of: {command}\n{text}");
            match self.output.recv_timeout(Duration::from_secs(1)) {
                Ok(bytes) => output.extend(bytes),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(_) => panic!("the shell ended in: {command}\n{text}"),
            }
        }
    }

    /// The path of the test's folder in the shell: its path on the host, or `/mnt` once the folder is mounted there.
    fn folder(&self) -> &'static str {
        "${FOLDER:-$SCRATCH}"
    }
}

fn collected(mut reader: PipeReader) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut bytes) {
            if sender.send(bytes[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

impl Drop for Shell {
    /// The shell is the first process of its process namespace, so the kernel ends all other processes of the namespace
    /// with the shell.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
