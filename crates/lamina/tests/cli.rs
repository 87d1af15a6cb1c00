//! Properties that all commands share, tested for each command. The tests need no datastore.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::File;
use testkit::process;
use testkit::process::{Done, Store, files, lamina, run};

/// A command as a user types it, with valid arguments.
struct Verb {
    name: &'static str,
    arguments: &'static str,
    /// Whether the command needs an existing datastore.
    on_datastore: bool,
    /// Whether the command has mandatory arguments.
    demands: bool,
}

const fn verb(name: &'static str, arguments: &'static str) -> Verb {
    Verb { name, arguments, on_datastore: true, demands: !arguments.is_empty() }
}

const VERBS: [Verb; 97] = [
    Verb { name: "init", arguments: "/nowhere/at/all", on_datastore: false, demands: true },
    verb("status", ""),
    verb("check", ""),
    verb("scrub start", ""),
    verb("scrub status", ""),
    verb("scrub cancel", ""),
    Verb { name: "salvage", arguments: "/nowhere --list", on_datastore: false, demands: true },
    verb("disk create", "vm1 10G"),
    verb("disk list", ""),
    verb("disk show", "vm1"),
    verb("disk resize", "vm1 20G"),
    verb("disk rename", "vm1 vm2"),
    verb("disk delete", "vm1"),
    verb("disk detach", "vm1"),
    verb("disk stats", "vm1"),
    verb("disk tune", "vm1 --levels-max 8"),
    verb("disk edit", "vm1 --on-full wait"),
    verb("disk defaults", ""),
    verb("label list", ""),
    verb("label limit", "tenant=a --quota 1G"),
    verb("disk inflate", "vm1"),
    verb("disk reopen", "vm1"),
    verb("disk punchzero", "vm1"),
    verb("disk wipe", "vm1"),
    verb("disk shrink", "vm1"),
    verb("disk optimize", "vm1 --compression zstd:9 --dedup datastore"),
    verb("disk consolidate", "vm1"),
    verb("disk reclaim", "vm1"),
    verb("disk migrate", "vm1 --format thin"),
    verb("disk import", "/nowhere/vm1.vmdk vm1"),
    // Missing certificates are reported before a missing datastore.
    Verb { name: "disk send", arguments: "vm1 lamina://nowhere.invalid:1/vm1", on_datastore: false, demands: true },
    verb("receive list", ""),
    verb("receive delete", "00000000-0000-4000-8000-000000000000"),
    verb("backup create", "vm1@a /nowhere/backups"),
    Verb { name: "backup key", arguments: "/nowhere/key", on_datastore: false, demands: true },
    Verb { name: "backup list", arguments: "/nowhere/backups", on_datastore: false, demands: true },
    Verb { name: "backup verify", arguments: "/nowhere/backups", on_datastore: false, demands: true },
    verb("backup restore", "/nowhere/backups vm1"),
    Verb { name: "backup delete", arguments: "/nowhere/backups vm1@a", on_datastore: false, demands: true },
    Verb { name: "backup prune", arguments: "/nowhere/backups --keep last=1", on_datastore: false, demands: true },
    verb("snapshot create", "vm1@a vm2@a"),
    verb("snapshot list", ""),
    verb("snapshot show", "vm1@a"),
    verb("snapshot delete", "vm1@a"),
    verb("snapshot revert", "vm1@a"),
    verb("snapshot diff", "vm1@a vm1@b"),
    verb("clone", "vm1@a vm2"),
    verb("vm create", "vm1 --disk-size 1G"),
    verb("vm import", "/nowhere/vm1.vmx"),
    verb("vm export", "vm1 /nowhere/vm1.ova"),
    verb("vm edit", "vm1 --cpus 2"),
    verb("vm rename", "vm1 vm2"),
    verb("vm list", ""),
    verb("vm show", "vm1"),
    verb("vm start", "vm1"),
    verb("vm stop", "vm1"),
    verb("vm pause", "vm1"),
    verb("vm resume", "vm1"),
    verb("vm delete", "vm1"),
    verb("vm clone", "vm1 vm2"),
    verb("vm freeze", "vm1"),
    verb("vm console", "vm1"),
    verb("vm exec", "vm1 -- true"),
    verb("vm screenshot", "vm1 /nowhere/vm1.png"),
    verb("vm send-key", "vm1 ret"),
    verb("vm type", "vm1 text"),
    verb("vm revert", "vm1@a"),
    verb("vm snapshot create", "vm1@a"),
    verb("vm snapshot list", "vm1"),
    verb("vm snapshot delete", "vm1@a"),
    verb("vm backup create", "vm1 /nowhere/backups"),
    verb("vm backup restore", "/nowhere/backups vm1"),
    verb("serve", ""),
    Verb { name: "convert", arguments: "a.raw b.vmdk -d thin", on_datastore: false, demands: true },
    Verb { name: "image show", arguments: "a.vmdk", on_datastore: false, demands: true },
    Verb { name: "image check", arguments: "a.vmdk", on_datastore: false, demands: true },
    Verb { name: "image create", arguments: "/nowhere/a.vmdk 1G", on_datastore: false, demands: true },
    verb("export list", ""),
    verb("job list", ""),
    verb("job show", "0-1"),
    verb("job wait", "0-1"),
    verb("job cancel", "0-1"),
    verb("events", ""),
    Verb { name: "completion", arguments: "bash", on_datastore: false, demands: true },
    Verb { name: "man", arguments: "/nowhere/at/all", on_datastore: false, demands: true },
    // For groups of commands, a verb is mandatory.
    Verb { name: "scrub", arguments: "status", on_datastore: false, demands: true },
    Verb { name: "disk", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "snapshot", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "image", arguments: "show a.vmdk", on_datastore: false, demands: true },
    Verb { name: "export", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "receive", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "backup", arguments: "list /nowhere/backups", on_datastore: false, demands: true },
    Verb { name: "job", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "label", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "vm", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "vm snapshot", arguments: "list", on_datastore: false, demands: true },
    Verb { name: "vm backup", arguments: "create", on_datastore: false, demands: true },
];

/// The exit code of a failure. For `vm exec`, the other codes belong to the program in the guest.
fn failure(verb: &str, code: i32) -> i32 {
    if verb == "vm exec" { 125 } else { code }
}

/// Verbs that accept any number of names.
const SEVERAL: [&str; 9] = [
    "backup verify",
    "backup delete",
    "snapshot create",
    "vm start",
    "vm stop",
    "vm pause",
    "vm resume",
    "vm delete",
    "vm send-key",
];

#[test]
fn the_list_of_verbs_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    run(&format!("man {}", folder.path().display())).ok();
    let pages: BTreeSet<String> = files(folder.path()).into_iter().collect();
    let expected: BTreeSet<String> =
        VERBS.iter().map(|v| format!("lamina-{}.1", v.name.replace(' ', "-"))).chain(["lamina.1".into()]).collect();
    assert_eq!(pages, expected);
}

#[test]
fn help_is_printed_to_stdout_with_exit_code_0() {
    for Verb { name, .. } in &VERBS {
        for option in ["--help", "-h"] {
            let text = run(&format!("{name} {option}")).ok();
            assert!(text.contains(&format!("Usage: lamina {name}")), "{name}: {text}");
            // Subcommands of `lamina image` take paths and need no datastore.
            let datastore = text.contains("--datastore") || name.starts_with("image ");
            assert!(text.contains("--json") && datastore, "{name}: {text}");
        }
    }
    assert!(run("--help").ok().contains("Exit codes:"));
    assert_eq!(run("--version").ok(), format!("lamina {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn bad_options_and_surplus_arguments_are_usage_errors() {
    // The arguments after `vm exec` belong to the command in the guest.
    for Verb { name, arguments, .. } in VERBS.iter().filter(|verb| verb.name != "vm exec") {
        run(&format!("{name} {arguments} --no-such-option")).fails(2, "--no-such-option");
        if !SEVERAL.contains(name) {
            run(&format!("{name} {arguments} x y z")).fails(2, "--help");
        }
    }
    run("defragment").fails(2, "defragment");
    assert_eq!(run("").code, 2);
}

#[test]
fn missing_arguments_are_usage_errors() {
    for Verb { name, .. } in VERBS.iter().filter(|v| v.demands) {
        let done = run(name);
        assert_eq!((done.code, done.stdout.as_str()), (failure(name, 2), ""), "{name}: {done:?}");
    }
}

#[test]
fn the_option_of_version_0_1_0_names_the_datastore_before_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let run = |words: &[&str]| -> Done { lamina().args(words).output().unwrap().into() };
    let path = store.to_str().unwrap();
    run(&["init", path]).ok();
    run(&["-d", path, "disk", "create", "a", "1M"]).ok();
    // Behind this command it is the format.
    run(&["-d", path, "disk", "migrate", "a", "-d", "qcow9"]).fails(2, "qcow9");
    assert!(run(&["-d", path, "disk", "list"]).ok().contains('a'));
}

#[test]
fn no_datastore_named_is_a_usage_error() {
    for Verb { name, arguments, .. } in VERBS.iter().filter(|v| v.on_datastore) {
        run(&format!("{name} {arguments}")).fails(failure(name, 2), "LAMINA_DATASTORE");
        let done: Done = lamina()
            .args(name.split(' ').chain(arguments.split_whitespace()))
            .env("LAMINA_DATASTORE", "")
            .output()
            .unwrap()
            .into();
        assert_eq!(done.code, failure(name, 2), "{name}: an empty variable names no datastore: {done:?}");
    }
}

#[test]
fn a_missing_datastore_is_not_found() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let file = folder.path().join("file");
    std::fs::write(&file, "not a datastore").unwrap();
    for Verb { name, arguments, .. } in VERBS.iter().filter(|v| v.on_datastore) {
        for path in [&missing, &file] {
            let path = path.display();
            for form in ["", "--json"] {
                run(&format!("{name} --datastore {path} {form} {arguments}"))
                    .fails(failure(name, 3), &path.to_string());
            }
            let by_variable: Done = lamina()
                .args(name.split(' ').chain(arguments.split_whitespace()))
                .env("LAMINA_DATASTORE", path.to_string())
                .output()
                .unwrap()
                .into();
            by_variable.fails(failure(name, 3), &path.to_string());
        }
    }
    assert_eq!(files(folder.path()), ["file"], "nothing was made");
}

#[test]
fn an_unknown_scheme_is_a_usage_error_and_a_folder_with_a_colon_is_written_with_its_path() {
    let told = "a location is the path of a folder";
    for Verb { name, arguments, .. } in VERBS.iter().filter(|v| v.on_datastore) {
        run(&format!("{name} --datastore rados:a/b {arguments}")).fails(failure(name, 2), told);
    }
    for command in [
        "init rados:a/b",
        "serve rados:a/b",
        "salvage rados:a/b --list",
        "salvage /nowhere --disk a --to rados:a/b",
        "disk migrate a -d native --to rados:a/b --datastore /nowhere",
    ] {
        run(command).fails(2, told);
    }
    let folder = tempfile::tempdir().unwrap();
    let done = |arguments: &[&str]| Done::from(lamina().current_dir(folder.path()).args(arguments).output().unwrap());
    let made = done(&["init", "./rados:a", "--journal-size", "4M"]).ok();
    assert!(made.starts_with("made datastore ./rados:a\n"), "{made}");
    done(&["init", "rados:b", "--journal-size", "4M"]).fails(2, "'./rados:b'");
    done(&["--datastore", "./rados:a", "disk", "create", "a", "1M"]).ok();
    done(&["--datastore", folder.path().join("rados:a").to_str().unwrap(), "disk", "show", "a"]).ok();
}

#[test]
fn bad_sizes_are_usage_errors() {
    for size in ["10X", "-1", "1.5", "ten", "10GB", "99999999999999999999", "0x10", "1e9", "16E"] {
        for command in ["disk create vm1", "disk create vm1 --size", "disk resize vm1"] {
            run(&format!("{command} {size} -D /nowhere")).fails(2, "");
        }
        for option in ["--metadata-cache", "--write-buffer"] {
            run(&format!("serve /nowhere {option}={size}")).fails(2, size);
        }
        run(&format!("init /nowhere/at/all --journal-size={size}")).fails(2, size);
    }
    run("disk create vm1 10G --size 10G -D /nowhere").fails(2, "--size");
    run("disk create vm1 -D /nowhere").fails(2, "SIZE");
}

#[test]
fn a_server_with_too_little_memory_is_refused() {
    for (option, sizes, least) in [
        ("--write-buffer", ["0", "1", "1048575"], "the least is 1 MiB"),
        ("--metadata-cache", ["0", "1", "255K"], "the least is 256 KiB"),
    ] {
        for size in sizes {
            let words = format!("invalid value '{size}' for '{option} <SIZE>': {least}");
            run(&format!("serve /nowhere {option} {size}")).fails(2, &words);
        }
    }
}

#[test]
fn bad_names_are_usage_errors() {
    for name in ["a/b", "vm@", "@a", "a@b@c", "../x", "a@b/c"] {
        for command in ["disk show", "disk delete", "disk detach", "snapshot list", "snapshot show", "snapshot diff"] {
            run(&format!("{command} {name} -D /nowhere")).fails(2, name);
        }
    }
    run("snapshot show vm1 -D /nowhere").fails(2, "DISK@SNAPSHOT");
    run("snapshot create vm1@a vm2 -D /nowhere").fails(2, "DISK@SNAPSHOT");
    run("snapshot diff vm1@a vm2@b -D /nowhere").fails(2, "different disks");
    run("clone vm1 vm2@a -D /nowhere").fails(2, "vm2@a");
    let empty: Done = process::output(lamina().args(["disk", "show", "", "-D", "/nowhere"])).into();
    empty.fails(2, "empty");
    let control: Done = process::output(lamina().args(["disk", "show", "a\nb", "-D", "/nowhere"])).into();
    control.fails(2, "name");
}

#[test]
fn bad_choices_are_usage_errors() {
    for arguments in [
        "disk create vm1 1G --provisioning thick",
        "serve --io mmap",
        "serve --queue aio",
        "serve --tcp nowhere",
        "serve --tcp 127.0.0.1",
        "serve --insecure-tcp",
        "serve --tls-cert a.pem",
        "serve --tls-key a.pem",
        "serve --tls-client-ca a.pem",
        "serve --max-unix-connections 0",
        "serve --max-authenticated-connections 16385",
        "serve --max-unauthenticated-connections many",
        "serve --access rules",
        "serve --tcp 127.0.0.1:0 --access rules",
        "serve --socket-mode 999",
        "serve --socket-mode 1000",
        "clone a b --count 0",
        "clone a b --count 100001",
        "clone a --name-pattern nothing",
        "clone a --name-pattern %d%d",
        "clone a b --name-pattern %d",
        "clone a",
        "completion tcsh",
        "status --log a=b=c",
    ] {
        run(&format!("{arguments} -D /nowhere")).fails(2, "");
    }
}

#[test]
fn completions_for_every_shell_know_every_verb() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&format!("completion {shell}")).ok();
        assert!(script.contains("LAMINA_COMPLETE") && script.contains("lamina"), "{shell}: {script}");
    }
    let completion = Completion::new();
    for verb in VERBS {
        let (before, last) = verb.name.rsplit_once(' ').unwrap_or(("", verb.name));
        assert!(completion.of(&format!("{before} {last}")).contains(&last.to_owned()), "{}", verb.name);
    }
    assert_eq!(completion.of("disk re"), ["resize", "rename", "reopen", "reclaim"]);
    assert_eq!(completion.of("disk create vm1 1G --prov"), ["--provisioning"]);
    assert_eq!(completion.of("disk create vm1 1G --provisioning e"), ["eagerzeroedthick"]);
}

/// The bash completion of this program.
struct Completion {
    folder: tempfile::TempDir,
}

impl Completion {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("script"), run("completion bash").ok()).unwrap();
        // The completion script calls the program by the name `lamina`.
        std::os::unix::fs::symlink(process::program(), folder.path().join("lamina")).unwrap();
        Self { folder }
    }

    /// The words to which the last word of a command line can be completed.
    fn of(&self, line: &str) -> Vec<String> {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let last = if line.ends_with(' ') { "" } else { words.last().unwrap_or(&"") };
        let count = words.len() + usize::from(line.ends_with(' '));
        let check = format!(
            "source script; COMP_WORDS=(lamina {line} {}); COMP_CWORD={count}; _clap_complete_lamina lamina '{last}' x; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            if line.ends_with(' ') { "''" } else { "" }
        );
        let path = format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        let mut command = std::process::Command::new("bash");
        command.args(["-c", &check]).current_dir(self.folder.path()).env("PATH", path);
        let done: Done = process::output(&mut command).into();
        done.ok().lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }
}

#[test]
fn names_of_disks_snapshots_machines_and_jobs_are_completed() {
    let store = Store::new();
    let completion = Completion::new();
    let datastore = store.path();
    let datastore = datastore.display();
    store.run("disk create web-root 1M").ok();
    store.run("disk create web-data 1M").ok();
    store.run("disk create other 1M").ok();
    store.run("snapshot create web-root@monday").ok();
    // A completion does not open the datastore.
    assert!(completion.of(&format!("-D {datastore} disk show we")).is_empty());
    let _server = store.serve("");
    store.run("vm create web --memory 32M --network none").ok();
    store.run("vm snapshot create web@before").ok();
    let of = |line: &str| completion.of(&format!("-D {datastore} {line}"));
    assert_eq!(of("disk show we"), ["web-data", "web-root"]);
    assert_eq!(completion.of(&format!("disk delete --datastore {datastore} o")), ["other"]);
    assert_eq!(of("snapshot revert web"), ["web-root@monday"]);
    assert_eq!(of("snapshot revert web-root@m"), ["web-root@monday"]);
    assert_eq!(of("snapshot create o"), ["other@"]);
    assert_eq!(of("clone web-root"), ["web-root", "web-root@monday"]);
    assert_eq!(of("vm start w"), ["web"]);
    assert_eq!(of("vm revert w"), ["web@before"]);
    assert_eq!(of("vm clone w"), ["web", "web@before"]);
    assert!(of("disk create we").is_empty() && of("disk show x").is_empty());
    assert!(completion.of("-D /nowhere disk show x").is_empty());
    let copying = store.run("clone other copy --full --background --json").json();
    let job = copying["id"].as_str().unwrap();
    assert!(of("job wait ").iter().any(|word| word == job), "{job}");
    assert_eq!(of("backup create web-root@"), ["web-root@monday"]);
}

#[test]
fn labels_backups_networks_and_addresses_of_cards_are_completed() {
    let store = Store::new();
    let completion = Completion::new();
    let folder = tempfile::tempdir().unwrap();
    let repository = folder.path().join("backups");
    let repository = repository.display();
    let _server = store.serve("");
    let datastore = store.path();
    let of = |line: &str| {
        let mut words = completion.of(&format!("-D {} {line}", datastore.display()));
        words.sort();
        words
    };
    store.run("disk create web 1M --label tenant=a --label tier=gold").ok();
    store.run("disk create data 1M --label tenant=a").ok();
    assert_eq!(of("disk list --label te"), ["tenant", "tenant=a"]);
    assert_eq!(of("label limit ti"), ["tier=gold"]);
    assert_eq!(of("disk create new 1M --label ti"), ["tier=gold"]);
    assert_eq!(of("disk edit web --remove-label te"), ["tenant"]);

    store.run("snapshot create web@monday").ok();
    let id = store.run(&format!("backup create web@monday {repository} --json")).json()["id"].clone();
    let id = id.as_str().unwrap();
    assert_eq!(of(&format!("backup delete {repository} we")), ["web", "web@monday"]);
    assert_eq!(of(&format!("backup verify {repository} {}", &id[..8])), [id]);
    assert_eq!(of(&format!("backup restore {repository} new --backup web@")), ["web@monday"]);
    assert!(of("backup delete /nowhere we").is_empty());

    store.run("vm create vm --memory 32M --network unplugged").ok();
    let address = store.run("vm show vm --json").json()["networks"][0]["mac"].clone();
    let address = address.as_str().unwrap();
    assert_eq!(of(&format!("vm edit vm --remove-network {}", &address[..2])), [address]);
    assert_eq!(of("vm edit vm --add-network user"), ["user", "user,forward="]);
    assert_eq!(of("vm edit vm --add-network user,"), ["user,forward="]);
    assert!(of("vm edit vm --add-network no").is_empty());
    assert_eq!(of("vm create new --network no"), ["none"]);
}

#[test]
fn errors_are_json_with_json_and_d_is_the_format() {
    for (arguments, code, kind, words) in [
        ("disk show vm1 --json -D /nowhere", 3, "not_found", "/nowhere"),
        ("disk show --json", 2, "usage", "NAME"),
        ("disk show vm1 --json --wrong", 2, "usage", "--wrong"),
        ("status --json", 2, "usage", "which datastore?"),
    ] {
        let done = run(arguments);
        assert_eq!((done.code, done.stdout.as_str()), (code, ""), "{done:?}");
        let error: serde_json::Value = serde_json::from_str(&done.stderr).unwrap();
        assert_eq!(
            (error["error"]["kind"].as_str(), error["error"]["exit_code"].as_i64()),
            (Some(kind), Some(code.into()))
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    }
    run("status -d /nowhere").fails(2, "'-d'");
}

#[test]
fn man_pages_are_well_formed_and_name_their_options() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("new/man1");
    let listed = run(&format!("man {} --json", directory.display())).json();
    assert_eq!(listed["pages"].as_array().unwrap().len(), files(&directory).len());
    for page in files(&directory) {
        let text = std::fs::read_to_string(directory.join(&page)).unwrap();
        assert!(text.contains(".TH ") && text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{page}");
        assert!(text.contains("json"), "{page} describes the options that every command has");
    }
    let page = std::fs::read_to_string(directory.join("lamina-disk-create.1")).unwrap();
    assert!(page.contains("provisioning") && page.contains("eagerzeroedthick"));
    assert!(std::fs::read_to_string(directory.join("lamina.1")).unwrap().contains("130"), "exit codes");
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_ne!(run(&format!("man {}/sub", file.display())).code, 0);
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_no_panic() {
    for arguments in ["--help", "completion bash", "disk --help"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let done: Done = lamina().args(arguments.split(' ')).stdout(full).output().unwrap().into();
        assert_ne!(done.code, 0, "{arguments}");
        assert!(!done.stderr.contains("panicked"), "{done:?}");
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let done: Done = lamina().args(["completion", "bash"]).stdout(writer).output().unwrap().into();
    assert_eq!((done.code, done.stderr.as_str()), (130, ""), "a reader that has closed the pipe causes no error");
}
