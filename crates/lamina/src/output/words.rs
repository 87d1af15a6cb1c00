//! Words that text and JSON output share.

use control::{MachineReply, MachineVerb};
use vm::definition::Link;

/// What was done to several machines, as a participle.
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

/// Consistency of a snapshot, or how long the guest was paused for it.
pub fn how_taken(reply: &MachineReply) -> String {
    match reply {
        MachineReply::SnapshotTaken { quiet: Some(quiet), .. } => quiet.clone(),
        MachineReply::SnapshotTaken { stun_ms, .. } => {
            format!("with memory; the guest was paused for {:.1} ms", stun_ms.unwrap_or(0.0))
        }
        _ => String::new(),
    }
}

/// The network of a card, as on the command line.
pub fn link(link: &Link) -> String {
    match link {
        Link::User => "user".into(),
        Link::None => "unplugged".into(),
        Link::Bridge(bridge) => format!("bridge={bridge}"),
    }
}
