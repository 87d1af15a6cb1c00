//! A complete small measurement with the real servers, and an interrupted one. The tests need the tools that
//! scripts/setup installs.

#![allow(clippy::unwrap_used)]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

fn study(folder: &Path, words: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lamina-study"));
    command.args(["--work", "work", "--results", "results", "--disk-size", "64M"]).args(words).current_dir(folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Checks that no files and servers of the run remain.
fn clean(folder: &Path, id: u32) {
    assert_eq!(fs::read_dir(folder.join("work")).unwrap().count(), 0);
    let sockets = format!("lamina-study-run-{id}");
    assert!(!std::env::temp_dir().join(&sockets).exists());
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&command).contains(&sockets), "{process:?} still runs");
    }
}

#[test]
fn a_short_peers_study_runs_with_every_server() {
    let folder = folder("peers");
    let words = ["speed", "--peers-only", "--runs", "2", "--seconds", "0.2", "--cell", "4k-qd16"];
    let child = study(&folder, &words);
    let id = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    clean(&folder, id);
    let files: Vec<_> = fs::read_dir(folder.join("results")).unwrap().flatten().collect();
    assert_eq!(files.len(), 1);
    let results: Value = serde_json::from_slice(&fs::read(files[0].path()).unwrap()).unwrap();
    let cells = results["raw"].as_array().unwrap();
    // Random reads and writes at depth 16, in both modes.
    assert_eq!(cells.len(), 4);
    for cell in cells {
        for peer in ["nbdkit", "qemu-raw", "qcow2", "qcow2-ext"] {
            let samples = cell["samples"][peer].as_array().unwrap();
            assert_eq!(samples.len(), 2, "{cell}");
            assert!(samples.iter().all(|s| s["rate"].as_f64().unwrap() > 0.0));
        }
    }
    assert!(results["machine"]["processors"].as_u64().unwrap() > 0);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_interrupted_run_leaves_no_files() {
    let folder = folder("interrupted");
    let child = study(&folder, &["speed", "--peers-only", "--seconds", "30", "--mode", "buffered"]);
    let id = child.id();
    // Waits until fio is running with the first server.
    let began = Instant::now();
    while !folder.join(format!("work/run-{id}/fio.json")).exists() {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(began.elapsed() < Duration::from_secs(90));
    clean(&folder, id);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn wrong_arguments_are_named_in_the_error() {
    let folder = folder("usage");
    for (words, named) in [
        (vec!["speed", "--peers-only", "--cell", "no-such-cell"], "no-such-cell"),
        (vec!["speed", "--seconds", "0"], "--seconds"),
        (vec!["thin", "--lamina", "/no/such/lamina"], "/no/such/lamina"),
        (vec!["no-such-study"], "no-such-study"),
    ] {
        let output = study(&folder, &words).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains(named), "{words:?}: {said}");
    }
    fs::remove_dir_all(folder).unwrap();
}
