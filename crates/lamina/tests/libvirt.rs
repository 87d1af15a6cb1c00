//! A guest of libvirt on a disk of the datastore, with a real libvirtd: restarts of the server under load, growing,
//! discards, snapshots with frozen file systems, and libvirt's own snapshots.
//!
//! libvirtd runs as root in a mount namespace, with its configuration, sockets and logs in a folder of the test. QEMU
//! runs as a user of its own, which can use the datastore's socket by `--socket-group`. `scripts/guest` builds the
//! guest.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use testkit::machines;
use testkit::machines::{KERNEL_LINE, LOAD, PATIENCE};
use testkit::process::{Done, Store, output, send, tool, wait};

/// Number of the user and of the group that QEMU runs as.
const QEMU_USER: u32 = 64055;
/// Restarts of the server under load.
const RESTARTS: usize = 3;

/// The shortest and the longest time between two evaluations of a condition.
const POLL_MIN: Duration = Duration::from_millis(50);
const POLL_MAX: Duration = Duration::from_secs(1);

/// Starts libvirtd in the folder `$1`. The names of libvirt's default user and group exist in the namespace only.
const START: &str = r#"
set -e
printf '%s\n' 'security_driver = "none"' 'user = "libvirt-qemu"' 'group = "libvirt-qemu"' 'namespaces = []' \
    'cgroup_controllers = []' 'stdio_handler = "file"' >"$1/etc/qemu.conf"
printf '%s\n' 'auth_unix_rw = "none"' >"$1/etc/libvirtd.conf"
{ cat /etc/passwd; echo "libvirt-qemu:x:$2:$2::/nonexistent:/usr/sbin/nologin"; } >"$1/passwd"
{ cat /etc/group; echo "libvirt-qemu:x:$2:"; } >"$1/group"
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/group" /etc/group
for pair in etc:/etc/libvirt run:/run/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
    mkdir -p "${pair#*:}"
    mount --bind "$1/${pair%%:*}" "${pair#*:}"
done
exec libvirtd -p "$1/run/libvirtd.pid"
"#;

/// A libvirtd with the domain `web`.
struct Libvirt {
    daemon: Child,
    folder: tempfile::TempDir,
}

impl Libvirt {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // QEMU's user passes through the folder.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).unwrap();
        for name in ["etc", "run", "lib", "log", "cache"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let log = fs::File::create(folder.path().join("libvirtd.log")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", START, "sh"]).arg(folder.path()).arg(QEMU_USER.to_string());
        let daemon = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let started = Self { daemon, folder };
        started.until("libvirtd answers", || started.ask("version").code == 0);
        started
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new("virsh");
        let socket = self.path("run/libvirt-sock");
        command.args(["--quiet", "-c", &format!("qemu+unix:///system?socket={}", socket.display())]);
        command.args(words.split_whitespace()).env("LC_ALL", "C");
        command
    }

    fn ask(&self, words: &str) -> Done {
        output(&mut self.command(words)).into()
    }

    /// Runs virsh; it must succeed.
    #[track_caller]
    fn virsh(&self, words: &str) -> String {
        let done = self.ask(words);
        assert_eq!(done.code, 0, "virsh {words}: {done:?}: {}", self.log());
        done.stdout
    }

    /// Runs virsh; it must fail with these words.
    #[track_caller]
    fn refuses(&self, words: &str, why: &str) {
        let done = self.ask(words);
        assert!(done.code != 0 && done.stderr.contains(why), "virsh {words}: {done:?}");
    }

    fn log(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        format!("{}\n{}\n{}", read("libvirtd.log"), read("log/qemu/web.log"), read("log/console"))
    }

    /// Waits until a condition, which then stays true, holds. Many conditions run programs in the guest, which delay
    /// what it does, so the condition is evaluated less often in a long wait.
    #[track_caller]
    fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < PATIENCE, "waited too long until {what}: {}", self.log());
            std::thread::sleep((begin.elapsed() / 10).clamp(POLL_MIN, POLL_MAX));
        }
    }

    /// Executes a command of the guest's agent; `None` if the agent does not answer.
    fn agent(&self, command: &str, arguments: &Value) -> Option<Value> {
        let request = json!({ "execute": command, "arguments": arguments }).to_string();
        let done: Done = output(self.command("qemu-agent-command web").arg(request)).into();
        let answer = (done.code == 0).then(|| serde_json::from_str::<Value>(&done.stdout).unwrap());
        answer.map(|answer| answer["return"].clone())
    }

    /// Like [`Self::agent`], repeated until the agent answers: a guest with little processor time is late for libvirt.
    #[track_caller]
    fn answer(&self, command: &str, arguments: &Value) -> Value {
        let mut answer = None;
        self.until(&format!("the agent answers to {command}"), || {
            answer = self.agent(command, arguments);
            answer.is_some()
        });
        answer.unwrap()
    }

    /// Runs a line in the guest's shell; returns its output.
    #[track_caller]
    fn shell(&self, line: &str) -> String {
        let arguments = json!({ "path": "/bin/sh", "arg": ["-c", line], "capture-output": true });
        let started = self.answer("guest-exec", &arguments);
        let mut ended = Value::Null;
        self.until(&format!("'{line}' has ended"), || {
            ended = self.answer("guest-exec-status", &json!({ "pid": started["pid"] }));
            ended["exited"] == true
        });
        assert_eq!(ended["exitcode"], 0, "{line}: {ended}: {}", self.log());
        let data = ended["out-data"].as_str().unwrap_or_default();
        let text = tool("sh", &["-c", "echo \"$1\" | base64 -d", "sh", data]);
        text.trim().to_owned()
    }

    /// Rounds of the guest's load so far.
    #[track_caller]
    fn rounds(&self) -> u64 {
        let rounds = self.shell("cat /run/rounds");
        rounds.parse().unwrap_or_else(|_| panic!("the guest's load ended with '{rounds}': {}", self.log()))
    }

    #[track_caller]
    fn until_load_continues(&self) {
        let before = self.rounds();
        self.until("the guest's load continues", || self.rounds() >= before + 2);
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // After a failure too, no QEMU may outlive the test.
        self.ask("destroy web");
        send(self.daemon.id(), "TERM");
        wait(&mut self.daemon);
    }
}

/// The definition of the domain.
fn domain(libvirt: &Libvirt, socket: &Path) -> String {
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("packaging/qemu-reconnect");
    // libvirt gives the files of a domain to QEMU's user, so the domain has copies.
    let [kernel, initrd, emulator] = [
        ("vmlinuz", machines::guest().join("vmlinuz")),
        ("initrd", machines::guest().join("vm-initrd")),
        ("qemu-reconnect", emulator),
    ]
    .map(|(name, from)| {
        let to = libvirt.path(name);
        fs::copy(from, &to).unwrap();
        to.display().to_string()
    });
    let console = libvirt.path("log/console");
    format!(
        "<domain type='qemu'>
  <name>web</name>
  <memory unit='MiB'>192</memory>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{KERNEL_LINE}</cmdline>
  </os>
  <devices>
    <emulator>{emulator}</emulator>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw' discard='unmap'/>
      <source protocol='nbd' name='vm1'>
        <host transport='unix' socket='{}'/>
      </source>
      <target dev='vda' bus='virtio'/>
    </disk>
    <serial type='file'><source path='{}'/></serial>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <memballoon model='none'/>
  </devices>
</domain>",
        socket.display(),
        console.display()
    )
}

/// Whether the file system on an export needs the recovery of its journal. `e2fsck` must find no other fault.
fn needs_recovery(store: &Store, export: &str, folder: &Path) -> bool {
    let image = folder.join("image");
    let image = image.to_str().unwrap();
    tool("nbdcopy", &[&store.uri(export), image]);
    let needs = tool("dumpe2fs", &["-h", image]).contains("needs_recovery");
    // Replays the journal of the copy; exit code 1 means that e2fsck has changed the copy.
    tool("sh", &["-c", "e2fsck -fp \"$1\" || [ $? = 1 ]", "sh", image]);
    tool("e2fsck", &["-fn", image]);
    needs
}

#[test]
fn a_guest_of_libvirt_outlives_restarts_grows_trims_and_is_frozen_for_snapshots() {
    let store = Store::new();
    fs::set_permissions(store.path().parent().unwrap(), Permissions::from_mode(0o711)).unwrap();
    let serve = || store.serve(&format!("--socket-group {QEMU_USER}"));
    store.run("disk create vm1 256M").ok();
    let mut server = serve();
    let libvirt = Libvirt::start();
    let file = libvirt.path("web.xml");
    fs::write(&file, domain(&libvirt, &store.socket())).unwrap();
    libvirt.virsh(&format!("define --validate {}", file.display()));
    libvirt.virsh("start web");
    libvirt.until("the guest's agent answers", || libvirt.agent("guest-ping", &json!({})).is_some());
    let pid = fs::read_to_string(libvirt.path("run/qemu/web.pid")).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap();
    assert!(status.contains(&format!("Uid:\t{QEMU_USER}\t")), "QEMU has a user of its own: {status}");

    libvirt.shell(LOAD);
    libvirt.until("the load has begun", || !libvirt.shell("ls /run/rounds 2>/dev/null || true").is_empty());
    for _ in 0..RESTARTS {
        libvirt.until_load_continues();
        assert_eq!(server.stop("TERM"), Some(0));
        server = serve();
    }
    libvirt.until_load_continues();

    store.run("disk resize vm1 320M --reconnect-clients").ok();
    // QEMU reads the new size when it reconnects; the guest's next request causes the reconnection.
    libvirt.until("libvirt grows the disk", || libvirt.ask("blockresize web vda 320M").code == 0);
    libvirt.until("the guest sees it", || libvirt.shell("cat /sys/block/vda/size") == (320 << 11).to_string());
    libvirt.until_load_continues();

    // With frozen file systems the snapshot needs no recovery, although the guest writes all the time.
    libvirt.virsh("domfsfreeze web");
    let taken = store.run("snapshot create vm1@frozen");
    libvirt.virsh("domfsthaw web");
    taken.ok();
    libvirt.until_load_continues();
    assert_eq!(libvirt.shell("cat /run/fsfreeze.log | tr '\\n' ' '"), "freeze thaw", "the guest's hooks");
    assert!(!needs_recovery(&store, "vm1@frozen", libvirt.folder.path()));
    store.run("snapshot create vm1@crash").ok();
    assert!(needs_recovery(&store, "vm1@crash", libvirt.folder.path()));

    // libvirt's own snapshots.
    libvirt.refuses("snapshot-create-as web one", "unsupported for storage type raw");
    libvirt.refuses("snapshot-create-as web one --disk-only", "is not a regular file");
    let overlay = libvirt.path("lib/overlay");
    libvirt.virsh(&format!("snapshot-create-as web one --disk-only --diskspec vda,file={}", overlay.display()));
    store.run("snapshot create vm1@before").ok();
    libvirt.shell("dd if=/dev/urandom of=/outside bs=1M count=8 conv=fsync 2>/dev/null");
    assert!(fs::metadata(&overlay).unwrap().len() > 8 << 20, "the guest writes to the file");
    store.run("snapshot create vm1@after").ok();
    let difference = store.run("snapshot diff vm1@before vm1@after --json").json();
    assert_eq!(difference["extents"], json!([]), "and not to the disk");
    libvirt.virsh("blockcommit web vda --active --pivot --wait");
    libvirt.virsh("snapshot-delete web one --metadata");
    libvirt.until_load_continues();

    libvirt.shell(
        "killall dd; sleep 1; rm -f /load /outside; dd if=/dev/urandom of=/large bs=1M count=48 2>/dev/null; sync",
    );
    let used = || store.run("disk show vm1 --json").json()["blocks_allocated"].as_u64().unwrap() * 4096;
    libvirt.until("the file is in the data files", || used() > 48 << 20);
    let full = used();
    libvirt.shell("rm /large; sync; fstrim /");
    libvirt.until("the space is free", || used() + (40 << 20) < full);
    let kernel = libvirt.shell("dmesg");
    for complaint in ["I/O error", "EXT4-fs error", "EXT4-fs warning"] {
        assert!(!kernel.contains(complaint), "{complaint}: {kernel}");
    }
    libvirt.virsh("shutdown web --mode agent");
    libvirt.until("the guest is off", || libvirt.virsh("domstate web").trim() == "shut off");
    libvirt.virsh("undefine web");
    drop(libvirt);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
