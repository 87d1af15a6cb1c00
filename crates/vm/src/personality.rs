//! What makes a copy of a running guest somebody else: done inside it by its agent before its network is plugged in.
//!
//! A guest that was copied with its memory knows the parent's host name, machine id and network address, and would draw
//! the same random numbers: its kernel's pool has the same content. No device tells older kernels that they were copied
//! (a VM generation id does, where the kernel has a driver for it), so the new entropy goes in from outside first.
//!
//! 1. Randomness before everything else: whatever the guest makes new is made from it.
//! 2. The steps are those of a shell script that any POSIX shell runs, given by its standard input; no value of it comes
//!    from the guest, and all are checked to hold nothing that a shell would obey.
//! 3. If the guest has `/etc/lamina/clone-hook`, it runs last, with the new name as its argument: for what only the
//!    guest's owner knows (keys of an SSH server, an agent's registration).

use crate::agent::Agent;
use crate::definition::{Definition, check_name};
use crate::identity::Uuid;
use backend::{Error, ErrorKind, IoContext, Result};
use std::fmt::Write;
use std::time::Duration;

/// How long it may take in the guest; a hook may wait for a network address.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of entropy that a copy is given.
const ENTROPY: usize = 256;

/// The script for a machine. `networks` are given their addresses in the order of the guest's interfaces.
fn script(definition: &Definition) -> Result<String> {
    // A name is letters, digits and hyphens, addresses are hexadecimal: nothing of it means anything to a shell.
    check_name(&definition.name)?;
    let mut entropy = [0; ENTROPY];
    let mut filled = 0;
    while filled < ENTROPY {
        filled += rustix::rand::getrandom(&mut entropy[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(std::io::Error::from)
            .during(|| "asking the system for random bytes".into())?;
    }
    let octal = entropy.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "\\0{byte:03o}");
        text
    });
    let machine_id = Uuid::new()?.to_string().replace('-', "");
    let name = &definition.name;
    let mut text = format!(
        "printf '%b' '{octal}' >/dev/urandom\n\
         command -v reseed-kernel >/dev/null && reseed-kernel\n\
         hostname {name}; [ -w /etc ] && echo {name} >/etc/hostname\n\
         [ -w /etc ] && echo {machine_id} >/etc/machine-id\n"
    );
    for (index, network) in definition.networks.iter().enumerate() {
        let mac = network.mac;
        let _ = write!(
            text,
            "set -- $(ls -d /sys/class/net/*/device 2>/dev/null | cut -d/ -f5); shift {index} 2>/dev/null\n\
             [ -n \"$1\" ] && {{ ip link set \"$1\" down; ip link set \"$1\" address {mac}; ip link set \"$1\" up; }}\n"
        );
    }
    let _ = write!(text, "[ -x /etc/lamina/clone-hook ] && exec /etc/lamina/clone-hook {name}\nexit 0\n");
    Ok(text)
}

/// Gives the guest of a copy its own identity.
pub fn give(agent: &mut Agent, definition: &Definition) -> Result<()> {
    let ended = agent.execute("/bin/sh", &[], script(definition)?.as_bytes(), PATIENCE)?;
    if ended.code == Some(0) {
        return Ok(());
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
            uuid: Uuid::new().unwrap(),
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
        assert!(first.contains("hostname web-1;") && first.contains(&definition.networks[0].mac.to_string()));
        let checked = Command::new("sh").args(["-n", "-c", &first]).status().unwrap();
        assert!(checked.success());
    }
}
