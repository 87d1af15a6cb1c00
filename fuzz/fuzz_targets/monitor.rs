//! Arbitrary messages from QEMU or a guest agent: they are refused or decoded, without a panic, a hang or unbounded
//! memory.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use vm::agent::Agent;
use vm::instant::state;
use vm::qmp::Client;

const PATIENCE: Duration = Duration::from_secs(5);

fuzz_target!(|data: &[u8]| {
    let Some((role, said)) = data.split_first() else { return };
    let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
    theirs.write_all(said).expect("the input fits into the socket's buffer");
    theirs.shutdown(Shutdown::Write).expect("the socket is open");
    let mut client = Client::over(ours, Path::new("peer"), PATIENCE).expect("the socket is open");
    match role % 3 {
        0 => {
            if client.greet().is_ok() {
                let _ = client.execute("query-status", serde_json::json!({}));
                let _ = client.wait_event(&["MIGRATION"], PATIENCE);
                let _ = client.execute("cont", serde_json::json!({}));
            }
        }
        1 => {
            if let Ok(Some(mut agent)) = Agent::over(client, PATIENCE) {
                let _ = agent.execute("/bin/true", &[], b"", PATIENCE);
                let _ = agent.interfaces();
                let _ = agent.freeze().and_then(|frozen| frozen.thaw());
            }
        }
        _ => {
            let (began, devices) = said.split_at(said.len() / 2);
            if let Some(joined) = state::joined(began, devices) {
                assert_eq!(state::joined(&joined, devices).as_ref(), Some(&joined));
            }
        }
    }
});
