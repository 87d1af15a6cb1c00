//! Machines with a real guest, for tests: a served datastore, and the guest that `scripts/guest` builds.

use crate::process::{self, Done, Serving, Store, output, tool};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time limit for each step of a guest on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// A line of shell that writes in a guest all the time, and counts its rounds in `/run/rounds`. An error ends the loop,
/// and the file says `broken`. The count is renamed into place, because a file that the shell has just truncated reads
/// as empty.
pub const LOAD: &str = "(count() { echo $1 >/run/count; mv /run/count /run/rounds; }; n=0; count 0; \
    while dd if=/dev/urandom of=/load bs=64k count=32 conv=fsync 2>/dev/null && sync; do \
    n=$((n+1)); count $n; done; count broken) >/dev/null 2>&1 &";

/// The shortest and the longest time between two evaluations of a condition.
const POLL_MIN: Duration = Duration::from_millis(50);
const POLL_MAX: Duration = Duration::from_secs(1);

/// What a kernel gets on its command line in every guest. The last three parameters shorten the start of a guest
/// without KVM: page tables have four levels; programs are mapped at the same addresses each time, so that QEMU
/// translates them once; the self-tests of the crypto API are left out.
pub const KERNEL_LINE: &str = "console=ttyS0 quiet panic=-1 no5lvl norandmaps cryptomgr.notests";

/// The folder of the guest, which is built if necessary.
pub fn guest() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        // The folder is next to the output of cargo, which the user may have configured.
        let folder = process::program().ancestors().nth(2).unwrap().join("guest");
        tool(root.join("scripts/guest").to_str().unwrap(), &[folder.to_str().unwrap()]);
        folder
    })
}

/// The folder of the disk with Debian, which is made if necessary. It is in the guest's folder.
pub fn debian() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let folder = guest().join("debian");
    tool(root.join("scripts/debian").to_str().unwrap(), &[folder.to_str().unwrap()]);
    folder
}

/// A served datastore with running machines.
pub struct Room {
    pub store: Store,
    server: Option<Serving>,
}

/// Asks for machines until none of them is reported as busy, which a QEMU without processor time is for a moment.
pub fn unless_busy(ask: impl Fn() -> Value) -> Value {
    let begin = Instant::now();
    loop {
        let found = ask();
        let busy = |machine: &Value| machine["state"] == "busy";
        let any = busy(&found) || found["machines"].as_array().is_some_and(|machines| machines.iter().any(busy));
        if !any || begin.elapsed() > PATIENCE {
            return found;
        }
        std::thread::sleep(POLL_MIN);
    }
}

impl Room {
    pub fn new() -> Self {
        Self::serving("")
    }

    /// A datastore that is served with the given options.
    pub fn serving(options: &str) -> Self {
        Self::in_store(Store::new(), options)
    }

    /// A served datastore in a given folder.
    pub fn at(folder: &Path) -> Self {
        Self::in_store(Store::at(folder, "4M"), "")
    }

    fn in_store(store: Store, options: &str) -> Self {
        let server = Some(store.serve(options));
        Self { store, server }
    }

    /// Kills the server, and serves the datastore again with the given options.
    pub fn serve_again(&mut self, options: &str) {
        self.server.take().unwrap().kill();
        self.server = Some(self.store.serve(options));
    }

    pub fn run(&self, arguments: &str) -> Done {
        self.store.run(arguments)
    }

    /// Creates and starts a machine with a guest, with `append` on its kernel command line; returns when the guest is
    /// up.
    pub fn boot(&self, name: &str, memory: &str, append: &str) {
        self.boot_from("vm-initrd", name, &format!("--memory {memory}"), append);
    }

    /// Boots a machine with another initial RAM disk and further arguments.
    pub fn boot_from(&self, initrd: &str, name: &str, arguments: &str, append: &str) {
        let [kernel, initrd] = ["vmlinuz", initrd].map(|file| guest().join(file));
        let line = format!("{KERNEL_LINE} {append}");
        let mut command = self.store.command(&format!("vm create {name} {arguments} --disk-size 1G --start"));
        command.arg("--kernel").arg(kernel).arg("--initrd").arg(initrd).args(["--append", &line]);
        let done: Done = output(&mut command).into();
        done.ok();
        self.until_says(name, "guest: up");
        if !append.contains("noagent") {
            self.until_answers(name);
        }
    }

    /// Creates and starts a machine with Debian: systemd, cloud-init, an SSH server and QEMU's guest agent. Returns
    /// when cloud-init has ended. The guest gets an address by DHCP on every card, also on the card of a clone.
    pub fn boot_debian(&self, name: &str) {
        let mut import = self.store.command("disk import");
        import.arg(debian().join("debian.img")).args([name, "--from", "raw"]);
        let done: Done = output(&mut import).into();
        done.ok();
        let mut create = self.store.command(&format!("vm create {name} --disk {name} --memory 256M --start --ssh-key"));
        create.arg("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA test").arg("--kernel").arg(guest().join("vmlinuz"));
        create.arg("--initrd").arg(guest().join("vm-initrd")).args(["--append", KERNEL_LINE]);
        let done: Done = output(&mut create).into();
        done.ok();
        self.until_answers(name);
        // The configuration that cloud-init makes is for the card of this machine only.
        let network = "/etc/systemd/network/05-all.network";
        self.shell(name, &format!("printf '[Match]\\nName=e*\\n[Network]\\nDHCP=ipv4\\n' >{network}"));
        self.until(&format!("cloud-init of {name} has ended"), || {
            let ended = "systemctl is-active ssh && ! systemctl is-active cloud-final | grep activating";
            let mut command = self.store.command(&format!("vm exec {name} -- /bin/sh -c"));
            let done: Done = output(command.arg(ended)).into();
            done.code == 0
        });
    }

    /// The console output of a machine.
    pub fn console(&self, name: &str) -> String {
        self.run(&format!("vm console {name} --said")).stdout
    }

    pub fn until_says(&self, name: &str, words: &str) {
        self.until(&format!("{name} says '{words}'"), || self.console(name).contains(words));
    }

    pub fn until_answers(&self, name: &str) {
        self.until(&format!("{name}'s agent answers"), || self.run(&format!("vm exec {name} -- /bin/true")).code == 0);
    }

    /// Waits until a condition, which then stays true, holds; otherwise panics with all console outputs. Many
    /// conditions run programs in the guest, which delay what it does, so the condition is evaluated less often in a
    /// long wait.
    #[track_caller]
    pub fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !condition() {
            if begin.elapsed() >= PATIENCE {
                let said = self.names().into_iter().map(|name| format!("{name}: {}", self.console(&name)));
                panic!("waited too long until {what}: {}", said.collect::<String>());
            }
            std::thread::sleep((begin.elapsed() / 20).clamp(POLL_MIN, POLL_MAX));
        }
    }

    /// Runs a line in the guest's shell; returns its output.
    #[track_caller]
    pub fn shell(&self, name: &str, line: &str) -> String {
        let begin = Instant::now();
        let done = loop {
            let mut command = self.store.command(&format!("vm exec {name} -- /bin/sh -c"));
            let done: Done = output(command.arg(line)).into();
            // The agent of a guest that gets little processor time answers late. Then the line was not executed.
            let late = done.code == 125 && done.stderr.contains("no agent answers");
            if !late || begin.elapsed() > PATIENCE {
                break done;
            }
        };
        assert_eq!(done.code, 0, "{name}: {line}: {done:?}");
        done.stdout.trim().to_string()
    }

    #[track_caller]
    pub fn show(&self, name: &str) -> Value {
        unless_busy(|| self.run(&format!("vm show {name} --json")).json())
    }

    pub fn state(&self, name: &str) -> String {
        self.show(name)["state"].as_str().unwrap().to_string()
    }

    /// Names of the machines.
    pub fn names(&self) -> Vec<String> {
        let list = self.run("vm list --json").json();
        list["machines"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_string()).collect()
    }

    /// Names of the disks.
    pub fn disks(&self) -> BTreeSet<String> {
        let list = self.run("disk list --json").json();
        let disks = list.as_array().or_else(|| list["disks"].as_array()).unwrap();
        disks.iter().map(|one| one["name"].as_str().unwrap().to_string()).collect()
    }

    /// The last number that the guest's workload has printed; `None` if it has printed none.
    pub fn tick(&self, name: &str) -> Option<u64> {
        ticks(&self.console(name)).last().copied()
    }

    /// Waits until the guest's workload has printed another number, which shows that the guest runs.
    #[track_caller]
    pub fn until_counts(&self, name: &str) {
        let now = self.tick(name);
        self.until(&format!("{name} continues to count from {now:?}"), || self.tick(name) > now);
    }

    /// Asserts that the guest's memory has the content that its workload wrote.
    #[track_caller]
    pub fn memory_is_right(&self, name: &str) {
        let told = |console: &str| console.matches("workload: memory as it must be").count();
        let before = told(&self.console(name));
        self.shell(name, "killall -USR1 workload");
        self.until(&format!("{name} has looked at its memory"), || {
            let console = self.console(name);
            assert!(!console.contains("WRONG"), "{name}: {console}");
            told(&console) > before
        });
    }

    /// Executes a command on QEMU's monitor.
    pub fn ask(&self, name: &str, command: &str) -> Value {
        use std::io::{BufRead, BufReader, Write};
        let socket = self.show(name)["monitor"].as_str().unwrap().to_string();
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream
            .write_all(format!("{{\"execute\":\"qmp_capabilities\"}}{{\"execute\":\"{command}\",\"id\":7}}").as_bytes())
            .unwrap();
        let lines = BufReader::new(stream).lines();
        let mut answers = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        answers.find(|answer| answer["id"] == 7).unwrap()["return"].clone()
    }

    /// Bytes of guest memory that a machine has copied.
    pub fn own_memory(&self, name: &str) -> u64 {
        let pid = &self.show(name)["pid"];
        let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let mut of_guest = false;
        let mut kib = 0;
        for line in maps.lines() {
            // In `smaps`, the line of a mapping begins with its address, and the lines of its properties begin with a
            // capital letter.
            if line.starts_with(|first: char| first.is_ascii_digit() || first.is_ascii_lowercase()) {
                of_guest = line.contains("/image-");
            } else if let (true, Some(rest)) = (of_guest, line.strip_prefix("Anonymous:")) {
                kib += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            }
        }
        kib << 10
    }

    /// The folder of the machines' memory files.
    fn memory(&self) -> PathBuf {
        use std::os::unix::fs::MetadataExt;
        let store = std::fs::metadata(self.store.path()).unwrap();
        format!("/dev/shm/lamina-{}-{:x}-{:x}", store.uid(), store.dev(), store.ino()).into()
    }

    /// Memory files; if there are none, their folder must not exist.
    pub fn memory_files(&self) -> Vec<String> {
        let there = self.memory().exists();
        let files = if there { crate::process::files(&self.memory()) } else { Vec::new() };
        assert_eq!(files.is_empty(), !there);
        files
    }

    /// Names of the memory images of instant clones.
    pub fn images(&self) -> Vec<String> {
        crate::process::files(&self.store.path().join("memory-images"))
    }

    /// Stops the machines and the server, and checks that no files or processes remain.
    pub fn close(mut self) {
        self.end_machines();
        assert_eq!(self.server.take().unwrap().stop("TERM"), Some(0));
        self.store.is_clean();
    }

    fn end_machines(&self) {
        for name in self.names() {
            self.run(&format!("vm stop {name} --force"));
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.server.is_some() {
            // Machines are also ended after a failure, so that no process continues after its test.
            self.end_machines();
        }
        let _ = std::fs::remove_dir_all(self.memory());
    }
}

/// The numbers that the workload has printed on the console.
pub fn ticks(console: &str) -> Vec<u64> {
    // The last line may be incomplete.
    let whole = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.trim().strip_prefix("tick ")?.parse().ok()).collect()
}
