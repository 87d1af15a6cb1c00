//! `lamina clone`.

use crate::cli::address::{CLONES_MAX, NamePattern, StateAddress, parse_disk};
use clap::Args;
use control::Request;

/// `lamina clone`.
#[derive(Debug, Args)]
pub struct CloneArguments {
    /// State to clone: DISK@SNAPSHOT, or DISK for its current state.
    #[arg(value_name = "SOURCE")]
    pub source: StateAddress,
    /// Name of the clone; with --count the prefix of the names (NAME-0001, ...).
    #[arg(value_parser = parse_disk, required_unless_present = "name_pattern")]
    pub name: Option<String>,
    /// Copy the allocated data, so that the clone is independent of the source.
    #[arg(long)]
    pub full: bool,
    /// Number of clones: all of them are made, or none.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(CLONES_MAX)))]
    pub count: Option<u32>,
    /// Names of the clones, numbered from 1, such as 'vm-%04d'.
    #[arg(long, value_name = "PATTERN", conflicts_with = "name")]
    pub name_pattern: Option<NamePattern>,
}

impl CloneArguments {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let names = match (&self.name, &self.name_pattern, self.count) {
            (_, Some(pattern), count) => (1..=count.unwrap_or(1)).map(|number| pattern.name(number)).collect(),
            (Some(name), None, None) => vec![name.clone()],
            (Some(name), None, Some(count)) => {
                let pattern = NamePattern::numbered(name);
                (1..=count).map(|number| pattern.name(number)).collect()
            }
            (None, None, _) => return Err("a clone needs a name".into()),
        };
        Ok(Request::Clone { disk: self.source.disk.clone(), at: self.source.at.clone(), names, full: self.full })
    }
}
