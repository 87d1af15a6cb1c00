//! Access rules: which clients may open which exports, depending on the names in the certificates of TLS clients.
//!
//! ```text
//! # client         disks           access
//! ci.example       ci-*,base       write
//! backup.example   *               read
//! ```
//!
//! 1. A client may open an export only if a rule for the client permits it. If several rules apply, the most permissive
//!    rule decides.
//! 2. A client cannot distinguish an export that it may not open from one that does not exist: neither is listed, the
//!    replies are the same, and the server does not look for either.
//! 3. A client that may open a disk may read its snapshots.
//! 4. Rules can be replaced while sessions run ([`CurrentRules`]). Every session that begins or continues afterwards
//!    has, by the new rules, the permission that it uses.

mod current;
mod users;

pub use current::{CurrentRules, Lost, Registered};
pub(crate) use users::Restricted;
pub use users::UserAccess;

use backend::regular;
use connections::{CertificateName, PeerCertificate};
use error::{Error, ErrorKind, Result};
use std::path::Path;

/// Longest file of rules that is read, in bytes.
const TEXT_MAX: u64 = 1 << 20;

/// What a client may do with an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Permission {
    /// The client may read the export.
    Read,
    /// The client may read and write the export.
    Write,
}

/// The clients to which a rule applies.
#[derive(Clone, Debug)]
enum RuleSubject {
    /// Every client with a valid certificate.
    Authenticated,
    /// Clients whose certificate has this name.
    Named(CertificateName),
}

#[derive(Clone, Debug)]
struct Rule {
    subject: RuleSubject,
    disks: Vec<String>,
    permission: Permission,
}

/// Rules for clients over TCP.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
}

/// The rules that apply to one client.
#[derive(Clone, Debug)]
pub struct Granted<'a> {
    rules: Vec<&'a Rule>,
}

impl Rules {
    /// Reads rules from a file.
    ///
    /// # Errors
    /// `Invalid`, with the line, for a file that is not a list of rules, and the errors of [`regular::read`].
    pub fn load(path: &Path) -> Result<Self> {
        // A pipe in place of the file is refused: the thread that reads the rules again would wait for it without end.
        let bytes = regular::read(path, TEXT_MAX, "list of access rules")?;
        let parsed = match std::str::from_utf8(&bytes) {
            Ok(text) => Self::parse(text),
            Err(_) => Err(Error::new(ErrorKind::Invalid, "it is no text in UTF-8")),
        };
        parsed.map_err(|error| error.context(format_args!("access rules '{}'", path.display())))
    }

    /// Parses rules.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rules = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.is_empty() {
                continue;
            }
            let rule = Rule::parse(&words)
                .map_err(|what| Error::new(ErrorKind::Invalid, format!("line {}: {what}", number + 1)))?;
            rules.push(rule);
        }
        Ok(Self { rules })
    }

    /// The rules for a client with this certificate. No rule applies to a client without a certificate.
    pub fn of(&self, certificate: Option<&PeerCertificate>) -> Granted<'_> {
        let applies = |rule: &&Rule| match &rule.subject {
            RuleSubject::Authenticated => certificate.is_some(),
            RuleSubject::Named(name) => certificate.is_some_and(|certificate| certificate.has(name)),
        };
        Granted { rules: self.rules.iter().filter(applies).collect() }
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is no rule, so that no client may open anything.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

impl Rule {
    fn parse(words: &[&str]) -> std::result::Result<Self, String> {
        let [client, disks, permission] = words else {
            return Err(format!("{} words; a rule is 'CLIENT DISKS read' or 'CLIENT DISKS write'", words.len()));
        };
        let subject = match *client {
            "*" => RuleSubject::Authenticated,
            name => match CertificateName::parse(name) {
                Some(name) => RuleSubject::Named(name),
                None => {
                    return Err(format!("'{name}' cannot be the name of a certificate; '*' stands for every client"));
                }
            },
        };
        let permission = match *permission {
            "read" => Permission::Read,
            "write" => Permission::Write,
            other => return Err(format!("'{other}' is neither read nor write")),
        };
        let disks: Vec<String> = disks.split(',').map(str::to_owned).collect();
        match disks.iter().find(|pattern| pattern.is_empty() || pattern.contains(['@', '/'])) {
            Some(pattern) => Err(format!("'{pattern}' is no pattern for names of disks")),
            None => Ok(Self { subject, disks, permission }),
        }
    }
}

impl Granted<'_> {
    /// What the client may do with an export, `disk` or `disk@snapshot`; `None` if nothing.
    pub fn permission(&self, export: &str) -> Option<Permission> {
        let disk = export.split('@').next().unwrap_or(export);
        let applies = |rule: &&&Rule| rule.disks.iter().any(|pattern| matches(pattern, disk));
        self.rules.iter().filter(applies).map(|rule| rule.permission).max()
    }
}

/// The error for an export that does not exist, or that the client may not open.
pub fn absent(export: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no export '{export}'"))
}

/// Whether a name matches a pattern, in which `*` matches any characters, and `?` one character.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut in_name) = (0, 0);
    // The position in the pattern after the last `*`, and the position in the name up to which this `*` matches.
    let mut star: Option<(usize, usize)> = None;
    while in_name < name.len() {
        match pattern.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, in_name));
            }
            Some(one) if *one == '?' || *one == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => match star {
                Some((after, reached)) => {
                    star = Some((after, reached + 1));
                    at = after;
                    in_name = reached + 1;
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|one| *one == '*')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, yes, no) in [
            ("web", vec!["web"], vec!["", "we", "webx", "xweb"]),
            ("web-*", vec!["web-", "web-1", "web-1-2"], vec!["web", "xweb-1"]),
            ("*", vec!["", "a", "a-b"], vec![]),
            ("*-data", vec!["-data", "a-data", "a-data-data"], vec!["data", "a-data1"]),
            ("a?c", vec!["abc", "aüc"], vec!["ac", "abbc"]),
            ("a*b*c", vec!["abc", "axxbyyc", "abcbc"], vec!["ab", "acb", "abcd"]),
        ] {
            assert!(yes.iter().all(|name| matches(pattern, name)), "{pattern}");
            assert!(!no.iter().any(|name| matches(pattern, name)), "{pattern}");
        }
        // The time does not grow exponentially with the length of the pattern.
        assert!(!matches(&"a*".repeat(200), &"a".repeat(199)));
        assert!(!matches(&format!("{}b", "a*".repeat(50)), &"a".repeat(2000)));
    }

    #[test]
    fn the_most_permissive_rule_decides() {
        let rules =
            Rules::parse("# tenants\nci.example ci-*,base read\n\nci.example ci-1 write # one\n* shared read\n")
                .unwrap();
        let granted = Granted { rules: rules.rules.iter().collect() };
        for (export, permission) in [
            ("ci-1", Some(Permission::Write)),
            ("ci-1@monday", Some(Permission::Write)),
            ("ci-2", Some(Permission::Read)),
            ("base@golden", Some(Permission::Read)),
            ("shared", Some(Permission::Read)),
            ("web", None),
            ("web@ci-1", None),
            ("", None),
        ] {
            assert_eq!(granted.permission(export), permission, "{export}");
        }
    }

    #[test]
    fn a_mistake_is_refused_with_its_line() {
        for (text, words) in [
            ("a.example web", "line 1: 2 words"),
            ("\na.example web all", "line 2: 'all'"),
            ("a b c d", "line 1: 4 words"),
            ("a_/b web read", "cannot be the name of a certificate"),
            ("a.example web, read", "no pattern"),
            ("a.example web@a read", "no pattern"),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(Rules::parse("").unwrap().rules.is_empty());
    }
}
