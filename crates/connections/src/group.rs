//! The numbers of user groups.

use error::{Error, ErrorKind, Result};
use std::fs;
use std::process::{Command, Stdio};

/// The number of a group, which is given by its name or its number.
///
/// Groups in the file `/etc/group` are found without another program; for groups of a directory service, the system's
/// program `getent` is run.
///
/// # Errors
/// `NotFound` if there is no such group.
pub fn group_id(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let known = fs::read_to_string("/etc/group").ok().and_then(|text| find(&text, name));
    known.or_else(|| find(&asked(name)?, name)).ok_or_else(|| {
        let text = format!("there is no group '{}': 'getent group' lists the groups", name.escape_debug());
        Error::new(ErrorKind::NotFound, text)
    })
}

/// The number in the line of a group: name, password, number, members.
fn find(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn asked(name: &str) -> Option<String> {
    // After `--`, a name that begins with a hyphen is not taken for an option.
    let output = Command::new("getent").args(["group", "--", name]).stdin(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn groups_are_found_by_name_and_by_number() {
        assert_eq!((group_id("root").unwrap(), group_id("12").unwrap()), (0, 12));
        let text = "kvm:x:104:a,b\nkvm2:x:105:\nbroken\nalso:x\n";
        assert_eq!((find(text, "kvm"), find(text, "kvm2"), find(text, "kv")), (Some(104), Some(105), None));
        assert_eq!((find(text, "broken"), find(text, "also")), (None, None));
        for name in ["", "-s", "no such group", "a:b", "a\nroot"] {
            assert_eq!(group_id(name).unwrap_err().kind(), ErrorKind::NotFound, "{name:?}");
        }
    }
}
