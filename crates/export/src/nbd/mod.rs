//! The NBD server: disks for hypervisors, backup tools and block clients.
//!
//! A session goes through phases, one file each: [`server`] takes the connection over, [`handshake`] agrees on an
//! export and on extensions, [`transmission`] serves requests until one side leaves: it is codec and stream, and the
//! session core ([`crate::session`]) does the work. Beside them: [`protocol`] (constants, headers), [`options`] and
//! [`requests`] (what a client sends, checked), [`replies`] (what it is sent), [`status`] (metadata contexts),
//! [`limits`] (bounds). Exports and the list of connected clients are in [`crate::exports`] and [`crate::clients`];
//! sockets, TLS and threads are those of [`connections`].
//!
//! What the server promises, whatever a client does:
//!
//! 1. No client can make another one wait, beyond what sharing a disk and a machine implies: each connection has a
//!    thread, its memory is bounded, its handshake ends by a deadline.
//! 2. Bytes from outside never cause a panic, and are never used as a size before they are checked.
//! 3. `FLUSH` and FUA on one connection cover all connections to the disk (CAN_MULTI_CONN): there is no cache above
//!    the device.
//! 4. TCP without TLS and client certificates stays on the loopback interface unless the operator says otherwise.

pub mod handshake;
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

use crate::clients::Visit;
use crate::exports::{Admission, Exports, ResizePolicy};
use connections::TlsIdentity;
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use connections::transport::Transport;
use std::time::Duration;

/// What holds for a session.
#[derive(Clone)]
pub struct Terms {
    /// TLS is possible with this identity.
    pub tls: Option<TlsIdentity>,
    /// TLS comes before anything else (FORCEDTLS).
    pub tls_forced: bool,
    /// Exports are opened read-only.
    pub read_only: bool,
    /// Resizing by clients.
    pub resize: ResizePolicy,
    /// How long the handshake may take.
    pub handshake_timeout: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            tls: None,
            tls_forced: false,
            read_only: false,
            resize: ResizePolicy::default(),
            handshake_timeout: HANDSHAKE_TIMEOUT_DEFAULT,
        }
    }
}

/// Serves one client over any transport, from the greeting to the end. An error says why the connection ended, unless
/// the client ended it; it is logged here, where the name of the export is known.
pub fn serve(
    transport: Box<dyn Transport>,
    exports: &dyn Exports,
    terms: &Terms,
    visit: &mut Visit,
) -> error::Result<()> {
    let stop = visit.stop();
    let exports = &Admission::new(exports, visit);
    let agreement = handshake::negotiate(transport, exports, terms)
        .inspect_err(|error| tracing::info!(%error, "connection ended in the handshake by an error"))?;
    let Some(mut agreement) = agreement else {
        tracing::debug!("left before choosing an export");
        return Ok(());
    };
    visit.agreed(&agreement.export);
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
        agreement.device,
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
