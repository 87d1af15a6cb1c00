//! The handshake of a session: negotiation of the export and of extensions.
//!
//! Fixed newstyle: the server greets, the client answers with flags and then sends options one at a time, each answered
//! before the next is read. Invariants:
//!
//! 1. The whole handshake, TLS included, has one deadline, however slowly the client sends.
//! 2. No byte after the current option is read, so that no byte sent in plain text is taken for one received through
//!    TLS. `STARTTLS` resets everything that was negotiated before.
//! 3. Where TLS is required, no export name, size or error about an export is sent before TLS.
//! 4. If there are rules for the client ([`crate::access`]), an export that the client may not open is treated as one
//!    that does not exist: the name is passed to the rules only. If a client may learn of no snapshot, there are no
//!    metadata contexts of snapshots for it.
//! 5. Only the handshake opens a device for a client; it closes the device if the client chooses another one or
//!    disconnects, and if the disk has another name when the client requests it again.

use super::Terms;
use super::limits::*;
use super::options::{self, Malformed};
use super::protocol::{self, OptionHead, Put, client, feature, greeting, info, option, option_reply, put_option_reply};
use super::replies::Style;
use super::status::{self, Context};
use crate::access::{self, Permission};
use crate::exports::{ExportName, Exports, ResizePolicy};
use backend::local::{Slice, Thread};
use connections::TlsIdentity;
use connections::tls::Tls;
use connections::transport::{Transport, Wait, wait_for};
use disk::device::Device;
use error::{Error, ErrorKind, IoContext, Result};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

/// Result of a handshake.
pub struct Agreement {
    /// The transport, with TLS if it was negotiated.
    pub transport: Box<dyn Transport>,
    /// The open device of the export.
    pub device: Arc<dyn Device>,
    /// The export's name.
    pub export: String,
    /// Style of headers and replies.
    pub style: Style,
    /// Metadata contexts for block status.
    pub contexts: Vec<Context>,
}

/// Negotiates until an export is chosen; `None` if the client disconnects, which the protocol permits at any time.
pub fn negotiate(transport: Box<dyn Transport>, exports: &dyn Exports, terms: &Terms) -> Result<Option<Agreement>> {
    let mut handshake = Handshake {
        transport,
        exports,
        terms,
        deadline: Instant::now() + terms.handshake_timeout,
        out: Vec::new(),
        no_zeroes: false,
        encrypted: false,
        chosen: Chosen::default(),
        opened: None,
    };
    let export = match handshake.run() {
        Ok(Some(export)) => export,
        ended => {
            handshake.transport.close();
            return ended.map(|_| None);
        }
    };
    let contexts = if handshake.chosen.contexts_of.as_ref() == Some(&export.name) {
        handshake.chosen.contexts
    } else {
        Vec::new()
    };
    Ok(Some(Agreement {
        transport: handshake.transport,
        device: export.device,
        export: export.name,
        style: handshake.chosen.style,
        contexts,
    }))
}

/// What the client has chosen so far; `STARTTLS` resets it.
#[derive(Default)]
struct Chosen {
    style: Style,
    contexts: Vec<Context>,
    contexts_of: Option<String>,
}

/// The export that the handshake has open.
#[derive(Clone)]
struct Opened {
    name: String,
    device: Arc<dyn Device>,
}

/// How to continue after an option.
enum Next {
    Another,
    Leave,
    Transmit(Opened),
}

struct Handshake<'a> {
    transport: Box<dyn Transport>,
    exports: &'a dyn Exports,
    terms: &'a Terms,
    deadline: Instant,
    out: Vec<u8>,
    no_zeroes: bool,
    encrypted: bool,
    chosen: Chosen,
    opened: Option<Opened>,
}

/// Takes the place of the transport while a TLS transport is built on that transport.
struct Closed;

impl Transport for Closed {
    fn receive(&mut self, _into: &mut [IoSliceMut<'_>], _wait: Wait) -> io::Result<usize> {
        Err(io::ErrorKind::NotConnected.into())
    }
    fn send(&mut self, _slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Err(io::ErrorKind::NotConnected.into())
    }
    fn descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

fn violation(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

impl Handshake<'_> {
    fn run(&mut self) -> Result<Option<Opened>> {
        self.out.put_u64(protocol::INIT_MAGIC);
        self.out.put_u64(protocol::OPTION_MAGIC);
        self.out.put_u16(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
        self.push()?;
        let mut answer = [0; 4];
        if !self.fill(&mut answer)? {
            return Ok(None);
        }
        let flags = u32::from_be_bytes(answer);
        if flags & !(client::FIXED_NEWSTYLE | client::NO_ZEROES) != 0 {
            return Err(violation(format!("the client set unknown handshake flags {flags:#x}")));
        }
        let fixed = flags & client::FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & client::NO_ZEROES != 0;
        for _ in 0..OPTIONS_MAX {
            let mut head = [0; protocol::OPTION_HEAD_BYTES];
            if !self.fill(&mut head)? {
                return Ok(None);
            }
            let head = OptionHead::decode(&head).ok_or_else(|| violation("an option did not begin with IHAVEOPT"))?;
            // A client without fixed newstyle understands `EXPORT_NAME` only; it cannot decode replies to other
            // options.
            if !fixed && head.code != option::EXPORT_NAME {
                return Err(violation("the client sent options without fixed newstyle"));
            }
            let next = match self.data(head)? {
                Some(data) => self.answer(head.code, &data)?,
                None => Next::Another,
            };
            match next {
                Next::Another => self.push()?,
                Next::Leave => {
                    self.push()?;
                    return Ok(None);
                }
                Next::Transmit(opened) => {
                    // The client may open the export. With a long slice, its next requests would interrupt this thread
                    // before the session is registered.
                    Thread::current().set_slice(Slice::Default);
                    self.push()?;
                    return Ok(Some(opened));
                }
            }
        }
        Err(violation(format!("the client sent {OPTIONS_MAX} options and chose no export")))
    }

    /// Reads the data of an option. `None` if the data were too long; the client has then received an error reply.
    fn data(&mut self, head: OptionHead) -> Result<Option<Vec<u8>>> {
        let length = head.length as usize;
        if length <= OPTION_BYTES_MAX {
            let mut data = vec![0; length];
            return match length == 0 || self.fill(&mut data)? {
                true => Ok(Some(data)),
                false => Err(violation("the client closed the connection in the middle of an option")),
            };
        }
        if length > OPTION_BYTES_SKIPPED_MAX || head.code == option::EXPORT_NAME {
            return Err(violation(format!("the client sent an option of {length} bytes")));
        }
        let mut scratch = [0; 4096];
        let mut left = length;
        while left > 0 {
            let part = left.min(scratch.len());
            if !self.fill(&mut scratch[..part])? {
                return Err(violation("the client closed the connection in the middle of an option"));
            }
            left -= part;
        }
        self.refuse(head.code, option_reply::ERR_TOO_BIG, "the option is too long");
        Ok(None)
    }

    fn answer(&mut self, code: u32, data: &[u8]) -> Result<Next> {
        if self.must_encrypt() && !matches!(code, option::STARTTLS | option::ABORT) {
            if code == option::EXPORT_NAME {
                return Err(violation("the client chose an export before TLS, which this server requires"));
            }
            self.refuse(code, option_reply::ERR_TLS_REQD, "this server requires TLS: send STARTTLS first");
            return Ok(Next::Another);
        }
        match code {
            option::EXPORT_NAME => return self.export_name(data),
            option::ABORT => {
                self.reply(code, option_reply::ACK, &[]);
                return Ok(Next::Leave);
            }
            option::INFO | option::GO => return Ok(self.describe(code, data)),
            option::STARTTLS => self.start_tls(data)?,
            option::LIST => self.list(data)?,
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => self.choose_style(code, data),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(code, data)?,
            _ => self.refuse(code, option_reply::ERR_UNSUP, "this server does not support the option"),
        }
        Ok(Next::Another)
    }

    fn must_encrypt(&self) -> bool {
        self.terms.tls_forced && !self.encrypted
    }

    fn export_name(&mut self, data: &[u8]) -> Result<Next> {
        // `EXPORT_NAME` has no error reply: the server can only close the connection.
        if self.chosen.style == Style::Extended {
            return Err(violation("the client used EXPORT_NAME with extended headers"));
        }
        let name = options::export_name(data).map_err(|Malformed(what)| violation(what))?;
        let opened = self.open(name)?;
        self.out.put_u64(opened.device.capacity());
        let flags = self.features(&opened);
        self.out.put_u16(flags);
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        Ok(Next::Transmit(opened))
    }

    fn describe(&mut self, code: u32, data: &[u8]) -> Next {
        let request = match options::info_request(data) {
            Ok(request) => request,
            Err(Malformed(what)) => {
                self.refuse(code, option_reply::ERR_INVALID, what);
                return Next::Another;
            }
        };
        let opened = match self.open(request.name) {
            Ok(opened) => opened,
            Err(error) => {
                self.refuse(code, option_reply::ERR_UNKNOWN, &error.to_string());
                return Next::Another;
            }
        };
        let mut fact = Vec::new();
        fact.put_u16(info::EXPORT);
        fact.put_u64(opened.device.capacity());
        fact.put_u16(self.features(&opened));
        self.reply(code, option_reply::INFO, &fact);
        let wants = |kind| request.wanted.contains(&kind);
        if wants(info::NAME) || request.name != opened.name {
            self.reply(code, option_reply::INFO, &fact_of(info::NAME, opened.name.as_bytes()));
        }
        if wants(info::DESCRIPTION)
            && let Some(description) = self.exports.description(&opened.name)
        {
            let description = protocol::clip_message(&description, STRING_BYTES_MAX);
            self.reply(code, option_reply::INFO, &fact_of(info::DESCRIPTION, description.as_bytes()));
        }
        if wants(info::BLOCK_SIZE) {
            let mut fact = Vec::new();
            fact.put_u16(info::BLOCK_SIZE);
            fact.put_u32(BLOCK_BYTES_MIN);
            fact.put_u32(BLOCK_BYTES_PREFERRED);
            fact.put_u32(PAYLOAD_BYTES_MAX as u32);
            self.reply(code, option_reply::INFO, &fact);
        }
        self.reply(code, option_reply::ACK, &[]);
        if code == option::GO { Next::Transmit(opened) } else { Next::Another }
    }

    fn start_tls(&mut self, data: &[u8]) -> Result<()> {
        let code = option::STARTTLS;
        let identity: &TlsIdentity = match &self.terms.tls {
            _ if !data.is_empty() => {
                self.refuse(code, option_reply::ERR_INVALID, "STARTTLS takes no data");
                return Ok(());
            }
            _ if self.encrypted => {
                self.refuse(code, option_reply::ERR_INVALID, "TLS is in use already");
                return Ok(());
            }
            None => {
                self.refuse(code, option_reply::ERR_POLICY, "this server is not configured for TLS");
                return Ok(());
            }
            Some(identity) => identity,
        };
        self.reply(code, option_reply::ACK, &[]);
        self.push()?;
        let below = std::mem::replace(&mut self.transport, Box::new(Closed));
        self.transport = Box::new(Tls::accept(below, identity).during(|| "beginning TLS".to_owned())?);
        self.encrypted = true;
        self.chosen = Chosen::default();
        self.opened = None;
        Ok(())
    }

    fn list(&mut self, data: &[u8]) -> Result<()> {
        if !data.is_empty() {
            self.refuse(option::LIST, option_reply::ERR_INVALID, "LIST takes no data");
            return Ok(());
        }
        for export in self.names() {
            if export.name.len() > STRING_BYTES_MAX {
                continue;
            }
            let mut fact = Vec::new();
            fact.put_u32(export.name.len() as u32);
            fact.extend_from_slice(export.name.as_bytes());
            fact.extend_from_slice(protocol::clip_message(&export.description, STRING_BYTES_MAX).as_bytes());
            self.reply(option::LIST, option_reply::SERVER, &fact);
            if self.out.len() > OPTION_BYTES_MAX {
                self.push()?;
            }
        }
        self.reply(option::LIST, option_reply::ACK, &[]);
        Ok(())
    }

    fn choose_style(&mut self, code: u32, data: &[u8]) {
        if !data.is_empty() {
            self.refuse(code, option_reply::ERR_INVALID, "the option takes no data");
        } else if code == option::EXTENDED_HEADERS {
            self.chosen.style = Style::Extended;
            self.reply(code, option_reply::ACK, &[]);
        } else if self.chosen.style == Style::Extended {
            self.refuse(code, option_reply::ERR_EXT_HEADER_REQD, "extended headers are in use already");
        } else {
            self.chosen.style = Style::Structured;
            self.reply(code, option_reply::ACK, &[]);
        }
    }

    fn contexts(&mut self, code: u32, data: &[u8]) -> Result<()> {
        let set = code == option::SET_META_CONTEXT;
        if set {
            // A failed request also discards the contexts chosen before.
            self.chosen.contexts.clear();
            self.chosen.contexts_of = None;
        }
        if set && self.chosen.style == Style::Simple {
            let what = "metadata contexts need structured replies or extended headers first";
            self.refuse(code, option_reply::ERR_INVALID, what);
            return Ok(());
        }
        let request = match options::context_request(data) {
            Ok(request) => request,
            Err(Malformed(what)) => {
                self.refuse(code, option_reply::ERR_INVALID, what);
                return Ok(());
            }
        };
        let opened = match self.open(request.name) {
            Ok(opened) => opened,
            Err(error) => {
                self.refuse(code, option_reply::ERR_UNKNOWN, &error.to_string());
                return Ok(());
            }
        };
        let bases = if self.exports.shows_snapshots() { opened.device.dirty_bases() } else { Vec::new() };
        if set {
            let Some(contexts) = status::choose(&request, &*opened.device, &bases) else {
                self.refuse(code, option_reply::ERR_TOO_BIG, "too many metadata contexts");
                return Ok(());
            };
            for context in &contexts {
                self.reply(code, option_reply::META_CONTEXT, &context_fact(context.id, &context.name));
            }
            self.chosen.contexts = contexts;
            self.chosen.contexts_of = Some(opened.name);
        } else {
            for name in status::list(&request, &bases) {
                self.reply(code, option_reply::META_CONTEXT, &context_fact(0, &name));
                if self.out.len() > OPTION_BYTES_MAX {
                    self.push()?;
                }
            }
        }
        self.reply(code, option_reply::ACK, &[]);
        Ok(())
    }

    /// Opens an export, or returns the open device if it is still the same export.
    fn open(&mut self, name: &str) -> Result<Opened> {
        let default;
        let name = if name.is_empty() {
            default = default_export(self.names())?;
            &default
        } else {
            name
        };
        let permission = match &self.terms.rules {
            None => Permission::Write,
            Some(rules) => {
                let certificate = self.transport.peer_certificate();
                let Some(permission) = rules.now().of(certificate.as_ref()).permission(name) else {
                    tracing::debug!(export = name, "the client may not open the export");
                    self.opened = None;
                    return Err(access::absent(name));
                };
                permission
            }
        };
        // If the disk was renamed since it was opened, another disk may have the name now.
        if let Some(opened) = self.opened.as_ref().filter(|opened| opened.name == name && self.exports.still(name)) {
            return Ok(opened.clone());
        }
        // The previous device is closed first, so that a client that queries all exports does not keep them all open.
        self.opened = None;
        let read_only = self.terms.read_only || permission == Permission::Read;
        let limited = self.terms.rules.is_some() || !self.exports.shows_snapshots();
        let device = self.exports.open(name, read_only).map_err(|error| match error.kind() {
            ErrorKind::NotFound if limited => access::absent(name),
            ErrorKind::Busy if limited => {
                // The reason may be that the disk was renamed, and then names the disk and a client of it.
                tracing::debug!(export = name, "export refused: {error}");
                Error::new(ErrorKind::Busy, format!("export '{name}' cannot be opened now: try again later"))
            }
            _ => error,
        })?;
        Ok(self.opened.insert(Opened { name: name.to_owned(), device }).clone())
    }

    /// The exports that the client may open.
    fn names(&self) -> Vec<ExportName> {
        let mut names = self.exports.names();
        if let Some(rules) = &self.terms.rules {
            let (rules, certificate) = (rules.now(), self.transport.peer_certificate());
            let granted = rules.of(certificate.as_ref());
            names.retain(|export| granted.permission(&export.name).is_some());
        }
        names
    }

    fn features(&self, opened: &Opened) -> u16 {
        let chosen = &self.chosen;
        let mut flags = feature::HAS_FLAGS
            | feature::SEND_FLUSH
            | feature::SEND_FUA
            | feature::SEND_CACHE
            | feature::CAN_MULTI_CONN;
        if opened.device.read_only() {
            flags |= feature::READ_ONLY;
        } else {
            flags |= feature::SEND_TRIM | feature::SEND_WRITE_ZEROES | feature::SEND_FAST_ZERO;
            if self.terms.resize != ResizePolicy::Never {
                flags |= feature::SEND_RESIZE;
            }
        }
        if chosen.style != Style::Simple {
            flags |= feature::SEND_DF;
        }
        let has_contexts = !chosen.contexts.is_empty() && chosen.contexts_of.as_ref() == Some(&opened.name);
        if chosen.style == Style::Extended && has_contexts {
            flags |= feature::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }

    fn reply(&mut self, code: u32, kind: u32, data: &[u8]) {
        put_option_reply(&mut self.out, code, kind, data);
    }

    fn refuse(&mut self, code: u32, kind: u32, message: &str) {
        tracing::debug!(option = code, message, "option refused");
        self.reply(code, kind, protocol::clip_message(message, MESSAGE_BYTES_MAX).as_bytes());
    }

    /// Receives exactly `into.len()` bytes; false if the client closed the connection before the first of them.
    fn fill(&mut self, into: &mut [u8]) -> Result<bool> {
        let mut filled = 0;
        while filled < into.len() {
            match self.transport.receive(&mut [IoSliceMut::new(&mut into[filled..])], Wait::No) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(violation("the client closed the connection in the middle of its handshake")),
                Ok(bytes) => {
                    filled += bytes;
                    self.check_deadline()?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(true)?,
                Err(error) => return Err(Error::io("receiving from the client", error)),
            }
        }
        Ok(true)
    }

    /// Sends the content of `out`.
    fn push(&mut self) -> Result<()> {
        let out = std::mem::take(&mut self.out);
        let mut sent = 0;
        while sent < out.len() {
            match self.transport.send(&[IoSlice::new(&out[sent..])]) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(false)?,
                Err(error) => return Err(Error::io("sending to the client", error)),
            }
        }
        while !self.transport.flush().during(|| "sending to the client".to_owned())? {
            self.wait(false)?;
        }
        Ok(())
    }

    fn check_deadline(&self) -> Result<std::time::Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = self.terms.handshake_timeout.as_secs();
            return Err(violation(format!("the client did not finish its handshake within {seconds} seconds")));
        }
        Ok(left)
    }

    fn wait(&mut self, input: bool) -> Result<()> {
        let left = self.check_deadline()?;
        // TLS may have output to send while it waits for input.
        let output = !input || !self.transport.flush().during(|| "sending to the client".to_owned())?;
        wait_for(&*self.transport, input, output, Some(left)).during(|| "waiting for the client".to_owned())?;
        Ok(())
    }
}

fn fact_of(kind: u16, text: &[u8]) -> Vec<u8> {
    let mut fact = Vec::with_capacity(2 + text.len());
    fact.put_u16(kind);
    fact.extend_from_slice(text);
    fact
}

fn context_fact(id: u32, name: &str) -> Vec<u8> {
    let mut fact = Vec::with_capacity(4 + name.len());
    fact.put_u32(id);
    fact.extend_from_slice(name.as_bytes());
    fact
}

/// The only disk, if there is exactly one; its snapshots (`disk@snapshot`) do not count.
fn default_export(exports: Vec<ExportName>) -> Result<String> {
    let mut disks = exports.into_iter().map(|export| export.name).filter(|name| !name.contains('@'));
    match (disks.next(), disks.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(Error::new(ErrorKind::NotFound, "there is no disk to export; create one first")),
        (Some(_), Some(_)) => Err(Error::new(
            ErrorKind::NotFound,
            "there are several disks and the client named none; ask for one by name (LIST shows them)",
        )),
    }
}
