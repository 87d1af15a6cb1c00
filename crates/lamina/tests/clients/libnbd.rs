//! Clients of libnbd: its Python binding, its tools, nbdkit as a proxy, and fio.

use crate::matrix::Line;
use crate::operation::{self, DATA_END, Operation, SIZE, WRITTEN};
use crate::program::Generation;
use crate::served::Target;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use testkit::newest::newest;

type Outcome = Result<(), String>;

/// The state of listening sockets, as the kernel prints it in /proc/net/unix.
const SOCKET_LISTENS: &str = " 00010000 ";

/// Runs one operation with the Python binding, which can select the style of requests and replies.
pub fn python(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let served = target.served;
    let style = format!("{:?}", line.style);
    let task = serde_json::json!({
        "style": style,
        "tls": target.tls,
        "socket": served.store.socket(),
        "port": served.port,
        "certificates": served.certificates(),
        "export": target.export,
    });
    ask(generation, line.operation, task)
}

fn ask(generation: Generation, operation: Operation, mut task: serde_json::Value) -> Outcome {
    let (offset, length) = operation.range();
    task["operation"] = operation.name().into();
    task["range"] = serde_json::json!([offset, length]);
    task["byte"] = WRITTEN.into();
    task["size"] = SIZE.into();
    task["data_end"] = DATA_END.into();
    generation.run("python3", &["-c", include_str!("operations.py"), &task.to_string()]).map(drop)
}

/// A process that serves an export in another form, such as a proxy; it is killed when this value is dropped.
pub struct Proxy {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Proxy {
    /// Starts a proxy and waits until it listens on the socket `proxy` in its folder.
    pub fn listening(command: Command, folder: tempfile::TempDir) -> Result<Self, String> {
        let socket = folder.path().join("proxy").display().to_string();
        // The existence of the socket's file is not enough: the file is created before the socket accepts connections.
        let listens = |line: &str| line.ends_with(&socket) && line.contains(SOCKET_LISTENS);
        Self::start(command, folder, || std::fs::read_to_string("/proc/net/unix").unwrap().lines().any(listens))
    }

    fn start(mut command: Command, folder: tempfile::TempDir, is_ready: impl Fn() -> bool) -> Result<Self, String> {
        let log = tempfile::tempfile().unwrap();
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let mut proxy = Self { child, _folder: folder };
        let mut ended = None;
        testkit::process::until("a proxy is ready or has ended", || {
            ended = proxy.child.try_wait().unwrap();
            ended.is_some() || is_ready()
        });
        ended.map_or(Ok(proxy), |status| Err(format!("{command:?}: {status} before it was ready")))
    }

    /// Ends the proxy with a signal and waits for its end.
    pub fn stop(self, signal: &str) {
        testkit::process::send(self.child.id(), signal);
        self.wait();
    }

    fn wait(mut self) {
        testkit::process::wait(&mut self.child);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command without `timeout`, so that signals are sent to the program itself.
pub fn service(generation: Generation, name: &str) -> Command {
    let mut command = Command::new(generation.program(name));
    command.stdin(Stdio::null());
    command
}

/// nbdkit's `nbd` plugin as a proxy. The Python binding connects to the proxy.
pub fn nbdkit(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let served = target.served;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("proxy");
    let mut command = service(generation, "nbdkit");
    command.args(["--foreground", "--unix"]).arg(&socket);
    match generation {
        Generation::Installed => command.arg("nbd"),
        Generation::Newest => command.arg(newest().join("nbdkit-nbd-plugin.so")),
    };
    command.arg(format!("export={}", target.export));
    if target.tls {
        command.args(["hostname=127.0.0.1", "tls=require"]).arg(format!("port={}", served.port));
        command.arg(format!("tls-certificates={}", served.certificates().display()));
    } else {
        command.arg(format!("socket={}", served.store.socket().display()));
    }
    let proxy = Proxy::listening(command, folder)?;
    let task = serde_json::json!({ "style": "any", "tls": false, "socket": socket, "export": "" });
    ask(generation, line.operation, task)?;
    proxy.stop(if line.operation == Operation::Fua { "KILL" } else { "TERM" });
    Ok(())
}

/// Creates a sparse image with this content.
pub fn image(path: &Path, content: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(content.len() as u64).unwrap();
    for (number, block) in content.chunks(4096).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, number as u64 * 4096).unwrap();
        }
    }
}

/// nbdcopy: copies images in and out.
pub fn nbdcopy(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let path = target.served.scratch().join("image");
    let text = path.to_str().unwrap();
    if line.operation == Operation::Read {
        generation.run("nbdcopy", &[&target.uri(), text])?;
        return same(&std::fs::read(&path).unwrap(), &operation::base());
    }
    image(&path, &line.operation.content());
    generation.run("nbdcopy", &["--flush", text, &target.uri()]).map(drop)
}

fn same(found: &[u8], expected: &[u8]) -> Outcome {
    if found == expected { Ok(()) } else { Err("the bytes that the client read are not those of the disk".into()) }
}

/// nbdinfo: shows the allocation.
pub fn nbdinfo(generation: Generation, target: &Target, _line: &Line) -> Outcome {
    let text = generation.run("nbdinfo", &["--map", "--json", &target.uri()])?;
    let map: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
    let extents: Vec<(u64, u64, u64)> = map
        .as_array()
        .into_iter()
        .flatten()
        .map(|e| ["offset", "length", "type"].map(|key| e[key].as_u64().unwrap_or(u64::MAX)).into())
        .collect();
    let (data, all) = (DATA_END as u64, SIZE as u64);
    if extents == [(0, data, 0), (data, all - data, 3)] { Ok(()) } else { Err(text) }
}

/// nbddump: prints the bytes.
pub fn nbddump(generation: Generation, target: &Target, _line: &Line) -> Outcome {
    let text = generation.run("nbddump", &[&target.uri()])?;
    // nbddump omits repeated lines, so the test checks the offset at which each byte value begins.
    let runs: Vec<(usize, &str)> = text
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(offset, bytes)| (usize::from_str_radix(offset, 16).unwrap_or(usize::MAX), bytes.get(..2).unwrap_or("")))
        .collect();
    let expected = [(0, "11"), (DATA_END / 2, "22"), (DATA_END, "00"), (SIZE - 16, "00")];
    if runs == expected { Ok(()) } else { Err(text) }
}

/// nbdfuse: the export as a file in FUSE.
pub fn nbdfuse(generation: Generation, target: &Target, line: &Line) -> Outcome {
    use std::os::unix::fs::FileExt;
    assert!(
        Path::new("/dev/fuse").exists(),
        "this machine has no /dev/fuse, which nbdfuse needs: load the kernel's module fuse, or give the container the device"
    );
    let folder = tempfile::tempdir().unwrap();
    let mount = folder.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let mut command = service(generation, "nbdfuse");
    command.arg(&mount).arg(target.uri());
    let path = mount.join("nbd");
    let proxy = Proxy::start(command, folder, || path.exists())?;
    let (offset, length) = line.operation.range();
    let [offset_text, length_text] = [offset, length].map(|number| number.to_string());
    let allocate = |mode: &str| {
        let arguments = [mode, "--keep-size", "--offset", &offset_text, "--length", &length_text];
        Generation::Installed.run("fallocate", &[&arguments[..], &[path.to_str().unwrap()]].concat()).map(drop)
    };
    let done = match line.operation {
        Operation::Read => same(&std::fs::read(&path).map_err(|e| e.to_string())?, &operation::base()),
        Operation::Trim => allocate("--punch-hole"),
        Operation::Zero => allocate("--zero-range"),
        _ => std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| {
                file.write_all_at(&vec![WRITTEN; length], offset as u64)?;
                file.sync_all()
            })
            .map_err(|e| e.to_string()),
    };
    let done = done.and_then(|()| match line.operation {
        Operation::Read => Ok(()),
        operation => same(&std::fs::read(&path).map_err(|e| e.to_string())?, &operation.content()),
    });
    // The mount stays busy while a process that another test has just forked has the file open.
    testkit::process::until("nbdfuse is unmounted", || {
        Generation::Installed.run("fusermount3", &["-u", mount.to_str().unwrap()]).is_ok()
    });
    // nbdfuse ends after its last request once it is unmounted.
    proxy.wait();
    done
}

/// fio's NBD engine, which verifies the data that it wrote.
pub fn fio(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let (offset, length) = match line.operation {
        // fio can verify only a single pattern, so it reads only the first run of data.
        Operation::Read => (0, DATA_END / 2),
        operation => operation.range(),
    };
    let pattern = if line.operation == Operation::Read { 0x11 } else { WRITTEN };
    let action: &[&str] = match line.operation {
        Operation::Read => &["--rw=read"],
        Operation::Trim => &["--rw=trim"],
        _ => &["--rw=write", "--end_fsync=1", "--do_verify=1"],
    };
    let uri = target.uri();
    // fio's engine rejects a URI that names a file.
    let uri = format!("--uri={}", if target.tls { uri.split('?').next().unwrap_or_default() } else { &uri });
    let [offset, size, block] =
        [("offset", offset), ("size", length), ("bs", length)].map(|(name, value)| format!("--{name}={value}"));
    let pattern = format!("--verify_pattern={pattern:#x}");
    let mut arguments = vec!["--name=line", "--ioengine=nbd", "--thread=1", &uri, &offset, &size, &block];
    if line.operation != Operation::Trim {
        arguments.extend(["--verify=pattern", "--verify_fatal=1", "--verify_state_save=0", &pattern]);
    }
    let arguments = [&arguments, action].concat();
    let text =
        if target.tls { fio_with_home(generation, target, &arguments)? } else { generation.run("fio", &arguments)? };
    if text.contains("err= 0") { Ok(()) } else { Err(text) }
}

/// libnbd looks for certificates in `HOME` only if the user is not root, so fio runs as another user in a user
/// namespace.
fn fio_with_home(generation: Generation, target: &Target, arguments: &[&str]) -> Result<String, String> {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".pki")).unwrap();
    std::os::unix::fs::symlink(target.served.certificates(), home.path().join(".pki/libnbd")).unwrap();
    let variable = format!("HOME={}", home.path().display());
    let program = generation.program("fio");
    // fio creates files in its current folder.
    let state = format!("--aux-path={}", home.path().display());
    let user = ["--user", "--map-user=1000", "--map-group=1000", "env", &variable, &program, &state];
    Generation::Installed.run("unshare", &[&user, arguments].concat())
}
