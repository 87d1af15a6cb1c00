//! Giving a copy of a guest its own identity. The guest's agent changes the identity before the guest's network is
//! connected.
//!
//! A guest whose disks were copied after it had run has the parent's host name, machine id, SSH host keys, and leases
//! and client ids of DHCP. A guest that was copied with its memory also has the parent's MAC address, and the state of
//! the parent's random number generator. Kernels without a driver for the VM generation id are not notified that they
//! were copied, so the host passes new entropy to the guest first.
//!
//! 1. Entropy comes first, because the guest generates the new identity from it. Reseeding the kernel's generator at
//!    once takes an ioctl, which a shell cannot call; `reseed-kernel`, Perl or Python calls it, whichever the guest
//!    has. Without any of them the kernel uses the new entropy only within a minute, which [`Given::reseeded`] reports.
//! 2. The steps are a POSIX shell script that is passed by standard input. No value in the script comes from the guest,
//!    and all values are checked for characters with a meaning in shells.
//! 3. A network card is identified by its PCI slot, which is the same in every copy, and its MAC address is verified
//!    after it was set. The guest's driver sets the address in the card, so that QEMU's filter uses it too.
//! 4. If the guest has the program `/etc/lamina/clone-hook`, the script runs it last, with the new name as its
//!    argument. The program can change what lamina does not change (keys of other servers, registration of an agent).
//! 5. The script ends with `sync` of the files that it has changed. Without that, a guest that loses its power within
//!    the next seconds would start with its source's identity, although the machine's definition no longer asks for a
//!    new one. The script does not flush everything: the copy of a running guest has all the dirty pages of its parent,
//!    some perhaps of a file system in a network that is not connected yet.
//! 6. A host key of SSH is replaced or removed, so that no copy has its parent's key. The network is configured anew,
//!    because the client id of DHCP follows from the machine id.

use crate::agent::Agent;
use crate::definition::{Definition, check_name};
use crate::identity::new_uuid;
use crate::qemu::command;
use error::{Error, ErrorKind, Result};
use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};

/// How long the agent may take to answer in one attempt, if the guest is known to have one.
const AGENT_PATIENCE: Duration = Duration::from_secs(30);
/// Pause after an attempt that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long the agent may take to answer, if it is not known whether the guest has one.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of entropy that are passed to a copy.
const ENTROPY: usize = 256;
/// What a copy removes: leases of DHCP, and the secret from which NetworkManager makes client ids and addresses.
pub(crate) const LEASES: &str = "rm -f /var/lib/dhcp/*.leases /var/lib/NetworkManager/*.lease \
                                 /var/lib/NetworkManager/secret_key";
/// The guest's own program for what lamina does not change.
const HOOK: &str = "/etc/lamina/clone-hook";
/// Flushes what the script has changed, and everything where `sync` takes no files.
const SYNC: &str = "\
set --
for file in /etc/hostname /etc/machine-id /etc/hosts /etc/ssh/ssh_host_* /etc/ssh /etc /var/lib/dbus/machine-id \
    /var/lib/dhcp /var/lib/NetworkManager; do
    [ ! -e \"$file\" ] || set -- \"$@\" \"$file\"
done
sync \"$@\" || sync
";
/// Line that the script prints if the kernel could not be reseeded.
const NOT_RESEEDED: &str = "lamina: not reseeded";

/// Result of changing a guest's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// Whether the guest's kernel has reseeded its random number generator; otherwise the kernel reseeds it within a
    /// minute.
    pub reseeded: bool,
}

/// The script for a machine.
fn script(definition: &Definition) -> Result<String> {
    // Names consist of letters, digits and hyphens, and addresses of hexadecimal digits and colons, so no value has a
    // meaning in shells.
    check_name(&definition.name)?;
    let entropy: [u8; ENTROPY] = backend::random::bytes()?;
    let octal = entropy.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "\\0{byte:03o}");
        text
    });
    let machine_id = new_uuid()?.simple();
    let name = &definition.name;
    // 0x5207 is the ioctl RNDRESEEDCRNG.
    let mut text = format!(
        r#"entropy='{octal}'
printf '%b' "$entropy" >/dev/urandom
reseed() {{
    printf '%b' "$entropy" | reseed-kernel && return
    perl -e 'open(F, ">", "/dev/urandom") && ioctl(F, 0x5207, 0) || exit 1' && return
    python3 -c 'import fcntl; fcntl.ioctl(open("/dev/urandom", "wb"), 0x5207)'
}}
reseed 2>/dev/null </dev/null || echo '{NOT_RESEEDED}'
echo {name} >/proc/sys/kernel/hostname
[ -w /etc ] && echo {name} >/etc/hostname
[ -w /etc ] && echo {machine_id} >/etc/machine-id
[ -L /var/lib/dbus/machine-id ] || [ ! -w /var/lib/dbus/machine-id ] || echo {machine_id} >/var/lib/dbus/machine-id
[ ! -w /etc/hosts ] || sed -i 's/^127\.0\.1\.1[[:space:]].*/127.0.1.1 {name}/' /etc/hosts
{LEASES}
host_keys() {{
    for key in /etc/ssh/ssh_host_*_key; do
        [ -f "$key" ] || continue
        kind=${{key#*/ssh_host_}}
        rm -f "$key.new" "$key.new.pub"
        if ssh-keygen -q -t "${{kind%_key}}" -N '' -C root@{name} -f "$key.new" </dev/null; then
            mv -f "$key.new" "$key"
            mv -f "$key.new.pub" "$key.pub"
        else
            rm -f "$key" "$key.pub"
        fi
    done
}}
[ ! -w /etc/ssh ] || host_keys
restart() {{ ! command -v systemctl || systemctl -q try-restart "$@"; }}
restart ssh.service sshd.service >/dev/null 2>&1
address() {{
    for card in /sys/class/net/*; do
        case $(readlink -f "$card/device") in */"$1"/*) ;; *) continue ;; esac
        card=${{card##*/}}
        ip link set dev "$card" address "$2" 2>/dev/null || {{
            ip link set dev "$card" down
            ip link set dev "$card" address "$2"
            ip link set dev "$card" up
        }}
        [ "$(cat "/sys/class/net/$card/address")" = "$2" ] || {{
            echo "$card keeps its address" >&2
            exit 1
        }}
    done
}}
"#
    );
    for network in &definition.networks {
        let _ = writeln!(
            text,
            "address {} {}",
            command::pci_address(definition.platform.chipset, network.slot),
            network.mac
        );
    }
    text.push_str("restart systemd-networkd.service NetworkManager.service >/dev/null 2>&1\n");
    // The shell reads this script from its standard input, which the hook must not consume.
    let _ = writeln!(text, "[ ! -x {HOOK} ] || {HOOK} {name} </dev/null || exit");
    text.push_str(SYNC);
    Ok(text)
}

/// Gives a copied guest its own identity, within `patience`, which includes the time of the hook. If it is not known
/// whether the script has run, the caller can repeat it.
///
/// # Errors
/// `Io` if the agent does not answer, `Unsupported` if the script fails in the guest.
pub fn give(agent: &mut Agent, definition: &Definition, patience: Duration) -> Result<Given> {
    let ended = agent.execute("/bin/sh", &[], script(definition)?.as_bytes(), patience)?;
    if ended.code == Some(0) {
        return Ok(Given { reseeded: !String::from_utf8_lossy(&ended.output).contains(NOT_RESEEDED) });
    }
    let complaint = String::from_utf8_lossy(&ended.errors);
    let text = format!(
        "the guest of '{}' did not take its new identity ({}): {}",
        definition.name,
        ended.code.map_or("ended by a signal".into(), |code| format!("exit code {code}")),
        complaint.trim().chars().take(300).collect::<String>()
    );
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// Connects to the agent of a guest; `None` if the agent does not answer in time.
pub type Connect<'a> = dyn FnMut(Duration) -> Result<Option<Agent>> + 'a;

/// Gives the guest its own identity; `None` if the guest has no agent. On a loaded host the agent may answer late, or
/// after its connection was given up, so the attempt is repeated until `patience` is over.
pub fn give_within(
    connect: &mut Connect<'_>,
    definition: &Definition,
    agent: Option<bool>,
    patience: Duration,
) -> Result<Option<Given>> {
    let deadline = Instant::now() + patience;
    let known = agent == Some(true);
    loop {
        let left = || deadline.saturating_duration_since(Instant::now());
        let attempt = connect(left().min(if known { AGENT_PATIENCE } else { UNKNOWN_PATIENCE }))
            .and_then(|agent| agent.map(|mut agent| give(&mut agent, definition, left())).transpose());
        match attempt {
            Ok(None) if known && !left().is_zero() => {}
            Err(error) if error.kind() == ErrorKind::Io && !left().is_zero() => {
                tracing::debug!(machine = definition.name, "{error}; trying again");
                thread::sleep(RETRY_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Link;
    use crate::qmp::Client;
    use serde_json::{Value, json};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// Reaction of a simulated agent to the request to run the script.
    #[derive(Clone, Copy)]
    enum Act {
        /// The agent disconnects.
        Vanish,
        /// The agent runs the script, and answers after this time.
        Run(Duration),
        /// The agent reports that the script failed.
        Fail,
    }

    fn agent(act: Act) -> Agent {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).split(b'\n');
            let mut theirs = theirs;
            while let Some(Ok(line)) = lines.next() {
                let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
                let request: Value = serde_json::from_slice(text).unwrap();
                let answer = match (request["execute"].as_str().unwrap(), act) {
                    ("guest-sync-delimited", _) => request["arguments"]["id"].clone(),
                    ("guest-exec", Act::Vanish) => return,
                    ("guest-exec", Act::Run(after)) => {
                        thread::sleep(after);
                        json!({ "pid": 1 })
                    }
                    ("guest-exec", Act::Fail) => json!({ "pid": 1 }),
                    (_, Act::Fail) => json!({ "exited": true, "exitcode": 1 }),
                    _ => json!({ "exited": true, "exitcode": 0 }),
                };
                let _ = writeln!(theirs, "{}", json!({ "return": answer, "id": request["id"] }));
            }
        });
        let client = Client::over(ours, Path::new("agent"), Duration::from_secs(5)).unwrap();
        Agent::over(client, Duration::from_secs(5)).unwrap().unwrap()
    }

    /// Runs the acts, one in each attempt; `None` for an agent that does not answer.
    fn assign(acts: &[Option<Act>], known: Option<bool>, patience: Duration) -> (Result<Option<Given>>, usize) {
        let definition = Definition::new("web", 1, 64 << 20).unwrap();
        let mut count = 0;
        let outcome = give_within(
            &mut |_| {
                count += 1;
                Ok(acts.get(count - 1).copied().flatten().map(agent))
            },
            &definition,
            known,
            patience,
        );
        (outcome, count)
    }

    #[test]
    fn a_slow_agent_or_one_that_vanishes_gets_further_attempts() {
        let minute = Duration::from_secs(60);
        let good = Some(Act::Run(Duration::ZERO));
        // 11 seconds are longer than the agent's default limit for one command.
        let slow = Some(Act::Run(Duration::from_secs(11)));
        for (acts, attempts) in [(vec![good], 1), (vec![Some(Act::Vanish), None, good], 3), (vec![slow], 1)] {
            let (outcome, count) = assign(&acts, Some(true), minute);
            assert_eq!((outcome.unwrap(), count), (Some(Given { reseeded: true }), attempts));
        }
        assert_eq!(assign(&[None, good], None, minute).0.unwrap(), None, "a guest that may have no agent");
    }

    #[test]
    fn attempts_end_with_the_patience_and_with_a_refusal() {
        let (outcome, count) = assign(&[Some(Act::Fail), None], Some(true), Duration::from_secs(60));
        assert_eq!((outcome.unwrap_err().kind(), count), (ErrorKind::Unsupported, 1));
        let vanishing = vec![Some(Act::Vanish); 1000];
        let begun = Instant::now();
        let (outcome, count) = assign(&vanishing, Some(true), Duration::from_secs(1));
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Io);
        assert!(count > 1 && begun.elapsed() < Duration::from_secs(20), "{count}");
    }

    #[test]
    fn files_are_flushed_after_a_hook_that_reads_its_standard_input() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let (hook, marks) = (put("hook", "#!/bin/sh\ncat >/dev/null\n"), folder.path().join("marks"));
        put("sync", &format!("#!/bin/sh\necho \"$@\" >>{}\n", marks.display()));
        let definition = Definition::new("web", 1, 64 << 20).unwrap();
        let all = script(&definition).unwrap();
        let tail = &all[all.find("[ ! -x /etc/lamina").unwrap()..];
        let tail = tail.replace(HOOK, hook.to_str().unwrap());
        // Bash reads a script in a pipe line by line, and other shells read ahead.
        let mut shell = Command::new("bash")
            .env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdin.take().unwrap().write_all(tail.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
        let marks = std::fs::read_to_string(marks).unwrap();
        assert!(marks.contains("/etc/hostname") && marks.contains(" /etc "), "{marks}");
    }

    #[test]
    fn the_guest_script_is_valid_shell_and_unique_for_each_clone() {
        let mut definition = Definition::new("web-1", 1, 64 << 20).unwrap();
        definition.add_network(crate::identity::Mac::new().unwrap(), Link::None).unwrap();
        let [first, second] = [script(&definition).unwrap(), script(&definition).unwrap()];
        assert_ne!(first, second);
        assert!(first.contains("echo web-1 >/etc/hostname") && first.contains(&definition.networks[0].mac.to_string()));
        let checked = Command::new("sh").args(["-n", "-c", &first]).status().unwrap();
        assert!(checked.success());
    }
}
