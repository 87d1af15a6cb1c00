//! The configuration of cloud-init in the guest: a host name, SSH keys, and the user's data.

use super::{Chipset, Definition, PORTS_MAX, check_name};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Longest user data, in bytes. The definition contains the user data, where one byte takes up to six bytes, and has at
/// most [`super::TEXT_MAX`] bytes.
pub const USER_DATA_MAX: usize = 128 << 10;
/// Most SSH keys.
pub const KEYS_MAX: usize = 64;
/// Longest SSH key, in bytes.
const KEY_MAX: usize = 4 << 10;
/// Longest host name with its domain.
const HOSTNAME_MAX: usize = 253;
/// How user data begin, in the forms that cloud-init recognises.
const BEGINNINGS: [&str; 4] = ["#", "Content-Type:", "MIME-Version:", "From "];

/// The configuration of cloud-init. The machine's UUID is the instance id, so cloud-init treats every clone as a new
/// instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// The guest's host name; `None` for the name of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Public keys for the default user of the guest, as in `authorized_keys`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// User data, such as `#cloud-config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
}

impl Seed {
    /// The seed of a clone: the seed of its source without the host name, and with the values of `given` in place of
    /// the source's.
    pub fn for_clone(source: Option<&Self>, given: Option<&Self>) -> Option<Self> {
        let Some(given) = given else { return source.map(|source| Self { hostname: None, ..source.clone() }) };
        let keys = source.map(|source| source.ssh_keys.clone());
        let data = source.and_then(|source| source.user_data.clone());
        Some(Self {
            hostname: given.hostname.clone(),
            ssh_keys: if given.ssh_keys.is_empty() { keys.unwrap_or_default() } else { given.ssh_keys.clone() },
            user_data: given.user_data.clone().or(data),
        })
    }

    fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if let Some(hostname) = &self.hostname
            && (hostname.len() > HOSTNAME_MAX || !hostname.split('.').all(|label| check_name(label).is_ok()))
        {
            return invalid(format!("'{}' is no host name", hostname.escape_debug()));
        }
        let whole = |key: &String| {
            !key.is_empty() && key.len() <= KEY_MAX && !key.chars().any(char::is_control) && key.contains(' ')
        };
        if let Some(key) = self.ssh_keys.iter().find(|key| !whole(key)) {
            let begin: String = key.chars().take(40).collect();
            return invalid(format!("'{}' is no public key of SSH on one line", begin.escape_debug()));
        }
        if self.ssh_keys.len() > KEYS_MAX {
            return invalid(format!("{} SSH keys are too many, at most {KEYS_MAX} are allowed", self.ssh_keys.len()));
        }
        let Some(data) = &self.user_data else { return Ok(()) };
        if data.len() > USER_DATA_MAX {
            return invalid(format!("user data have {} bytes, at most {USER_DATA_MAX} are allowed", data.len()));
        }
        match BEGINNINGS.iter().any(|begin| data.starts_with(begin)) {
            true => Ok(()),
            false => {
                invalid("user data begin with a line that names their kind, such as '#cloud-config' or '#!'".into())
            }
        }
    }
}

impl Definition {
    pub(super) fn check_seed(&self) -> Result<()> {
        let Some(seed) = &self.seed else { return Ok(()) };
        if self.platform.chipset == Chipset::I440fx && self.ports == PORTS_MAX {
            let text = format!("with a seed, a machine with the chipset i440fx has at most {} ports", PORTS_MAX - 1);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        seed.check()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn seed(hostname: &str, key: &str, data: &str) -> Seed {
        Seed { hostname: Some(hostname.into()), ssh_keys: vec![key.into()], user_data: Some(data.into()) }
    }

    #[test]
    fn seeds_that_a_guest_cannot_use_are_refused() {
        let long = "a".repeat(KEY_MAX);
        let data = format!("#{}", "a".repeat(USER_DATA_MAX));
        seed("web-1.example.org", "ssh-ed25519 AAAA me", "#!/bin/sh").check().unwrap();
        for (hostname, key, data) in [
            ("web_1", "ssh-ed25519 AAAA", "#"),
            ("web..org", "ssh-ed25519 AAAA", "#"),
            ("-web", "ssh-ed25519 AAAA", "#"),
            ("web", "AAAA", "#"),
            ("web", "ssh-ed25519 AAAA\nssh-rsa BBBB", "#"),
            ("web", &format!("ssh-rsa {long}"), "#"),
            ("web", "ssh-ed25519 AAAA", "packages: [vim]"),
            ("web", "ssh-ed25519 AAAA", &data),
        ] {
            assert_eq!(seed(hostname, key, data).check().unwrap_err().kind(), ErrorKind::Invalid, "{hostname} {key}");
        }
    }

    #[test]
    fn a_clone_has_the_seed_of_its_source_but_for_what_is_given() {
        let source = seed("web.example.org", "ssh-rsa A", "#cloud-config");
        let of = |given: Option<&Seed>| Seed::for_clone(Some(&source), given).unwrap();
        assert_eq!(of(None), Seed { hostname: None, ..source.clone() });
        let given = Seed { ssh_keys: vec!["ssh-rsa B".into()], ..Seed::default() };
        assert_eq!(of(Some(&given)), Seed { user_data: source.user_data.clone(), ..given });
        assert_eq!(Seed::for_clone(None, None), None);
        assert_eq!(Seed::for_clone(None, Some(&source)), Some(source));
    }

    #[test]
    fn user_data_of_any_characters_survive_the_definition() {
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        let data = format!("#\u{1}\"\"\"\\\r\n\t{}", "\u{7f}".repeat(USER_DATA_MAX - 12));
        machine.seed = Some(seed("web", "ssh-rsa A", &data));
        let text = machine.to_text().unwrap();
        assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
        machine.platform.chipset = Chipset::I440fx;
        machine.check().unwrap();
        machine.ports = PORTS_MAX;
        assert!(machine.check().is_err());
    }
}
