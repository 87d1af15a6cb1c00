//! Giving a copy of a running guest its own identity. The guest's agent changes the identity before the guest's network
//! is connected.
//!
//! A guest that was copied with its memory has the parent's host name, machine id and MAC address, and its random
//! number generator has the same state. Kernels without a driver for the VM generation id are not notified that they
//! were copied, so the host passes new entropy to the guest first.
//!
//! 1. Entropy comes first, because the guest generates the new identity from it. Reseeding the kernel's generator at
//!    once takes an ioctl, which a shell cannot call; `reseed-kernel`, Perl or Python calls it, whichever the guest
//!    has. Without any of them the kernel uses the new entropy only within a minute, which [`Given::reseeded`] reports.
//! 2. The steps are a POSIX shell script that is passed by standard input. No value in it comes from the guest, and all
//!    values are checked for characters with a meaning in shells.
//! 3. A network card is identified by its PCI slot, which is the same in every copy, and its MAC address is verified
//!    after it was set. The guest's driver sets the address in the card, so that QEMU's filter uses it too.
//! 4. If the guest has the program `/etc/lamina/clone-hook`, the script runs it last, with the new name as its
//!    argument. The program can change what lamina does not change (keys of an SSH server, registration of an agent).

use crate::agent::Agent;
use crate::definition::{Definition, check_name};
use crate::identity::new_uuid;
use crate::qemu::command;
use error::{Error, ErrorKind, Result};
use std::fmt::Write;
use std::time::Duration;

/// Bytes of entropy that are passed to a copy.
const ENTROPY: usize = 256;
/// Line that the script prints if the kernel could not be reseeded.
const NOT_RESEEDED: &str = "lamina: not reseeded";

/// Result of changing a guest's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// Whether the guest's kernel has reseeded its random number generator; otherwise it does so within a minute.
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
    let _ = write!(text, "[ -x /etc/lamina/clone-hook ] && exec /etc/lamina/clone-hook {name}\nexit 0\n");
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Link;
    use std::process::Command;

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
