//! TLS over another transport, for sessions that decide when to block.

use super::{PeerCertificate, TlsIdentity, holder};
use crate::limits::TLS_BUFFER_BYTES_MAX;
use crate::transport::{Transport, Wait};
use rustls::ServerConnection;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// TLS over another transport, as the server. The TLS handshake takes place within the first `receive`.
pub struct Tls {
    below: Box<dyn Transport>,
    session: Box<ServerConnection>,
    input: bool,
    ended: bool,
    /// Whether it was reported to the transport below that the peer has a valid certificate.
    authenticated: bool,
}

impl Tls {
    /// Begins TLS. Nothing is sent or received by this call.
    pub fn accept(below: Box<dyn Transport>, identity: &TlsIdentity) -> io::Result<Self> {
        let mut session = ServerConnection::new(Arc::clone(&identity.config)).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        Ok(Self { below, session: Box::new(session), input: false, ended: false, authenticated: false })
    }

    fn read_plaintext(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for slice in into {
            let mut filled = 0;
            while filled < slice.len() {
                match self.session.reader().read(&mut slice[filled..]) {
                    Ok(0) => {
                        self.ended = true;
                        return Ok(total + filled);
                    }
                    Ok(bytes) => filled += bytes,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.input = false;
                        return Ok(total + filled);
                    }
                    // The peer closed the connection without a close notification. An attacker could truncate the data
                    // this way, but that is detected, because every message of the session has a length.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        self.ended = true;
                        return Ok(total + filled);
                    }
                    Err(error) => return Err(error),
                }
            }
            total += filled;
        }
        Ok(total)
    }
}

/// Lets rustls read ciphertext from the transport below.
struct From<'a>(&'a mut dyn Transport, Wait);

impl Read for From<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.receive(&mut [IoSliceMut::new(into)], self.1)
    }
}

/// Lets rustls write ciphertext to the transport below.
struct To<'a>(&'a mut dyn Transport);

impl Write for To<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(slices)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for Tls {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        let wait = if wait == Wait::No { Wait::No } else { Wait::Some };
        loop {
            let bytes = self.read_plaintext(into)?;
            if bytes > 0 || self.ended {
                return Ok(bytes);
            }
            // Handshake messages are sent first, because the peer may wait for them.
            self.flush()?;
            match self.session.read_tls(&mut From(&mut *self.below, wait)) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(0);
                }
                Ok(_) => {
                    let state = self.session.process_new_packets().map_err(|error| {
                        // rustls has queued an alert that reports the reason to the peer.
                        io::Error::new(io::ErrorKind::InvalidData, error)
                    });
                    let state = match state {
                        Ok(state) => state,
                        Err(error) => {
                            let _ = self.flush();
                            return Err(error);
                        }
                    };
                    self.input = state.plaintext_bytes_to_read() > 0;
                    if !self.authenticated && !self.session.is_handshaking() {
                        self.authenticated = true;
                        let chain = self.session.peer_certificates();
                        let holder = chain.and_then(<[_]>::first).map(holder);
                        if let Some(holder) = holder {
                            self.below.authenticated(&holder)?;
                        }
                    }
                    self.flush()?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = self.session.writer().write_vectored(slices)?;
        self.flush()?;
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut To(&mut *self.below)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.below.flush()
    }

    fn has_input(&self) -> bool {
        self.input
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }

    /// The certificate of a peer is proven only at the end of the handshake.
    fn peer_certificate(&self) -> Option<PeerCertificate> {
        if self.session.is_handshaking() {
            return None;
        }
        self.session.peer_certificates()?.first().cloned().map(|certificate| PeerCertificate(Arc::new(certificate)))
    }

    fn close(&mut self) {
        self.session.send_close_notify();
        let _ = self.flush();
        self.below.close();
    }
}
