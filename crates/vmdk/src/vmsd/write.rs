//! Writing a list of snapshots in ESXi's order.

use super::Vmsd;
use std::fmt::Write;

impl Vmsd {
    /// The text of the list, in ESXi's form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = String::from(".encoding = \"UTF-8\"\n");
        let mut line = |key: &str, value: &str| {
            // Writing into a string cannot fail.
            let _ = writeln!(out, "{key} = \"{}\"", escape(value));
        };
        line("snapshot.lastUID", &self.last_uid.to_string());
        if let Some(current) = self.current {
            line("snapshot.current", &current.to_string());
        }
        if self.need_consolidate {
            line("snapshot.needConsolidate", "TRUE");
        }
        for (index, snapshot) in self.snapshots.iter().enumerate() {
            let mut of = |key: &str, value: &str| line(&format!("snapshot{index}.{key}"), value);
            of("uid", &snapshot.uid.to_string());
            of("filename", &snapshot.state);
            if let Some(parent) = snapshot.parent {
                of("parent", &parent.to_string());
            }
            of("displayName", &snapshot.name);
            if !snapshot.description.is_empty() {
                of("description", &snapshot.description);
            }
            of("createTimeHigh", &(snapshot.created >> 32).to_string());
            of("createTimeLow", &(snapshot.created as u32 as i32).to_string());
            of("numDisks", &snapshot.disks.len().to_string());
            for (number, disk) in snapshot.disks.iter().enumerate() {
                of(&format!("disk{number}.fileName"), &disk.file);
                of(&format!("disk{number}.node"), &disk.node);
            }
            if index == 0 {
                line("snapshot.numSnapshots", &self.snapshots.len().to_string());
            }
        }
        if self.snapshots.is_empty() {
            line("snapshot.numSnapshots", "0");
        }
        out.into_bytes()
    }
}

/// Encodes a character that cannot stand between quotes as `|` and two hexadecimal digits.
fn escape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '"' | '|' | '\0'..='\u{1f}' | '\u{7f}' => {
                let _ = write!(out, "|{:02X}", c as u32);
            }
            other => out.push(other),
        }
    }
    out
}
