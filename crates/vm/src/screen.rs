//! The screen and keyboard of a running machine.
//!
//! 1. QEMU writes a screenshot into a file in the run folder. This process has opened the file for QEMU. This process
//!    then copies the file to the path that the user gave. So QEMU needs no right to create files.
//! 2. Without certificates, VNC listens only where no other host reaches it. VNC on a TCP port has a password, in a
//!    file that only the owner of the datastore can read. Until the password is set, QEMU refuses every client.

use crate::definition::{Definition, Display, Vnc, VncTls};
use crate::durable;
use crate::machine::{Machine, MachineState, remove_if_there};
use crate::qmp::Client;
use backend::{private, regular};
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Longest text that is typed, in characters.
pub const TEXT_MAX: usize = 1024;
/// Most keys that are pressed at the same time.
const KEYS_MAX: usize = 8;
/// How long a key is pressed, in milliseconds.
const HOLD_MILLIS: u64 = 20;
/// Time from one key to the next, long enough for pressing and releasing the key, so that the keyboard's buffer does
/// not overflow.
const KEY_INTERVAL: Duration = Duration::from_millis(3 * HOLD_MILLIS);
/// The file with the password of VNC, in the folder of the machine.
const PASSWORD: &str = "vnc-password";
/// Longest file of a certificate or a key.
const PEM_MAX: u64 = 1 << 20;
/// Characters of the password: as many as VNC uses.
const PASSWORD_LENGTH: usize = 8;
/// Names of keys in addition to QEMU's names.
const NAMES: [(&str, &str); 13] = [
    ("control", "ctrl"),
    ("del", "delete"),
    ("enter", "ret"),
    ("escape", "esc"),
    ("ins", "insert"),
    ("meta", "meta_l"),
    ("pagedown", "pgdn"),
    ("pageup", "pgup"),
    ("return", "ret"),
    ("space", "spc"),
    ("super", "meta_l"),
    ("win", "meta_l"),
    ("altgr", "alt_r"),
];
/// Characters of the keyboard of the USA without and with shift, and QEMU's names of their keys.
const CHARACTERS: [(char, char, &str); 14] = [
    ('-', '_', "minus"),
    ('=', '+', "equal"),
    ('[', '{', "bracket_left"),
    (']', '}', "bracket_right"),
    ('\\', '|', "backslash"),
    (';', ':', "semicolon"),
    ('\'', '"', "apostrophe"),
    ('`', '~', "grave_accent"),
    (',', '<', "comma"),
    ('.', '>', "dot"),
    ('/', '?', "slash"),
    (' ', ' ', "spc"),
    ('\n', '\n', "ret"),
    ('\t', '\t', "tab"),
];
/// The characters of the digits with shift.
const SHIFTED_DIGITS: &str = ")!@#$%^&*(";

/// The file with the password of VNC of a machine.
pub fn password_file(machine: &Machine) -> PathBuf {
    machine.folder().join(PASSWORD)
}

/// Checks that the files for the encryption of VNC exist.
pub(crate) fn check(definition: &Definition) -> Result<()> {
    let Some(tls) = &definition.vnc_tls else { return Ok(()) };
    for name in VncTls::FILES {
        // A pipe is refused, because opening it would wait for a writer.
        regular::read(&tls.folder.join(name), PEM_MAX, "certificate or key in PEM format").map_err(|error| {
            let machine = &definition.name;
            error.context(format_args!("encrypting VNC of machine '{machine}' (lamina vm edit --vnc-tls)"))
        })?;
    }
    Ok(())
}

/// Sets the password of VNC in a process that has started, if VNC has a password.
pub(crate) fn set_password(machine: &Machine, vnc: Option<Vnc>, monitor: &mut Client) -> Result<()> {
    let Some(Vnc::Tcp(_)) = vnc else { return Ok(()) };
    let file = password_file(machine);
    let password = match durable::read(&file)? {
        Some(password) => password.trim().to_owned(),
        None => {
            let bytes: [u8; PASSWORD_LENGTH] = backend::random::bytes()?;
            // 32 letters and digits, none of which looks like another.
            let letters = b"abcdefghijkmnpqrstuvwxyz23456789";
            let password: String = bytes.iter().map(|byte| char::from(letters[usize::from(byte % 32)])).collect();
            durable::write(&file, format!("{password}\n").as_bytes())?;
            password
        }
    };
    monitor.execute("set_password", json!({ "protocol": "vnc", "password": password })).map(drop)
}

/// Writes a picture of the screen to a file, whose ending names the format: `.png` or `.ppm`.
pub fn shoot(machine: &Machine, file: &Path) -> Result<()> {
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default().to_ascii_lowercase();
    machine.running()?;
    let picture = machine.run().0.join(format!("screen-{}", std::process::id()));
    let format = match ending.as_str() {
        "png" => Some("png"),
        "ppm" => None,
        _ => {
            let text = format!("'{}' is named neither .png nor .ppm, and its format is not known", file.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    let mut monitor = machine.monitor()?;
    let opened = private::create(&picture).during(|| format!("writing '{}'", picture.display()))?;
    let taken = monitor.lend(&opened, |monitor, name| {
        let mut request = json!({ "filename": name });
        if let Some(format) = format {
            request["format"] = json!(format);
        }
        monitor.execute("screendump", request)
    });
    let copied = taken.and_then(|_| fs::copy(&picture, file).during(|| format!("writing '{}'", file.display())));
    remove_if_there(&picture)?;
    let name = machine.name();
    match copied {
        Ok(_) => Ok(()),
        Err(error) if error.kind() != ErrorKind::Invalid => Err(error),
        Err(error) if machine.definition()?.platform.display == Display::None => {
            let text = format!(
                "machine '{name}' has no graphics card and so no screen ({error}); stop it and give it one with 'lamina vm \
                 edit {name} --vnc unix', or use 'lamina vm console {name}'"
            );
            Err(Error::new(ErrorKind::Unsupported, text))
        }
        Err(error) => Err(error.context(format_args!("the screen of machine '{name}'; PNG needs QEMU 7.1 or newer"))),
    }
}

/// Presses keys, each combination after the other: `ctrl-alt-delete`.
pub fn press(machine: &Machine, combinations: &[String]) -> Result<()> {
    let combinations: Vec<Vec<String>> = combinations.iter().map(|text| keys(text)).collect::<Result<_>>()?;
    send(machine, &combinations)
}

/// Types a text as on a keyboard of the USA.
pub fn write(machine: &Machine, text: &str) -> Result<()> {
    let length = text.chars().count();
    if length > TEXT_MAX {
        let text = format!("{length} characters are too many to type, at most {TEXT_MAX} are allowed");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let keys: Vec<Vec<String>> = text.chars().map(character).collect::<Result<_>>()?;
    send(machine, &keys)
}

fn send(machine: &Machine, all: &[Vec<String>]) -> Result<()> {
    machine.running()?;
    let name = machine.name();
    if machine.state()? == MachineState::Paused {
        let text = format!("the guest of machine '{name}' is paused and takes no keys; resume it first");
        return Err(Error::new(ErrorKind::WrongState, text));
    }
    let mut monitor = machine.monitor()?;
    for keys in all {
        let values: Vec<Value> = keys.iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
        monitor.execute("send-key", json!({ "keys": values, "hold-time": HOLD_MILLIS })).map_err(|error| {
            error.context(format_args!("key '{}' of machine '{name}' was not pressed", keys.join("-")))
        })?;
        thread::sleep(KEY_INTERVAL);
    }
    Ok(())
}

/// The keys of a combination.
fn keys(text: &str) -> Result<Vec<String>> {
    let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("'{}' {what}", text.escape_debug())));
    let plain = |key: &str| {
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let keys: Vec<String> = text.to_ascii_lowercase().split('-').map(str::to_owned).collect();
    if !keys.iter().all(|key| plain(key)) {
        return invalid("is no combination of keys, such as ctrl-alt-delete; the key '-' is named minus");
    }
    if keys.len() > KEYS_MAX {
        return invalid("has more keys than a keyboard reports at the same time");
    }
    let named = |key: String| NAMES.iter().find(|(name, _)| *name == key).map_or(key, |(_, name)| (*name).to_owned());
    Ok(keys.into_iter().map(named).collect())
}

/// The keys that type a character.
fn character(character: char) -> Result<Vec<String>> {
    let found = CHARACTERS.iter().find(|(plain, shifted, _)| [*plain, *shifted].contains(&character));
    let digit = SHIFTED_DIGITS.find(character);
    let (key, shift) = match (found, digit) {
        (Some((plain, _, key)), _) => ((*key).to_owned(), *plain != character),
        (None, Some(digit)) => (digit.to_string(), true),
        _ if character.is_ascii_alphanumeric() => {
            (character.to_ascii_lowercase().to_string(), character.is_ascii_uppercase())
        }
        _ => {
            let text = format!("'{}' is not on the keyboard of the USA, and cannot be typed", character.escape_debug());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    Ok(if shift { vec!["shift".to_owned(), key] } else { vec![key] })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn combinations_have_the_names_of_qemu() {
        for (text, expected) in [
            ("ctrl-alt-delete", &["ctrl", "alt", "delete"][..]),
            ("Control-Alt-Del", &["ctrl", "alt", "delete"]),
            ("f12", &["f12"]),
            ("enter", &["ret"]),
            ("bracket_left", &["bracket_left"]),
        ] {
            assert_eq!(keys(text).unwrap(), expected, "{text}");
        }
        for wrong in ["", "-", "ctrl-", "a b", "ä", "a-b-c-d-e-f-g-h-i"] {
            assert!(keys(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_printable_character_has_a_key() {
        let all: Vec<Vec<String>> = (' '..='~').map(|one| character(one).unwrap()).collect();
        let different: std::collections::BTreeSet<&Vec<String>> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(character('A').unwrap(), ["shift", "a"]);
        assert_eq!(character('@').unwrap(), ["shift", "2"]);
        assert_eq!(character('?').unwrap(), ["shift", "slash"]);
        assert_eq!(character('\n').unwrap(), ["ret"]);
        assert!(character('ß').is_err() && character('\u{7}').is_err());
    }
}
