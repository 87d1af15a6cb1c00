//! Words that text and JSON share.

use control::{MachineReply, MachineVerb};
use vm::definition::Link;

/// What was done to each of several machines.
pub fn done(verb: &MachineVerb) -> &'static str {
    match verb {
        MachineVerb::Start { .. } => "started",
        MachineVerb::Stop { .. } => "stopped",
        MachineVerb::Pause { .. } => "paused",
        MachineVerb::Resume { .. } => "resumed",
        MachineVerb::Delete { .. } => "deleted",
        _ => "done",
    }
}

/// How quiet the guest was when a snapshot was taken, or for how long it stood still.
pub fn how_taken(reply: &MachineReply) -> String {
    match reply {
        MachineReply::SnapshotTaken { quiet: Some(quiet), .. } => quiet.clone(),
        MachineReply::SnapshotTaken { stun_ms, .. } => {
            format!("with memory; the guest was paused for {:.1} ms", stun_ms.unwrap_or(0.0))
        }
        _ => String::new(),
    }
}

/// What a network card is plugged into, as the command line writes it.
pub fn link(link: &Link) -> String {
    match link {
        Link::User => "user".into(),
        Link::None => "unplugged".into(),
        Link::Bridge(bridge) => format!("bridge={bridge}"),
    }
}
