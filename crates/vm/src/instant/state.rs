//! Device state out of a QEMU and into another.

use crate::qemu::features::Features;
use crate::qmp::Client;
use backend::{Error, ErrorKind, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long saving or loading may take: memory is not part of it.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often progress is asked for.
const POLL: Duration = Duration::from_micros(500);

/// Prepares either side. Due before the guest has to stand still.
pub fn prepare(monitor: &mut Client, features: &Features) -> Result<()> {
    if !features.ignore_shared {
        let text =
            format!("QEMU {} cannot leave shared memory out of a state: instant clones need that", features.version);
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let capabilities: Vec<Value> =
        ["x-ignore-shared", "events"].iter().map(|name| json!({ "capability": name, "state": true })).collect();
    monitor.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).map(drop)
}

/// Saves the device state of a guest that stands still.
pub fn save(monitor: &mut Client, features: &Features, file: &Path) -> Result<()> {
    monitor.execute("migrate", json!({ "uri": uri(features, file, Way::Out) }))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = monitor.execute("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => {
                let why = answer["error-desc"].as_str().unwrap_or("it does not say why");
                let text = format!("QEMU could not save its state to '{}': {why}", file.display());
                return Err(Error::new(ErrorKind::Io, text));
            }
            _ if Instant::now() >= deadline => {
                let text = format!("QEMU has not saved its state to '{}' within {PATIENCE:?}", file.display());
                return Err(Error::new(ErrorKind::Io, text));
            }
            _ => thread::sleep(POLL),
        }
    }
}

/// Loads device state; the guest stands still afterwards.
pub fn load(monitor: &mut Client, features: &Features, file: &Path) -> Result<()> {
    monitor.execute("migrate-incoming", json!({ "uri": uri(features, file, Way::In) }))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = monitor.execute("query-status", json!({}))?;
        match status["status"].as_str() {
            Some("inmigrate") if Instant::now() < deadline => thread::sleep(POLL),
            Some("inmigrate") => {
                let text = format!("QEMU has not loaded '{}' within {PATIENCE:?}", file.display());
                return Err(Error::new(ErrorKind::Io, text));
            }
            Some("paused" | "postmigrate" | "prelaunch" | "running") => return Ok(()),
            other => {
                let text = format!("QEMU could not load '{}': it is {}", file.display(), other.unwrap_or("gone"));
                return Err(Error::new(ErrorKind::Io, text));
            }
        }
    }
}

enum Way {
    Out,
    In,
}

/// How a file is called: directly where this QEMU can, by way of a shell's pipe where it cannot.
fn uri(features: &Features, file: &Path, way: Way) -> String {
    if features.migrate_to_file {
        return format!("file:{}", file.display());
    }
    // In single quotes everything stands for itself but the quote.
    let quoted = file.display().to_string().replace('\'', r"'\''");
    match way {
        Way::Out => format!("exec:exec cat >'{quoted}'"),
        Way::In => format!("exec:exec cat '{quoted}'"),
    }
}
