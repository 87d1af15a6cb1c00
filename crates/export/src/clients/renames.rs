//! Clients of disks that are renamed.
//!
//! A client identifies its disk by the name that it requested, and requests the same name when it reconnects. If
//! another disk had this name by then, the client would write to the wrong disk.
//!
//! 1. While a disk is renamed, sessions that request it are refused, so that no client opens it in an intermediate
//!    state.
//! 2. If a listed client requested a name that its disk no longer has, this name opens no disk. This applies to all
//!    clients that request the name, because a proxy or a new address can hide that two connections belong to the same
//!    client.

use super::{Clients, ClientsState, Session, Visit};
use error::{Error, ErrorKind, Result};
use std::fmt::Write;

/// The name of an export after the disk `from` was renamed to `to`; `None` if the export belongs to another disk.
fn renamed(export: &str, from: &str, to: &str) -> Option<String> {
    match export.strip_prefix(from)? {
        rest if rest.is_empty() || rest.starts_with('@') => Some(format!("{to}{rest}")),
        _ => None,
    }
}

impl Session {
    /// The name that the client requested, if the disk has another name now.
    pub(super) fn asked_other(&self) -> Option<String> {
        self.asked.clone().filter(|asked| self.export.as_ref() != Some(asked))
    }
}

impl Clients {
    /// Renames a disk by calling `deed`, and lists its clients under the new name.
    ///
    /// # Errors
    /// Errors of `deed`; the list of clients is then unchanged.
    pub fn rename<T>(&self, from: &str, to: &str, deed: impl FnOnce() -> Result<T>) -> Result<T> {
        let _moving = Moving::begin(self, from);
        let outcome = deed()?;
        let mut changed = false;
        let mut state = self.shared.state.lock();
        for session in state.sessions.values_mut() {
            let now = session.export.as_deref().and_then(|export| renamed(export, from, to));
            changed |= now.is_some();
            session.export = now.or(session.export.take());
            if let Some(taken) = &mut session.taken {
                taken.gone.rename(from, to);
            }
        }
        for waiting in &mut state.gone {
            changed |= waiting.gone.rename(from, to);
        }
        self.shared.touch(&mut state, changed);
        drop(state);
        self.record_unless_kept(changed);
        Ok(outcome)
    }
}

impl super::Gone {
    fn rename(&mut self, from: &str, to: &str) -> bool {
        let Some(now) = renamed(&self.export, from, to) else { return false };
        let before = std::mem::replace(&mut self.export, now);
        self.asked = Some(self.asked.take().unwrap_or(before)).filter(|asked| *asked != self.export);
        true
    }
}

/// A disk that is being renamed until this value is dropped.
struct Moving<'a> {
    clients: &'a Clients,
    disk: &'a str,
}

impl<'a> Moving<'a> {
    fn begin(clients: &'a Clients, disk: &'a str) -> Self {
        clients.shared.state.lock().moving.push(disk.to_owned());
        Self { clients, disk }
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut state = self.clients.shared.state.lock();
        if let Some(at) = state.moving.iter().position(|disk| disk == self.disk) {
            state.moving.swap_remove(at);
        }
    }
}

impl ClientsState {
    /// `Busy` for a name that must not be opened because of a rename.
    pub(super) fn refuse_former_name(&self, export: &str) -> Result<()> {
        self.refuse_moving(export)?;
        let connected = self.sessions.values().filter(|session| session.agreed).filter_map(|session| {
            let asked = session.asked_other()?;
            (asked == export).then_some((session.export.as_deref()?, &session.peer, true))
        });
        let gone = self.gone.iter().filter(|waiting| waiting.until > std::time::Instant::now());
        let gone = gone.filter(|waiting| waiting.gone.asked.as_deref() == Some(export));
        let gone = gone.map(|waiting| (waiting.gone.export.as_str(), &waiting.gone.peer, false));
        let Some((now, peer, connected)) = connected.chain(gone).next() else { return Ok(()) };
        let mut text = format!("'{export}' was renamed to '{now}', and {peer} may still request the old name: ");
        let _ = match connected {
            true => write!(text, "disconnect that client, or rename '{now}' back"),
            false => write!(text, "wait until the grace time of that client is over, or rename '{now}' back"),
        };
        Err(Error::new(ErrorKind::Busy, text))
    }

    fn refuse_moving(&self, export: &str) -> Result<()> {
        let disk = export.split_once('@').map_or(export, |(disk, _)| disk);
        if self.moving.iter().any(|moving| moving == disk) {
            return Err(Error::new(ErrorKind::Busy, format!("disk '{disk}' is being renamed: try again")));
        }
        Ok(())
    }
}

impl Visit {
    /// Confirms that the chosen export is open.
    ///
    /// # Errors
    /// `Busy` if the disk is being renamed: the opened device may belong to a disk that has taken over the name.
    pub fn opened(&self, export: &str) -> Result<()> {
        let state = self.shared.state.lock();
        state.refuse_moving(export)?;
        match state.sessions.get(&self.number) {
            Some(session) if session.export.as_deref() != Some(export) => {
                Err(Error::new(ErrorKind::Busy, format!("'{export}' was renamed just now: try again")))
            }
            _ => Ok(()),
        }
    }
}
