//! Runs the examples of README.md and of the manual: the `console` blocks of each page are executed in order in one
//! shell per page, and the output is compared with the output on the page.
//!
//! | on the page | what the test does |
//! |---|---|
//! | a block `console` | runs each line that begins with `$ `; compares the output if the page shows any |
//! | a line `...` of output | matches any number of lines |
//! | a block `console not-run: REASON` | runs nothing; prints the block with its reason |
//! | a block of another language | must not contain commands: text, xml, toml |
//! | a comment `<!-- test setup` ... `-->` | runs its lines, which prepare what the page needs, such as a disk |
//!
//! Each page has its own mount, process and network namespaces (`shell.rs`), so that the commands use the paths,
//! addresses and host names of the page unchanged. `comparison.rs` lists the differences that are allowed in output.

#![allow(clippy::unwrap_used)]

mod comparison;
mod page;
mod shell;

use page::{Block, Page};
use shell::Shell;
use std::path::{Path, PathBuf};

/// The only page that needs the Debian guest.
const DEBIAN: &str = "docs/manual/cloud-machines.md";
/// Most blocks of all pages that are not run. Increase this number only with a good reason.
const NOT_RUN_MAX: usize = 24;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

fn read(path: &str) -> Page {
    let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    Page::parse(path, &text)
}

/// Runs one page. All differences are printed, not only the first.
fn play(path: &str) {
    let page = read(path);
    assert!(page.complaints.is_empty(), "{}", page.complaints.join("\n"));
    if path == DEBIAN {
        testkit::machines::debian();
    }
    let mut shell = Shell::new(&root());
    let mut complaints = Vec::new();
    for block in &page.blocks {
        match block {
            Block::Setup { line, commands } => {
                let done = shell.run(commands, 0);
                assert_eq!(done.code, 0, "{path}:{line}: the setup fails: {}", done.output);
            }
            Block::Console { commands } => {
                for command in commands {
                    let done = shell.run(&command.text, command.output.len());
                    let place = format!("{path}:{}: $ {}", command.line, command.text);
                    let refused = command.output.iter().any(|line| line.starts_with("lamina: "));
                    if (done.code != 0) != refused {
                        complaints.push(format!("{place}\nexit code {}:\n{}", done.code, done.output));
                    } else if let Err(difference) = comparison::compare(&command.output, &done.output) {
                        complaints.push(format!("{place}\n{difference}"));
                    }
                }
            }
            Block::NotRun { .. } => {}
        }
    }
    assert!(complaints.is_empty(), "{} commands differ:\n\n{}", complaints.len(), complaints.join("\n\n"));
}

macro_rules! pages {
    ($($name:ident: $path:literal),* $(,)?) => {
        const PAGES: &[&str] = &[$($path),*];
        $(
            #[test]
            fn $name() {
                play($path);
            }
        )*
    };
}

pages! {
    readme: "README.md",
    manual: "docs/manual/README.md",
    backups: "docs/manual/backups.md",
    clients: "docs/manual/clients.md",
    clones: "docs/manual/clones.md",
    cloud_machines: "docs/manual/cloud-machines.md",
    datastore: "docs/manual/datastore.md",
    disks: "docs/manual/disks.md",
    file_systems: "docs/manual/file-systems.md",
    images: "docs/manual/images.md",
    jobs: "docs/manual/jobs.md",
    measuring: "docs/manual/measuring.md",
    moving_from_vmware: "docs/manual/moving-from-vmware.md",
    remote_clones: "docs/manual/remote-clones.md",
    scrub: "docs/manual/scrub.md",
    serving: "docs/manual/serving.md",
    snapshots: "docs/manual/snapshots.md",
    troubleshooting: "docs/manual/troubleshooting.md",
    virtual_machines: "docs/manual/virtual-machines.md",
    windows: "docs/manual/windows.md",
}

#[test]
fn every_page_of_the_manual_is_run() {
    for entry in std::fs::read_dir(root().join("docs/manual")).unwrap() {
        let path = format!("docs/manual/{}", entry.unwrap().file_name().to_string_lossy());
        assert!(PAGES.contains(&path.as_str()), "{path} is not in the list of this test");
    }
}

#[test]
fn every_block_that_is_not_run_states_a_reason() {
    let (mut run, mut not_run) = (0, Vec::new());
    for path in PAGES {
        let page = read(path);
        assert!(page.complaints.is_empty(), "{}", page.complaints.join("\n"));
        for block in &page.blocks {
            match block {
                Block::Console { commands } => run += commands.len(),
                Block::NotRun { line, reason } => not_run.push(format!("{path}:{line}: {reason}")),
                Block::Setup { .. } => {}
            }
        }
    }
    println!("{run} commands are run; blocks that are not:\n{}", not_run.join("\n"));
    assert!(run > 0 && not_run.len() <= NOT_RUN_MAX, "{} blocks are not run:\n{}", not_run.len(), not_run.join("\n"));
}
