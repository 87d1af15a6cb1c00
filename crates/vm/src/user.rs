//! The users as which QEMU runs.
//!
//! QEMU is started by root, opens its files, listens, and connects to its disks. Then QEMU changes to the user, and
//! cannot change back. So the files of a machine stay private to root, and the user needs no permissions for them. The
//! user needs write permission for the unix socket of the NBD server, because QEMU connects again after the server was
//! restarted.
//!
//! 1. Only root can become another user. Commands of other users cannot start a machine that runs as a different user.
//! 2. The definition of the machine names the user; otherwise, the defaults of the datastore do ([`DEFAULTS`]).
//! 3. [`disks_of`] returns the disks that a user may open on a server: those of the machines that run as this user.

use crate::definition::Definition;
use crate::machine::Machine;
use crate::{durable, machines};
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use rustix::process::geteuid;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// The file, in the folder of machines, with the defaults for values that definitions of machines lack.
pub const DEFAULTS: &str = "defaults.toml";
/// The version of that file.
const VERSION: u32 = 1;
/// Longest name of a user.
const NAME_MAX: usize = 32;

/// Defaults for values that definitions of machines lack.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Defaults {
    version: Option<u32>,
    run_as: Option<String>,
}

impl Defaults {
    /// The defaults in a folder of machines.
    fn read(machines: &Path) -> Result<Self> {
        let path = machines.join(DEFAULTS);
        let Some(text) = durable::read(&path)? else { return Ok(Self::default()) };
        let invalid = |what: String| Error::new(ErrorKind::Invalid, format!("'{}': {what}", path.display()));
        let defaults: Self = toml::from_str(&text).map_err(|e| invalid(e.to_string()))?;
        if let Some(version) = defaults.version.filter(|version| *version != VERSION) {
            return Err(invalid(format!("the file has version {version}, this program supports {VERSION}")));
        }
        defaults.run_as.as_deref().map_or(Ok(()), check_name).map_err(|error| invalid(error.to_string()))?;
        Ok(defaults)
    }
}

/// A user of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Account {
    user: u32,
    group: u32,
}

/// Checks that a name can be the name of a user: QEMU's options and `/etc/passwd` give other characters a meaning.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.$".contains(&byte);
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with('-') || !name.bytes().all(plain) {
        let text = format!("'{}' is no name of a user", name.escape_debug());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// The user that QEMU has to become for a machine; `None` if that is the user of this process.
///
/// # Errors
/// `Invalid` if this process is not root; `NotFound` if there is no such user; `Busy` if the user cannot connect to
/// `nbd`.
pub(crate) fn of(machine: &Machine, definition: &Definition, nbd: &Path) -> Result<Option<String>> {
    let folder = machine.folder().ancestors().skip(1).find(|folder| folder.ends_with(machines::FOLDER));
    let default = folder.map_or(Ok(Defaults::default()), Defaults::read)?.run_as;
    let Some(name) = definition.run_as.clone().or(default) else { return Ok(None) };
    let machine = machine.name();
    let account = account(&name).map_err(|error| error.context(format_args!("machine '{machine}'")))?;
    let own = geteuid();
    if own.as_raw() == account.user {
        return Ok(None);
    }
    if !own.is_root() {
        let text = format!(
            "machine '{machine}' is to run as user '{name}', and only root can start it as another user: run the command \
             as root, or as '{name}', or choose another user with 'lamina vm edit {machine} --run-as USER'"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if !connects(account, nbd) {
        let text = format!(
            "machine '{machine}' is to run as user '{name}', who cannot connect to '{}': serve the datastore with \
             --machine-group and a group of this user, in a folder that the user can reach",
            nbd.display()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(Some(name))
}

/// Whether a user can connect to a unix socket. If `setpriv` is not installed, returns true: QEMU then fails to
/// connect.
fn connects(account: Account, socket: &Path) -> bool {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &account.user.to_string(), "--regid", &account.group.to_string()]);
    command.args(["--init-groups", "--", "test", "-w"]).arg(socket);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = private::spawn(&mut command).and_then(|mut child| child.wait());
    status.map_or(true, |status| status.success())
}

/// The user of a name, from `/etc/passwd` or a directory service.
fn account(name: &str) -> Result<Account> {
    let known = fs::read_to_string("/etc/passwd").ok().and_then(|text| find(&text, name));
    known.or_else(|| asked(name)).ok_or_else(|| {
        let text = format!("there is no user '{}': 'getent passwd' lists the users", name.escape_debug());
        Error::new(ErrorKind::NotFound, text)
    })
}

/// The user in the text of `/etc/passwd`: name, password, user, group.
fn find(text: &str, name: &str) -> Option<Account> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let right = fields.next() == Some(name);
        let (user, group) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        right.then_some(Account { user, group })
    })
}

fn asked(name: &str) -> Option<Account> {
    // After `--`, a name that begins with a hyphen is not taken for an option.
    let output = Command::new("getent").args(["passwd", "--", name]).stdin(Stdio::null()).output().ok()?;
    find(&String::from_utf8(output.stdout).ok()?, name)
}

/// The disks of those machines in a folder that run as a user. The folder need not exist.
pub fn disks_of(machines: &Path, user: u32) -> Result<BTreeSet<String>> {
    let mut disks = BTreeSet::new();
    match fs::metadata(machines) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(disks),
        found => {
            found.during(|| format!("looking at '{}'", machines.display()))?;
        }
    }
    let default = Defaults::read(machines)?.run_as;
    let mut known: BTreeMap<String, bool> = BTreeMap::new();
    for machine in machines::list_with_new(machines)? {
        // A definition that cannot be read permits nothing.
        let Ok(definition) = machine.definition() else { continue };
        let Some(name) = definition.run_as.as_ref().or(default.as_ref()) else { continue };
        let is_it = known.entry(name.clone()).or_insert_with(|| account(name).is_ok_and(|it| it.user == user));
        if *is_it {
            disks.extend(definition.disk_names());
        }
    }
    Ok(disks)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::machine;

    #[test]
    fn users_are_found_by_name() {
        let text = "broken\nroot:x:0:0:root:/root:/bin/sh\nqemu:x:107:36::/:/bin/false\n";
        assert_eq!(find(text, "qemu"), Some(Account { user: 107, group: 36 }));
        assert_eq!((find(text, "qem"), find(text, "broken")), (None, None));
        assert_eq!(account("root").unwrap(), Account { user: 0, group: 0 });
        assert_eq!(account("no-such-user").unwrap_err().kind(), ErrorKind::NotFound);
        for wrong in ["", "-x", "a:b", "a,b", "a b", "ä", &"a".repeat(NAME_MAX + 1)] {
            assert_eq!(check_name(wrong).unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }

    #[test]
    fn a_user_may_open_the_disks_of_its_own_machines() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join(machines::FOLDER);
        assert!(disks_of(&folder, 65534).unwrap().is_empty());
        fs::create_dir(&folder).unwrap();
        let make = |place: &str, name: &str, run_as: Option<&str>| {
            let mut definition = Definition::new(name, 1, 64 << 20).unwrap();
            definition.add_disk(name).unwrap();
            definition.run_as = run_as.map(str::to_owned);
            let at = folder.join(place).join(name);
            fs::create_dir_all(&at).unwrap();
            machine::define(&at, &definition).unwrap();
        };
        make("", "web", Some("nobody"));
        make("", "mine", None);
        make("", "other", Some("daemon"));
        make("", "broken", Some("nobody"));
        fs::write(folder.join("broken/machine.toml"), "x").unwrap();
        // An instant clone runs while it is still being created.
        make(".new-1234", "clone", Some("nobody"));
        make(".old-1234", "gone", Some("nobody"));
        let of = |user: u32| disks_of(&folder, user).unwrap().into_iter().collect::<Vec<_>>();
        assert_eq!((of(65534), of(1), of(2)), (vec!["clone".into(), "web".into()], vec!["other".into()], Vec::new()));
        fs::write(folder.join(DEFAULTS), "version = 1\nrun_as = \"nobody\"\n").unwrap();
        assert_eq!(of(65534), ["clone", "mine", "web"]);
        for wrong in ["version = 2", "run_as = \"-x\"", "x = 1", "run_as = 1"] {
            fs::write(folder.join(DEFAULTS), wrong).unwrap();
            assert!(disks_of(&folder, 65534).unwrap_err().to_string().contains(DEFAULTS), "{wrong}");
        }
    }
}
