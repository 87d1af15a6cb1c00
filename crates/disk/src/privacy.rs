//! Access of other users to the files of a datastore in a local folder.
//!
//! Disks, snapshots and the memory of guests may contain secrets, so every file and folder is created with access for
//! its owner only. A check finds files that other users can access: those that version 0.1.0 created, or that other
//! programs have copied or changed.

use crate::info::{CheckReport, Finding};
use backend::private::{self, Exposed};
use error::{IoContext, Result};
use std::path::Path;

/// The most files that a warning names.
const NAMED_MAX: usize = 3;

/// Adds a warning to the report of a check that names the files and folders that other users can access. With `repair`,
/// removes that access and adds each file as a repaired finding instead.
pub fn check(folder: &Path, repair: bool, report: &mut CheckReport) -> Result<()> {
    let searching = || format!("searching {} for files of other users' access", folder.display());
    let mut exposed = private::exposed(folder).during(searching)?;
    if repair {
        exposed.retain(|one| match private::close(folder, one) {
            Ok(()) => {
                let problem = format!("other users can access {}", named(one));
                let repaired = Some(format!("its mode is now {:03o}", one.wanted));
                report.findings.push(Finding { problem, repaired });
                false
            }
            Err(error) => {
                tracing::warn!(path = %one.path.display(), %error, "its permissions cannot be changed");
                true
            }
        });
    }
    if exposed.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = exposed.iter().take(NAMED_MAX).map(named).collect();
    let more = exposed.len() - names.len();
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    let remedy = match repair {
        false => "'lamina check --repair' closes them to other users",
        true => "only their owner can change that",
    };
    report.warnings.push(format!("other users can access {}{more}; {remedy}", names.join(", ")));
    Ok(())
}

fn named(one: &Exposed) -> String {
    match one.path.as_os_str().is_empty() {
        true => format!("the folder of the datastore (mode {:03o})", one.mode),
        false => format!("'{}' (mode {:03o})", one.path.display(), one.mode),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_warning_names_what_others_can_access_and_a_repair_closes_it() {
        let folder = tempfile::tempdir().unwrap();
        private::close_folder(folder.path()).unwrap();
        for number in 0..5 {
            let path = folder.path().join(format!("file{number}"));
            fs::write(&path, b"").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        }
        let mut report = CheckReport::default();
        check(folder.path(), false, &mut report).unwrap();
        assert!(report.findings.is_empty());
        let [warning] = &report.warnings[..] else { panic!("{report:?}") };
        for words in ["'file0' (mode 644), 'file1'", "and 2 more", "check --repair"] {
            assert!(warning.contains(words), "{warning}");
        }
        let mut report = CheckReport::default();
        check(folder.path(), true, &mut report).unwrap();
        assert!(report.warnings.is_empty());
        assert_eq!(report.findings.len(), 5);
        assert_eq!(report.findings[0].repaired.as_deref(), Some("its mode is now 600"));
        let mut report = CheckReport::default();
        check(folder.path(), true, &mut report).unwrap();
        assert_eq!(report, CheckReport::default());
    }
}
