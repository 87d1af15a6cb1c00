//! Permissions and owners of the files of a datastore in a local folder.
//!
//! Disks, snapshots and the memory of guests may contain secrets, so every file and folder is created with access for
//! its owner only. A check finds files that other users can access: those that version 0.1.0 created, or that other
//! programs have copied or changed.
//!
//! A datastore belongs to the owner of its folder, who cannot open the datastore if root owns files in it. lamina gives
//! the files that root creates to this owner; version 0.1.0 and other programs do not.

use crate::info::{CheckReport, Finding};
use backend::owner::{self, Misowned};
use backend::private::{self, Exposed};
use backend::searched::SearchedFolder;
use error::{Error, IoContext, Result};
use std::error::Error as _;
use std::io;
use std::path::Path;

/// The most files that a warning names.
const NAMED_MAX: usize = 3;

/// Adds warnings to the report of a check: they name the files and folders that other users can access, and those that
/// do not belong to the datastore's owner. With `repair`, closes them to other users, gives them to the owner, and adds
/// each as a repaired finding instead.
pub fn check(folder: &SearchedFolder, repair: bool, report: &mut CheckReport) -> Result<()> {
    check_access(folder, repair, report)?;
    check_owners(folder, repair, report)
}

fn check_access(folder: &SearchedFolder, repair: bool, report: &mut CheckReport) -> Result<()> {
    let searching = || "searching the datastore for files that other users can access".to_owned();
    let mut exposed = private::exposed(folder).during(searching)?;
    if repair {
        exposed.retain(|one| match private::close(folder, one) {
            // The file no longer exists, so there is nothing to report.
            Ok(false) => false,
            Ok(true) => {
                let problem = format!("other users can access {}", named(one));
                report.findings.push(repaired(problem, format!("its mode is now {:03o}", one.wanted)));
                false
            }
            Err(error) => {
                tracing::warn!(path = %one.path.display(), %error, "the permissions of a file cannot be changed");
                true
            }
        });
    }
    if exposed.is_empty() {
        return Ok(());
    }
    let remedy = match repair {
        false => "'lamina check --repair' closes them to other users",
        true => "only their owner can change that",
    };
    report.warnings.push(format!("other users can access {}; {remedy}", list(exposed.iter().map(named))));
    Ok(())
}

fn check_owners(folder: &SearchedFolder, repair: bool, report: &mut CheckReport) -> Result<()> {
    let searching = || "searching the datastore for files of other owners".to_owned();
    let mut misowned = owner::misowned(folder).during(searching)?;
    let Some(wanted) = misowned.first().map(|one| one.wanted) else { return Ok(()) };
    if repair && owner::may_give() {
        misowned.retain(|one| match owner::give_back(folder, one) {
            Ok(false) => false,
            Ok(true) => {
                let problem =
                    format!("'{}' belongs to user {}, not to the datastore's owner", one.path.display(), one.user);
                report.findings.push(repaired(problem, format!("it now belongs to user {wanted}")));
                false
            }
            Err(error) => {
                tracing::warn!(path = %one.path.display(), %error, "the owner of a file cannot be changed");
                true
            }
        });
    }
    if misowned.is_empty() {
        return Ok(());
    }
    let remedy = match (repair, owner::may_give()) {
        (true, true) => format!("inspect each of these files, and use 'chown {wanted} FILE'"),
        (false, true) => "'lamina check --repair' gives them to the owner".to_owned(),
        (_, false) => "run 'lamina check --repair' as root, while no server runs, to give them to the owner".to_owned(),
    };
    let names = list(misowned.iter().map(with_user));
    report.warnings.push(format!("the datastore belongs to user {wanted}, which does not own {names}; {remedy}"));
    Ok(())
}

/// If opening a datastore failed because access to a file was denied, adds to the error the files that do not belong to
/// the datastore's owner, and what to do.
pub fn explain(folder: &Path, error: Error) -> Error {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    if source.is_none_or(|source| source.kind() != io::ErrorKind::PermissionDenied) {
        return error;
    }
    let misowned = SearchedFolder::open(folder).and_then(|folder| owner::misowned(&folder)).unwrap_or_default();
    let Some(first) = misowned.first() else { return error };
    let names = list(misowned.iter().map(with_user));
    let text = format!(
        "{error}: the datastore belongs to user {}, which does not own {names}; run 'lamina check --repair' as root to \
         give them to the owner",
        first.wanted
    );
    Error::new(error.kind(), text)
}

fn repaired(problem: String, how: String) -> Finding {
    Finding::new(problem, Some(how))
}

/// The first names, and how many more there are.
fn list(mut names: impl ExactSizeIterator<Item = String>) -> String {
    let first: Vec<String> = names.by_ref().take(NAMED_MAX).collect();
    let more = names.len();
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    format!("{}{more}", first.join(", "))
}

fn with_user(one: &Misowned) -> String {
    let linked = if one.linked { ", a file with several names" } else { "" };
    format!("'{}' (user {}{linked})", one.path.display(), one.user)
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
        let searched = SearchedFolder::open(folder.path()).unwrap();
        let mut report = CheckReport::default();
        check(&searched, false, &mut report).unwrap();
        assert!(report.findings.is_empty());
        let [warning] = &report.warnings[..] else { panic!("{report:?}") };
        for words in ["'file0' (mode 644), 'file1'", "and 2 more", "check --repair"] {
            assert!(warning.contains(words), "{warning}");
        }
        let mut report = CheckReport::default();
        check(&searched, true, &mut report).unwrap();
        assert!(report.warnings.is_empty());
        assert_eq!(report.findings.len(), 5);
        assert_eq!(report.findings[0].repaired.as_deref(), Some("its mode is now 600"));
        let mut report = CheckReport::default();
        check(&searched, true, &mut report).unwrap();
        assert_eq!(report, CheckReport::default());
    }
}
