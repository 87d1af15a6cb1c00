//! What gives a copy of a running guest an identity of its own: its agent does it inside the guest, before the network
//! is plugged in.
//!
//! A guest that was copied with its memory knows the parent's host name, machine id and network address, and would draw
//! the same random numbers: its kernel's pool has the same content. No device tells older kernels that they were copied
//! (a VM generation id does, where the kernel has a driver for it), so the new entropy goes in from outside first.
//!
//! 1. Randomness before everything else: whatever the guest makes new is made from it. That the kernel starts over from
//!    what it is given takes a request that no shell can make; `reseed-kernel`, Perl or Python make it, whichever the
//!    guest has. One with none of them uses the new entropy within a minute, as kernels do by themselves: it is said.
//! 2. The steps are those of a shell script that any POSIX shell runs, given by its standard input; no value of it
//!    comes from the guest, and all are checked to hold nothing that a shell would obey.
//! 3. A network card is found by its place on the bus, which is the same in every copy, and its address is looked at
//!    after it was set. The guest's driver tells the card, so QEMU's filter has it too.
//! 4. If the guest has `/etc/lamina/clone-hook`, it runs last, with the new name as its argument: for what only the
//!    guest's owner knows (keys of an SSH server, an agent's registration).

use crate::agent::Agent;
use crate::definition::{Definition, check_name};
use crate::identity::new_uuid;
use error::{Error, ErrorKind, Result};
use std::fmt::Write;
use std::time::Duration;

/// How long it may take in the guest; a hook may wait for a network address.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of entropy that a copy is given.
const ENTROPY: usize = 256;
/// What the script says where the kernel could not be told to start over.
const NOT_RESEEDED: &str = "lamina: not reseeded";

/// How a guest took its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// Its kernel's random numbers are its own from now on; otherwise they will be within a minute.
    pub reseeded: bool,
}

/// The script for a machine.
fn script(definition: &Definition) -> Result<String> {
    // A name is letters, digits and hyphens, addresses are hexadecimal: nothing of it means anything to a shell.
    check_name(&definition.name)?;
    let entropy: [u8; ENTROPY] = backend::random::bytes()?;
    let octal = entropy.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "\\0{byte:03o}");
        text
    });
    let machine_id = new_uuid()?.simple();
    let name = &definition.name;
    // 0x5207 is RNDRESEEDCRNG.
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
        let _ = writeln!(text, "address 0000:00:{:02x}.0 {}", network.slot, network.mac);
    }
    let _ = write!(text, "[ -x /etc/lamina/clone-hook ] && exec /etc/lamina/clone-hook {name}\nexit 0\n");
    Ok(text)
}

/// Gives the guest of a copy its own identity.
pub fn give(agent: &mut Agent, definition: &Definition) -> Result<Given> {
    let ended = agent.execute("/bin/sh", &[], script(definition)?.as_bytes(), PATIENCE)?;
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
    Err(Error::new(ErrorKind::Io, text))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Link;
    use std::process::Command;

    #[test]
    fn a_shell_understands_it_and_no_two_are_alike() {
        let mut definition = Definition {
            name: "web-1".into(),
            uuid: new_uuid().unwrap(),
            cpus: 1,
            memory: 64 << 20,
            boot: None,
            origin: None,
            disks: Vec::new(),
            networks: Vec::new(),
        };
        definition.add_network(crate::identity::Mac::new().unwrap(), Link::None).unwrap();
        let [first, second] = [script(&definition).unwrap(), script(&definition).unwrap()];
        assert_ne!(first, second);
        assert!(first.contains("echo web-1 >/etc/hostname") && first.contains(&definition.networks[0].mac.to_string()));
        let checked = Command::new("sh").args(["-n", "-c", &first]).status().unwrap();
        assert!(checked.success());
    }
}
