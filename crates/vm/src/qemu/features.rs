//! Features of a QEMU, which are queried: distributions patch QEMU, so that version numbers are not reliable.

use crate::qmp::Client;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a QEMU without a machine may take to answer, for each attempt. A QEMU was seen that greeted and then did
/// not answer, so the second attempt starts another process; it has more time, because the host may be overloaded.
const PATIENCE: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(100)];
/// How often the socket of a QEMU that is starting is looked for.
const START_INTERVAL: Duration = Duration::from_millis(5);

/// The accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Linux's KVM.
    Kvm,
    /// QEMU's translator (TCG).
    Tcg,
}

impl Accelerator {
    /// The accelerator's name in QEMU's option `-accel`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The features of a QEMU program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    /// Path of the program.
    pub program: PathBuf,
    /// The program's version, for messages.
    pub version: String,
    /// The accelerator to use.
    pub accelerator: Accelerator,
    /// Why KVM is not used.
    pub why_not_kvm: Option<String>,
    /// Whether memory files can be mapped copy-on-write from a file opened read-only (`readonly=on,rom=off`).
    pub memory_from_readonly_file: bool,
    /// Whether a migration can write to a file directly (`file:`).
    pub migrate_to_file: bool,
    /// Whether memory in a shared file can be left out of a saved state.
    pub ignore_shared: bool,
    /// Whether QEMU can filter its system calls (`-sandbox`), which needs the kernel's support too.
    pub sandbox: bool,
    /// Whether the option for another user is `-run-with user=`, and not `-runas`.
    pub run_with_user: bool,
    /// Whether a network card can be connected to a process over a stream socket.
    pub stream_network: bool,
    /// Whether the device state can be saved without memory (`xen-save-devices-state`, for every guest).
    pub save_devices: bool,
}

/// A QEMU process without a machine, for queries.
struct Probe {
    child: Child,
    folder: PathBuf,
}

impl Probe {
    /// Waits until QEMU listens.
    fn wait_for(&mut self, socket: &Path, program: &Path, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !socket.exists() {
            let ended = self.child.try_wait().during(|| format!("waiting for '{}'", program.display()))?;
            if let Some(status) = ended {
                let text = format!("'{}' ended before it could be queried ({status})", program.display());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            if Instant::now() >= deadline {
                let text = format!("'{}' did not listen within {patience:?}", program.display());
                return Err(Error::new(ErrorKind::Io, text));
            }
            thread::sleep(START_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // The probed QEMU has no disks and no guest, so it can be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Features {
    /// Queries `program`; `folder` is used for a temporary socket.
    pub fn detect(program: &Path, folder: &Path) -> Result<Self> {
        Self::detect_within(program, folder, PATIENCE)
    }

    fn detect_within(program: &Path, folder: &Path, [first, second]: [Duration; 2]) -> Result<Self> {
        match Self::query(program, folder, first) {
            Err(error) if error.kind() == ErrorKind::Io => {
                tracing::warn!(%error, "QEMU did not tell its features; trying again");
                Self::query(program, folder, second)
            }
            found => found,
        }
    }

    fn query(program: &Path, folder: &Path, patience: Duration) -> Result<Self> {
        let folder = folder.join(format!("probe-{}", std::process::id()));
        private::create_folders(&folder).during(|| format!("making '{}'", folder.display()))?;
        let socket = folder.join("qmp");
        let mut command = Command::new(program);
        command
            .args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = private::spawn(&mut command).map_err(|e| missing(program, e))?;
        let mut probe = Probe { child, folder };
        probe.wait_for(&socket, program, patience)?;
        let mut client = Client::connect(&socket, patience)?;
        let version = client.execute("query-version", json!({}))?;
        let schema = Schema(client.execute("query-qmp-schema", json!({}))?);
        let capabilities = client.execute("query-migrate-capabilities", json!({}))?;
        let ignore_shared =
            capabilities.as_array().is_some_and(|all| all.iter().any(|one| one["capability"] == "x-ignore-shared"));
        let why_not_kvm = why_not_kvm(&mut client)?;
        // An error means that this QEMU does not have the option.
        let sandbox = client.execute("query-command-line-options", json!({ "option": "sandbox" })).is_ok();
        let run_with = client.execute("query-command-line-options", json!({ "option": "run-with" }));
        let run_with_user = run_with.is_ok_and(|found| has_parameter(&found, "user"));
        Ok(Self {
            program: program.into(),
            version: version_text(&version),
            accelerator: if why_not_kvm.is_none() { Accelerator::Kvm } else { Accelerator::Tcg },
            why_not_kvm,
            memory_from_readonly_file: schema.has_member("object-add", "rom"),
            migrate_to_file: schema.has_variant("file") && schema.has_member("migrate", "channels"),
            ignore_shared,
            sandbox,
            run_with_user,
            stream_network: schema.has_network("stream"),
            save_devices: schema.has_command("xen-save-devices-state"),
        })
    }
}

fn missing(program: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => Error::new(
            ErrorKind::NotFound,
            format!("there is no '{}'; Debian's package is qemu-system-x86", program.display()),
        ),
        _ => Error::io(format!("starting '{}'", program.display()), error),
    }
}

/// Whether the reply to `query-command-line-options` lists a parameter.
fn has_parameter(options: &Value, parameter: &str) -> bool {
    let parameters = options.as_array().into_iter().flatten().filter_map(|option| option["parameters"].as_array());
    parameters.flatten().any(|one| one["name"] == parameter)
}

fn version_text(version: &Value) -> String {
    let number = |key: &str| version["qemu"][key].as_u64().unwrap_or(0);
    let package = version["package"].as_str().unwrap_or("").trim().trim_matches(['(', ')']);
    let numbers = format!("{}.{}.{}", number("major"), number("minor"), number("micro"));
    if package.is_empty() { numbers } else { format!("{numbers} ({package})") }
}

/// Why KVM cannot be used; `None` if KVM can be used.
fn why_not_kvm(client: &mut Client) -> Result<Option<String>> {
    let built_in = client.execute("query-kvm", json!({}))?["present"].as_bool().unwrap_or(false);
    if !built_in {
        return Ok(Some("this QEMU is built without KVM".into()));
    }
    if let Err(e) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return Ok(Some(format!("/dev/kvm: {e}")));
    }
    // A processor that reports no virtualization has an emulated `/dev/kvm`, which is slower than TCG or does not run
    // guests at all.
    let flags = std::fs::read_to_string("/proc/cpuinfo").during(|| "reading /proc/cpuinfo".into())?;
    let flags = flags.lines().find(|line| line.starts_with("flags")).unwrap_or("");
    let hardware = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    Ok((!hardware && cfg!(target_arch = "x86_64")).then(|| "the processor shows neither vmx nor svm".into()))
}

/// The result of `query-qmp-schema`: all types by number.
struct Schema(Value);

impl Schema {
    fn all(&self) -> impl Iterator<Item = &Value> {
        self.0.as_array().into_iter().flatten()
    }

    fn named(&self, name: &Value) -> Option<&Value> {
        self.all().find(|one| one["name"] == *name)
    }

    fn has_command(&self, name: &str) -> bool {
        self.named(&json!(name)).is_some_and(|one| one["meta-type"] == "command")
    }

    /// Whether any variant of a command's arguments has a member.
    fn has_member(&self, command: &str, member: &str) -> bool {
        let Some(arguments) = self.named(&json!(command)).and_then(|one| self.named(&one["arg-type"])) else {
            return false;
        };
        let has = |kind: &Value| kind["members"].as_array().into_iter().flatten().any(|one| one["name"] == member);
        let variants = arguments["variants"].as_array().into_iter().flatten();
        has(arguments) || variants.filter_map(|variant| self.named(&variant["type"])).any(has)
    }

    /// Whether there is a kind of network backends.
    fn has_network(&self, kind: &str) -> bool {
        let enumerations = self.all().filter(|one| one["meta-type"] == "enum");
        let values = |one: &Value| one["values"].as_array().cloned().unwrap_or_default();
        enumerations.map(values).any(|values| values.contains(&json!("hubport")) && values.contains(&json!(kind)))
    }

    /// Whether any enumeration has a value.
    fn has_variant(&self, value: &str) -> bool {
        let enumerations = self.all().filter(|one| one["meta-type"] == "enum");
        let values = |one: &Value| one["values"].as_array().cloned().unwrap_or_default();
        enumerations.map(values).any(|values| values.contains(&json!("rdma")) && values.contains(&json!(value)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn features_of_the_installed_qemu() {
        let folder = tempfile::tempdir().unwrap();
        let features = Features::detect(Path::new("qemu-system-x86_64"), folder.path()).unwrap();
        assert!(features.version.starts_with(|first: char| first.is_ascii_digit()), "{features:?}");
        assert!(features.ignore_shared && features.save_devices && features.sandbox, "{features:?}");
        assert_eq!(features.accelerator == Accelerator::Kvm, features.why_not_kvm.is_none());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// A program in `folder` with these lines of shell.
    fn program(folder: &Path, lines: &str) -> PathBuf {
        let path = folder.join("qemu");
        std::fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_qemu_that_does_not_answer_is_queried_again() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("tried").display().to_string();
        let lines = format!("[ -e {mark} ] || {{ : >{mark}; exec sleep 1000; }}\nexec qemu-system-x86_64 \"$@\"");
        let program = program(folder.path(), &lines);
        let run = folder.path().join("run");
        let patience = [Duration::from_secs(3), PATIENCE[1]];
        let error = Features::query(&program, &run, patience[0]).unwrap_err();
        assert!(error.to_string().contains("did not listen within 3s"), "{error}");
        std::fs::remove_file(&mark).unwrap();
        let features = Features::detect_within(&program, &run, patience).unwrap();
        assert_eq!(features.program, program);
    }

    #[test]
    fn a_program_that_ends_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let error = Features::detect(&program(folder.path(), "exit 3"), &folder.path().join("run")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("ended before it could be queried (exit status: 3)"), "{error}");
    }

    #[test]
    fn the_error_about_a_missing_program_names_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let error = Features::detect(Path::new("/nowhere/qemu"), folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("qemu-system-x86"), "{error}");
    }
}
