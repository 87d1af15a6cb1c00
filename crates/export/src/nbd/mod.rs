//! The NBD server: disks for hypervisors, backup tools and block clients.
//!
//! A session has phases: [`server`] takes over the connection, [`handshake`] negotiates an export and extensions, and
//! [`transmission`] serves requests until one side disconnects. Transmission only decodes and encodes; the session core
//! ([`crate::session`]) carries out the requests. Further modules: [`protocol`] (constants, headers), [`options`] and
//! [`requests`] (decoding and checking of client messages), [`replies`] (messages to the client), [`status`] (metadata
//! contexts), [`limits`]. Exports and the list of clients are in [`crate::exports`] and [`crate::clients`]; sockets,
//! TLS and threads are in [`connections`].
//!
//! Invariants, whatever a client does:
//!
//! 1. No client delays another one, except that both share the disk and the host: each connection has its own thread,
//!    bounded memory and a handshake deadline.
//! 2. Bytes from a client never cause a panic, and are checked before they are used as a size.
//! 3. `FLUSH` and FUA on one connection cover all connections to the disk (CAN_MULTI_CONN), because no connection has a
//!    cache of its own.
//! 4. TCP without TLS and client certificates is limited to the loopback interface unless the operator allows more.

mod handshake;
mod inbox;
pub mod limits;
pub mod options;
pub mod protocol;
pub mod replies;
pub mod requests;
pub mod server;
pub mod status;
pub mod transmission;
mod turns;

pub use server::{Server, ServerConfig};
pub use turns::Turns;

use crate::access::{CurrentRules, Permission};
use crate::clients::Visit;
use crate::exports::{Admission, Exports, ResizePolicy};
use backend::local::Thread;
use connections::TlsIdentity;
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use connections::transport::Transport;
use std::sync::Arc;
use std::time::Duration;

/// Configuration of a session.
#[derive(Clone)]
pub struct Terms {
    /// The identity for TLS; `None` if TLS is not offered.
    pub tls: Option<TlsIdentity>,
    /// Whether TLS is required before any other option (FORCEDTLS).
    pub tls_forced: bool,
    /// Which exports the client may open, depending on its certificate; `None` if it may open all.
    pub rules: Option<Arc<CurrentRules>>,
    /// Whether exports are opened read-only.
    pub read_only: bool,
    /// Whether clients may resize the disk.
    pub resize: ResizePolicy,
    /// Limit of the duration of the handshake.
    pub handshake_timeout: Duration,
    /// The sessions with which the session shares the processors.
    pub turns: Arc<Turns>,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            tls: None,
            tls_forced: false,
            rules: None,
            read_only: false,
            resize: ResizePolicy::default(),
            handshake_timeout: HANDSHAKE_TIMEOUT_DEFAULT,
            turns: Arc::default(),
        }
    }
}

/// Serves one client over any transport, from the greeting to the end. Returns an error if the connection ended for
/// another reason than the client's disconnect request. The error is also logged here, because only this function has
/// the export's name.
pub fn serve(
    transport: Box<dyn Transport>,
    exports: &dyn Exports,
    terms: &Terms,
    visit: &mut Visit,
) -> error::Result<()> {
    let stop = visit.stop();
    let exports = &Admission::new(exports, visit);
    let agreement = handshake::negotiate(transport, exports, terms).inspect_err(|error| visit.log_failure(error))?;
    let Some(mut agreement) = agreement else {
        tracing::debug!("the client closed the connection before it chose an export");
        return Ok(());
    };
    let sharing = visit.agreed(&agreement.export);
    let registered = terms.rules.as_ref().map(|rules| {
        let permission = if agreement.device.read_only() { Permission::Read } else { Permission::Write };
        let certificate = agreement.transport.peer_certificate();
        // The disk may have been renamed since it was opened; the rules apply to its present name.
        let export = visit.export();
        rules.register(visit.number(), certificate, export.as_deref().unwrap_or(&agreement.export), permission)
    });
    let _registered = registered.transpose().inspect_err(|error| {
        visit.loses_access();
        tracing::info!(%error, "connection ended: its access rule was removed during the handshake");
    })?;
    let _turn = terms.turns.join(Thread::current());
    let span = tracing::info_span!("export", name = agreement.export);
    let _entered = span.enter();
    tracing::info!(
        style = ?agreement.style,
        contexts = agreement.contexts.len(),
        read_only = agreement.device.read_only(),
        "connected"
    );
    let (tally, result) = transmission::transmit(
        &mut *agreement.transport,
        transmission::OpenExport { device: agreement.device, sharing },
        exports,
        agreement.style,
        agreement.contexts,
        terms,
        &stop,
    );
    if tally.farewell {
        visit.says_farewell();
    }
    agreement.transport.close();
    tracing::info!(requests = tally.requests, bytes_read = tally.read, bytes_written = tally.written, "disconnected");
    result.inspect_err(|error| tracing::warn!(%error, "connection ended by an error"))
}
