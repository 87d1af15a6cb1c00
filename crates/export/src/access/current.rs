//! The rules in use, which can be replaced while sessions run.
//!
//! A session opens its export by the rules of that moment, and registers when its handshake is complete. Registering
//! and replacing the rules exclude each other: either the session registers under the new rules, or
//! [`CurrentRules::replace`] finds it in the register.

use super::{Permission, Rules, absent};
use connections::PeerCertificate;
use error::Result;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The rules in use.
#[derive(Debug)]
pub struct CurrentRules {
    state: Mutex<RulesState>,
}

#[derive(Debug)]
struct RulesState {
    rules: Arc<Rules>,
    /// Sessions with a completed handshake, by their numbers.
    sessions: BTreeMap<u64, Session>,
}

#[derive(Debug)]
struct Session {
    certificate: Option<PeerCertificate>,
    /// The permission that the session uses.
    permission: Permission,
}

/// A session that is registered until this value is dropped.
#[derive(Debug)]
pub struct Registered<'a> {
    current: &'a CurrentRules,
    number: u64,
}

/// A session that uses a permission which the new rules do not grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Number of the session.
    pub number: u64,
    /// The permission that the new rules grant, with which the client may reconnect.
    pub left: Option<Permission>,
}

impl CurrentRules {
    /// Uses the given rules until they are replaced.
    pub fn new(rules: Rules) -> Self {
        Self { state: Mutex::new(RulesState { rules: Arc::new(rules), sessions: BTreeMap::new() }) }
    }

    /// The current rules.
    pub fn now(&self) -> Arc<Rules> {
        Arc::clone(&self.state.lock().rules)
    }

    /// Registers a session that has opened an export and uses a permission on it.
    ///
    /// # Errors
    /// `NotFound`, as for an absent export, if the rules were replaced and no longer grant that permission.
    pub fn register(
        &self,
        number: u64,
        certificate: Option<PeerCertificate>,
        export: &str,
        permission: Permission,
    ) -> Result<Registered<'_>> {
        let mut state = self.state.lock();
        if state.rules.of(certificate.as_ref()).permission(export) < Some(permission) {
            return Err(absent(export));
        }
        state.sessions.insert(number, Session { certificate, permission });
        Ok(Registered { current: self, number })
    }

    /// Replaces the rules. Returns the registered sessions that lose the permission which they use; the caller has to
    /// end these sessions. `export_of` returns the current name of the export that a session has open.
    pub fn replace(&self, rules: Rules, export_of: impl Fn(u64) -> Option<String>) -> Vec<Lost> {
        let mut state = self.state.lock();
        state.rules = Arc::new(rules);
        let RulesState { rules, sessions } = &*state;
        let lost = sessions.iter().filter_map(|(number, session)| {
            let export = export_of(*number)?;
            let left = rules.of(session.certificate.as_ref()).permission(&export);
            (left < Some(session.permission)).then_some(Lost { number: *number, left })
        });
        lost.collect()
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.current.state.lock().sessions.remove(&self.number);
    }
}
