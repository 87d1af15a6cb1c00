//! Jobs and events of a served datastore, through the command line.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use testkit::process::{Done, PATIENCE, Serving, Store, output};
use testkit::protocol::{CMD_RESIZE, Client, Mode};

/// A file without zeros, of this size in MiB.
fn make_raw(path: &Path, mib: usize) {
    std::fs::write(path, (0..mib << 20).map(|at| (at >> 9) as u8 | 1).collect::<Vec<u8>>()).unwrap();
}

/// A served datastore, and a raw image to convert.
fn world() -> (Store, Serving, String) {
    let store = Store::new();
    let raw = store.path().with_file_name("a.raw");
    make_raw(&raw, 16);
    let serving = store.serve("");
    (store, serving, raw.display().to_string())
}

/// Starts a job that takes minutes; returns its id.
fn slow(store: &Store, raw: &str, disk: &str) -> String {
    let arguments = format!("convert -f raw {raw} disk:{disk} -d native --rate 100K --background --json");
    store.run(&arguments).json()["id"].as_str().unwrap().to_owned()
}

/// Waits until a condition holds.
#[track_caller]
fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_background_job_continues_without_its_command() {
    let (store, mut serving, raw) = world();
    let started = store.run(&format!("convert -f raw {raw} disk:vm1 -d native --background")).ok();
    let id = started.strip_prefix("job ").and_then(|rest| rest.strip_suffix(" started\n")).unwrap();
    let answer = store.run(&format!("job wait {id}")).ok();
    assert!(answer.contains("vm1"), "the output of the command: {answer}");
    let waited = store.run(&format!("job wait {id} --json")).json();
    assert_eq!((&waited["target"], &waited["capacity"]), (&"vm1".into(), &(16 << 20).into()));
    let shown = store.run(&format!("job show {id} --json")).json();
    assert_eq!((&shown["state"], &shown["kind"], &shown["object"]), (&"done".into(), &"convert".into(), &"vm1".into()));
    assert_eq!((&shown["background"], &shown["error"]), (&true.into(), &Value::Null));
    assert!(store.run(&format!("job show {id}")).ok().contains("done"));
    assert_eq!(store.run("disk show vm1 --json").json()["capacity"], 16 << 20);
    // Waiting for a failed job exits with the exit code of the job's command.
    let failing = store.run(&format!("convert -f raw {raw} disk:vm1 -d native --background --json")).json();
    store.run(&format!("job wait {}", failing["id"].as_str().unwrap())).fails(1, "vm1");
    assert_eq!(serving.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn other_clients_can_list_cancel_and_await_a_job() {
    let (store, mut serving, raw) = world();
    let id = slow(&store, &raw, "vm1");
    until("it has progress", || store.run(&format!("job show {id} --json")).json()["done"] != 0);
    let list = store.run("job list --json").json();
    let job = list["jobs"].as_array().unwrap().iter().find(|job| job["id"] == id.as_str()).unwrap();
    assert_eq!((&job["state"], &job["total"]), (&"running".into(), &(16 << 20).into()));
    assert!(store.run("job list").ok().contains("convert vm1"));
    assert_eq!(store.run(&format!("job cancel {id}")).ok(), format!("cancelling job {id}\n"));
    store.run(&format!("job wait {id}")).fails(130, "");
    assert_eq!(store.run(&format!("job show {id} --json")).json()["state"], "cancelled");
    store.run("disk show vm1").fails(3, "vm1");

    // Other commands can list and cancel attached operations. An attached operation is cancelled when its client is
    // killed.
    for kill in [false, true] {
        let mut command = store.command(&format!("convert -f raw {raw} disk:vm2 -d native --rate 100K"));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let attached = || {
            let list = store.run("job list --json").json();
            let jobs = list["jobs"].as_array().unwrap().clone();
            jobs.into_iter().find(|job| job["object"] == "vm2" && job["state"] == "running")
        };
        until("it is a job", || attached().is_some());
        let job = attached().unwrap();
        assert_eq!(job["background"], false);
        let id = job["id"].as_str().unwrap();
        if kill {
            child.kill().unwrap();
        } else {
            store.run(&format!("job cancel {id}")).ok();
        }
        let code = child.wait().unwrap().code();
        assert_eq!(code, (!kill).then_some(130));
        until("it is over", || store.run(&format!("job show {id} --json")).json()["state"] == "cancelled");
    }
    assert_eq!(serving.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn jobs_end_with_their_server() {
    let (store, mut serving, raw) = world();
    let id = slow(&store, &raw, "vm1");
    assert_eq!(serving.stop("TERM"), Some(0));
    store.run("disk show vm1").fails(3, "vm1");
    assert_eq!(store.run("job list").ok(), "no jobs\n");
    store.run(&format!("job wait {id}")).fails(1, "not served");
    store.run("check --background").fails(1, "lamina serve");
    store.run("events").fails(1, "lamina serve");
    let mut serving = store.serve("");
    store.run(&format!("job wait {id}")).fails(3, &id);
    // Short operations, and operations that the server does not carry out, cannot be jobs.
    store.run("disk list --background").fails(2, "--background");
    store.run("vm list --background").fails(1, "carried out by the requesting process");
    store.run("completion bash --background").fails(2, "background");
    assert_eq!(serving.stop("KILL"), None);
    store.is_clean();
}

/// `lamina events`, read line by line.
struct Events {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Events {
    fn new(store: &Store) -> Self {
        let mut child = store.command("events --json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut events = Self { child, lines };
        assert_eq!(events.next()["event"], "subscribed");
        events
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }
}

#[test]
fn events_are_printed_as_lines() {
    let store = Store::new();
    let mut serving = store.serve("");
    let mut events = Events::new(&store);
    store.run("disk create vm1 8M").ok();
    store.run("snapshot create vm1@a").ok();
    store.run("clone vm1@a vm2").ok();
    store.run("disk rename vm2 vm3").ok();
    let mut client = Client::open(&store.socket(), "vm1", Mode::Structured);
    assert_eq!(client.ask(CMD_RESIZE, 0, 16 << 20, 0).error, 0);
    client.leave();
    let mut told = Vec::new();
    while told.len() < 5 {
        let event = events.next();
        // Creating a disk may take long, so it is a job too.
        if !event["event"].as_str().unwrap().starts_with("job_") {
            told.push((event["event"].as_str().unwrap().to_owned(), event["disk"].as_str().unwrap().to_owned()));
        }
    }
    let expected = [
        ("disk_created", "vm1"),
        ("snapshot_created", "vm1"),
        ("disk_created", "vm2"),
        ("disk_renamed", "vm2"),
        ("disk_resized", "vm1"),
    ];
    assert_eq!(told, expected.map(|(event, disk)| (event.to_owned(), disk.to_owned())));
    // The subscription ends when the command is interrupted, and when the server stops.
    let mut other = Events::new(&store);
    let _: Done = output(std::process::Command::new("kill").args(["-INT", &other.child.id().to_string()])).into();
    assert_eq!(other.child.wait().unwrap().code(), Some(130));
    assert_eq!(serving.stop("TERM"), Some(0));
    assert_eq!(events.child.wait().unwrap().code(), Some(1));
}
