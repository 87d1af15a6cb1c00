//! A served datastore with machines that have nothing to boot.

use crate::machines::unless_busy;
use crate::nbd::Client;
use crate::pattern;
use crate::process::{Done, Serving, Store, output};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Memory that is sufficient for the firmware, which finds nothing to boot and waits.
pub const MEMORY: &str = "32M";
pub const MIB: u64 = 1 << 20;

/// The datastore and its server. Dropping this value stops the machines.
pub struct Fleet {
    pub store: Store,
    pub server: Option<Serving>,
    memory: tempfile::TempDir,
}

impl Fleet {
    pub fn new() -> Self {
        let (store, memory) = (Store::new(), tempfile::tempdir_in("/dev/shm").unwrap());
        let server = Some(store.serve(""));
        Self { store, server, memory }
    }

    /// A command about machines, not started yet.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = self.store.command(&format!("vm {arguments}"));
        command.env("LAMINA_MEMORY", self.memory.path());
        command
    }

    pub fn run(&self, arguments: &str) -> Done {
        output(&mut self.command(arguments)).into()
    }

    /// Creates a machine with its own disk and without network cards.
    pub fn make(&self, name: &str, disk: &str) {
        self.run(&format!("create {name} --memory {MEMORY} --disk-size {disk} --network none")).ok();
    }

    /// All machines by name, as `list` reports them.
    pub fn list(&self) -> BTreeMap<String, Value> {
        let list = unless_busy(|| self.run("list --json").json());
        let machines = list["machines"].as_array().unwrap().iter();
        machines.map(|one| (one["name"].as_str().unwrap().to_owned(), one.clone())).collect()
    }

    pub fn names(&self) -> Vec<String> {
        self.list().into_keys().collect()
    }

    pub fn state(&self, name: &str) -> String {
        self.show(name)["state"].as_str().unwrap().to_owned()
    }

    pub fn show(&self, name: &str) -> Value {
        unless_busy(|| self.run(&format!("show {name} --json")).json())
    }

    /// All disks of the datastore.
    pub fn disks(&self) -> BTreeSet<String> {
        let list = self.store.run("disk list --json").json();
        list["disks"].as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
    }

    /// All snapshots of the datastore: `disk@snapshot`, and the number of clones based on each.
    pub fn snapshots(&self) -> BTreeMap<String, usize> {
        let list = self.store.run("snapshot list --json").json();
        let of = |one: &Value| {
            let name = format!("{}@{}", one["disk"].as_str().unwrap(), one["name"].as_str().unwrap());
            (name, one["clones"].as_array().unwrap().len())
        };
        list["snapshots"].as_array().unwrap().iter().map(of).collect()
    }

    /// Kills a command with SIGKILL, and waits for the end of a process that it was starting: between fork and exec,
    /// this process is a copy of the command and so holds the command's locks.
    pub fn kill(&self, command: &mut Child) {
        command.kill().unwrap();
        command.wait().unwrap();
        let server = self.server.as_ref().unwrap().pid();
        crate::process::until("no process of a killed command is left", || {
            let store = self.store.path();
            processes(&store).into_iter().all(|(pid, words)| pid == server || !words[0].ends_with("lamina"))
                && crate::process::lockers(&self.folder()).is_empty()
        });
    }

    pub fn folder(&self) -> PathBuf {
        self.store.path().join("machines")
    }

    /// Folders of machines that are incomplete or partly deleted.
    pub fn unfinished(&self) -> Vec<String> {
        let names = crate::process::files(&self.folder());
        names.into_iter().filter(|name| name.starts_with(".new-") || name.starts_with(".old-")).collect()
    }

    /// Number of memory files; if there are none, their folder must not exist.
    pub fn memory_files(&self) -> usize {
        let folders = std::fs::read_dir(self.memory.path()).unwrap();
        let counts = folders.map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap().count());
        counts.inspect(|files| assert_ne!(*files, 0, "an empty folder for memory files is left")).sum()
    }

    /// QEMU processes of this datastore's machines: pid and name of the machine.
    pub fn processes(&self) -> BTreeMap<u32, String> {
        let qemus = processes(&self.folder()).into_iter().filter(|(_, words)| words[0].contains("qemu-system"));
        let named = qemus.map(|(pid, words)| {
            let name = words.iter().skip_while(|word| *word != "-name").nth(1).unwrap();
            (pid, name.split(',').next().unwrap().to_owned())
        });
        named.collect()
    }
}

/// Processes whose command line contains a folder, with their arguments.
fn processes(folder: &Path) -> BTreeMap<u32, Vec<String>> {
    let mut found = BTreeMap::new();
    let folder = folder.to_str().unwrap();
    for entry in std::fs::read_dir("/proc").unwrap() {
        let Some(pid) = entry.unwrap().file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process that has just ended has an empty command line.
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<String> =
            line.split(|byte| *byte == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        if words.iter().any(|word| word.contains(folder)) {
            found.insert(pid, words);
        }
    }
    found
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (pid, name) in self.processes() {
            if std::thread::panicking() {
                eprintln!("ending machine {name}, process {pid}");
            }
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
    }
}

/// Writes a megabyte of data that depends on offset and seed.
pub fn write(fleet: &Fleet, disk: &str, at: u64, seed: u64) {
    let mut client = Client::connect(&fleet.store.socket(), disk).unwrap();
    client.write(at, &pattern::bytes(seed, MIB as usize)).unwrap();
    client.flush().unwrap();
}

/// Whether the disk has the data of [`write`].
pub fn contains(fleet: &Fleet, disk: &str, at: u64, seed: u64) -> bool {
    let mut client = Client::connect(&fleet.store.socket(), disk).unwrap();
    client.read(at, MIB as u32).unwrap() == pattern::bytes(seed, MIB as usize)
}

#[track_caller]
pub fn holds(fleet: &Fleet, disk: &str, at: u64, seed: u64) {
    assert!(contains(fleet, disk, at, seed), "{disk} at {at}: not the content of seed {seed}");
}
