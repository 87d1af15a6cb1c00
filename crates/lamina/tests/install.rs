//! `make install`: the systemd units start the program in the folder where it is installed.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use testkit::process::{self, files, tool};

#[test]
fn the_units_name_the_program_that_is_installed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    for prefix in ["/usr", "/usr/local", "/opt/lamina"] {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().to_str().unwrap();
        let variables = [
            format!("DESTDIR={destination}"),
            format!("PREFIX={prefix}"),
            format!("PROGRAM={}", process::program().display()),
        ];
        // Installs the program that the tests use, without building it again.
        let mut arguments = vec!["--silent", "-C", root.to_str().unwrap(), "--old-file=build"];
        arguments.extend(variables.iter().map(String::as_str));
        tool("make", &[&arguments[..], &["install"]].concat());
        let installed = |path: &str| folder.path().join(path.trim_start_matches('/'));
        let units = installed(&format!("{prefix}/lib/systemd/system"));
        assert_eq!(files(&units), ["lamina-machines@.service", "lamina@.service"]);
        for unit in files(&units) {
            let text = std::fs::read_to_string(units.join(&unit)).unwrap();
            let commands = text.lines().filter_map(|line| line.strip_prefix("Exec")?.split_once('='));
            let programs: Vec<&str> = commands.filter_map(|(_, command)| command.split(' ').next()).collect();
            assert!(!programs.is_empty(), "{unit}");
            for program in programs {
                assert!(installed(program).is_file(), "{unit} calls {program}, which is not there");
            }
        }
        assert!(installed(&format!("{prefix}/lib/lamina/qemu-reconnect")).is_file());
        let version = tool(installed(&format!("{prefix}/bin/lamina")).to_str().unwrap(), &["--version"]);
        assert!(version.starts_with("lamina "), "{version}");
        assert!(installed(&format!("{prefix}/share/man/man1/lamina-serve.1")).exists());
    }
}
