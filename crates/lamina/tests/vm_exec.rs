//! `lamina vm exec` in a real guest: exit codes of the program and of lamina, and long output.

#![allow(clippy::unwrap_used)]

use testkit::machines::Room;
use testkit::process::{Done, output};

/// Runs a line in the guest's shell.
fn shell(room: &Room, options: &str, line: &str) -> Done {
    output(room.store.command(&format!("vm exec web {options} -- /bin/sh -c")).arg(line)).into()
}

#[test]
fn exit_codes_and_output_of_a_program_are_told_from_those_of_lamina() {
    let room = Room::new();
    room.boot("web", "192M", "");
    for code in [0, 1, 2, 3, 4, 42, 123] {
        let done = shell(&room, "", &format!("echo out; echo err >&2; exit {code}"));
        assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (code, "out\n", "err\n"));
    }
    shell(&room, "", "kill -9 $$").fails(128 + 9, "was ended by signal 9");
    room.run("vm exec web -- /no/such/program").fails(127, "there is no such program");
    room.run("vm exec web -- /etc").fails(126, "the program did not start");
    room.run("vm exec web --timeout 1 -- /bin/sleep 30").fails(124, "it continues in the guest, as process ");
    room.run("vm exec web --timout 1 -- /bin/true").fails(125, "--timout");
    room.run("vm exec other -- /bin/true").fails(125, "there is no machine 'other'");

    let done = shell(&room, "--json", "echo out; exit 125");
    assert_eq!(done.code, 125);
    let value: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((&value["ended"], &value["exit_code"], &value["stdout"]), (&true.into(), &125.into(), &"out\n".into()));
    let done = room.run("vm exec web --json -- /no/such/program");
    let value: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(
        (done.code, &value["exit_code"], &value["problem"]),
        (127, &serde_json::Value::Null, &"not_found".into())
    );

    // More output than one line of the agent's protocol could have in earlier versions, and more than the agent keeps.
    let print = |bytes: u64| shell(&room, "", &format!("head -c {bytes} /dev/zero | tr '\\000' x"));
    let done = print(15 << 20);
    assert_eq!((done.code, done.stdout.len(), done.stderr.as_str()), (0, 15 << 20, ""));
    let done = print(30_000_000);
    assert!(done.stderr.contains("kept only the first 16 MiB of its standard output"), "{}", done.stderr);
    assert_eq!((done.code, done.stdout.len(), done.stdout.bytes().all(|byte| byte == b'x')), (125, 16 << 20, true));
    room.close();
}
