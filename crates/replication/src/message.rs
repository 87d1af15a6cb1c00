//! Messages other than data: one JSON object in a frame.
//!
//! | from | message | meaning, and its reply |
//! |---|---|---|
//! | sender | `hello` | protocol versions that the sender supports; answered by `welcome` with the version to use |
//! | sender | `offer` | disks and an attachment; answered by `accept` or `already` |
//! | sender | `join` | adds this connection to a session as a data connection; answered by `joined` |
//! | sender | `ping` | queries the state; answered by `pong` |
//! | sender | `finish` | everything was sent: segments and bytes of each disk; answered by `committed` |
//! | receiver | `working` | keep-alive before a reply; any number of times |
//! | receiver | `failure` | error instead of a reply: kind and text; the session ends |

use crate::limits::{PROGRAM_MAX, STREAMS_MAX};
use disk::transfer::{DISKS_MAX, NewArrival};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Protocol versions that this program supports, the newest first.
pub const VERSIONS: [u32; 1] = [1];

/// The contents of an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The disks.
    pub disks: Vec<NewArrival>,
    /// An attachment: the definition of a machine.
    pub attachment: Option<String>,
    /// Whether only to resume an earlier transfer; if there is none, the reply is the failure `not_found`.
    pub resume_only: bool,
}

/// The state of a disk at the receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// The snapshot from which differences can be computed.
    pub base: Option<String>,
    /// Segments that were received, as sorted ranges that are not adjacent: the first segment, and the first segment
    /// after the range.
    pub done: Vec<(u64, u64)>,
    /// Bytes of data in the segments of `done`.
    pub bytes: u64,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// The first message.
    Hello {
        /// Protocol versions that the sender supports.
        versions: Vec<u32>,
        /// Program and version, for display.
        program: String,
    },
    /// Reply to `hello`.
    Welcome {
        /// The version to use from now on.
        version: u32,
        /// Program and version, for display.
        program: String,
    },
    /// Offers disks.
    Offer(Offer),
    /// Accepts the offer.
    Accept {
        /// Identity of the session, for data connections.
        session: String,
        /// Token that proves that a data connection belongs to the session.
        token: String,
        /// The state of each disk at the receiver.
        disks: Vec<Known>,
    },
    /// All offered disks were received before.
    Already {
        /// The names of the disks.
        disks: Vec<String>,
    },
    /// Adds a data connection to a session.
    Join {
        /// The session.
        session: String,
        /// The token from the `accept` message.
        token: String,
    },
    /// Reply to `join`: data may be sent.
    Joined,
    /// Requests the state of the session.
    Ping,
    /// The state of the session.
    Pong {
        /// Bytes of data received in this session.
        bytes: u64,
    },
    /// Keep-alive: the reply takes time.
    Working,
    /// Everything was sent.
    Finish {
        /// Segments and bytes of data of each disk, including those of earlier sessions.
        disks: Vec<(u64, u64)>,
    },
    /// The disks are complete.
    Committed {
        /// The names of the disks.
        disks: Vec<String>,
    },
    /// The session has failed.
    Failure {
        /// Kind of the error.
        kind: String,
        /// Text of the error.
        message: String,
    },
}

/// Longest error text of a peer that is printed.
const SENTENCE_MAX: usize = 2000;

fn plain(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

impl Message {
    /// The message that carries an error.
    pub fn failure(error: &Error) -> Self {
        Self::Failure { kind: error.kind().name().into(), message: plain(&error.to_string(), SENTENCE_MAX) }
    }

    /// The error in a `failure`. For any other message, an error that the message was unexpected.
    pub fn into_error(self) -> Error {
        match self {
            Self::Failure { kind, message } => Error::new(ErrorKind::from_name(&kind), plain(&message, SENTENCE_MAX)),
            other => Error::new(ErrorKind::Corrupt, format!("the peer sent '{}' out of order", other.name())),
        }
    }

    /// The message's name, for error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Welcome { .. } => "welcome",
            Self::Offer(_) => "offer",
            Self::Accept { .. } => "accept",
            Self::Already { .. } => "already",
            Self::Join { .. } => "join",
            Self::Joined => "joined",
            Self::Ping => "ping",
            Self::Pong { .. } => "pong",
            Self::Working => "working",
            Self::Finish { .. } => "finish",
            Self::Committed { .. } => "committed",
            Self::Failure { .. } => "failure",
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("a message cannot be encoded: {error}")))
    }

    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let refuse = |what: String| Error::new(ErrorKind::Corrupt, format!("the peer sent a message that {what}"));
        let message: Self =
            serde_json::from_slice(bytes).map_err(|error| refuse(format!("cannot be parsed: {error}")))?;
        let disks = match &message {
            Self::Hello { versions, program } => {
                let fits = !versions.is_empty() && versions.len() <= STREAMS_MAX && program.len() <= PROGRAM_MAX;
                if !fits {
                    return Err(refuse("does not name its sender".into()));
                }
                1
            }
            Self::Offer(offer) => offer.disks.len(),
            Self::Accept { disks, .. } => {
                let ordered = |known: &Known| {
                    let mut last = None;
                    known.done.iter().all(|(from, to)| {
                        let fits = from < to && last.is_none_or(|last| last < *from);
                        last = Some(*to);
                        fits
                    })
                };
                if !disks.iter().all(ordered) {
                    return Err(refuse("lists segments out of order".into()));
                }
                disks.len()
            }
            Self::Finish { disks } => disks.len(),
            Self::Already { disks } | Self::Committed { disks } => disks.len(),
            _ => 1,
        };
        match (1..=DISKS_MAX).contains(&disks) {
            true => Ok(message),
            false => Err(refuse(format!("names {disks} disks"))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn messages_are_decoded_as_encoded_and_invalid_ones_refused() {
        let known = |done: &[(u64, u64)]| Known { base: None, done: done.to_vec(), bytes: 1 };
        let accept =
            |done: &[(u64, u64)]| Message::Accept { session: "s".into(), token: "t".into(), disks: vec![known(done)] };
        for message in [
            Message::Hello { versions: vec![1, 2], program: "lamina".into() },
            accept(&[(0, 1), (2, 3)]),
            Message::Joined,
            Message::Pong { bytes: 7 },
            Message::Finish { disks: vec![(1, 2)] },
        ] {
            assert_eq!(Message::decode(&message.encode().unwrap()).unwrap(), message);
        }
        for bad in [
            Message::Hello { versions: vec![], program: String::new() },
            accept(&[(1, 1)]),
            accept(&[(2, 3), (0, 1)]),
            Message::Finish { disks: vec![] },
            Message::Finish { disks: vec![(0, 0); DISKS_MAX + 1] },
        ] {
            assert!(Message::decode(&bad.encode().unwrap()).is_err(), "{bad:?}");
        }
        assert!(Message::decode(b"{\"ping\":1}").is_err());
        assert!(Message::decode(b"\"pingpong\"").is_err());
    }

    #[test]
    fn errors_are_encoded_and_decoded() {
        let error = Error::new(ErrorKind::NoSpace, "no room\nfor it");
        let there = Message::failure(&error).into_error();
        assert_eq!((there.kind(), there.to_string().as_str()), (ErrorKind::NoSpace, "no roomfor it"));
        assert_eq!(Message::Ping.into_error().kind(), ErrorKind::Corrupt);
    }
}
