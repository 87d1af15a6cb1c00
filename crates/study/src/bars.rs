//! One module per study. Each study creates its disks, measures, and returns findings and raw samples.

pub mod background;
pub mod chains;
pub mod clones;
pub mod connections;
pub mod consolidate;
pub mod depth;
pub mod desktops;
pub mod grains;
mod layout;
mod load;
pub mod migrate;
pub mod neighbour;
pub mod peers_chain;
pub mod reclaim;
pub mod reclaim_sesparse;
pub mod reduced_writes;
pub mod reduction;
pub mod remote;
pub mod scattered;
mod slices;
pub mod snapshots;
pub mod speed;
pub mod thin;
pub mod vm_full;
pub mod vm_instant;
pub mod vm_linked;
pub mod wide;

use crate::error::{Error, Result};
use crate::fio::{Endpoint, Job, Length, Pattern};
use crate::nbd::{Client, Request};
use crate::plan::{Plan, Study};
use crate::report::Outcome;
use crate::scratch::Scratch;
use std::path::PathBuf;

/// Bytes of a block, which is the unit of mapping and the size of all random requests.
pub const BLOCK: u64 = 4096;
/// Requests in flight while a disk is filled.
const LAYOUT_DEPTH: usize = 16;

/// Settings and tools of every study.
#[derive(Debug)]
pub struct Setting {
    /// Sizes and counts.
    pub plan: Plan,
    /// The work folder.
    pub scratch: Scratch,
    /// The lamina program that is measured.
    pub lamina: PathBuf,
    /// Another lamina program, with which the measured one is compared.
    pub baseline: Option<PathBuf>,
    /// Folder with the results of earlier runs.
    pub results: PathBuf,
}

impl Setting {
    /// A fio job of 4 KiB requests for a fixed time, over a whole disk of the planned size.
    fn job(&self, pattern: Pattern, depth: u32, seed: u64) -> Job {
        let length = Length::Time { seconds: self.plan.seconds, ramp: self.plan.ramp };
        let block = BLOCK as u32;
        Job { pattern, block, depth, flush_each: false, length, size: self.plan.disk_size, seed }
    }
}

/// Runs one study.
pub fn measure(study: Study, setting: &Setting) -> Result<Outcome> {
    match study {
        Study::Speed => speed::measure(setting),
        Study::Thin => thin::measure(setting),
        Study::Depth => depth::measure(setting),
        Study::Snapshots => snapshots::measure(setting),
        Study::Clones => clones::measure(setting),
        Study::Wide => wide::measure(setting),
        Study::Reclaim => reclaim::measure(setting),
        Study::Scattered => scattered::measure(setting),
        Study::Background => background::measure(setting),
        Study::Endurance => background::endurance::measure(setting),
        Study::Connections => connections::measure(setting),
        Study::Neighbour => neighbour::measure(setting),
        Study::Chains => chains::measure(setting),
        Study::Grains => grains::measure(setting),
        Study::PeersChain => peers_chain::measure(setting),
        Study::ReclaimSesparse => reclaim_sesparse::measure(setting),
        Study::Reduction => reduction::measure(setting),
        Study::ReducedWrites => reduced_writes::measure(setting),
        Study::Desktops => desktops::measure(setting),
        Study::Consolidate => consolidate::measure(setting),
        Study::Migrate => migrate::measure(setting),
        Study::VmLinked => vm_linked::measure(setting),
        Study::VmFull => vm_full::measure(setting),
        Study::VmInstant => vm_instant::measure(setting),
        Study::Remote => remote::measure(setting),
        Study::All | Study::Figures => Ok(Outcome::default()),
    }
}

/// Prints the current step to stderr.
fn say(what: &str) {
    eprintln!("  {what}");
}

/// The error if a filter matches no cell.
fn no_cell<T: AsRef<str>>(plan: &Plan, names: &[T]) -> Error {
    let names = names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    Error::Usage(format!("no cell has {:?} in its name; there are {names}", plan.cells))
}

/// Writes every byte of a disk sequentially, and makes it durable.
fn fill(endpoint: &Endpoint, size: u64) -> Result<()> {
    const STEP: u64 = 1 << 20;
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let requests =
        (0..size.div_ceil(STEP)).map(|i| Request::Write { offset: i * STEP, length: STEP.min(size - i * STEP) as u32 });
    client.run(4, requests, |_| ())?;
    client.flush()
}

/// Writes blocks of `bytes` bytes with the given indices, and makes them durable.
fn write_blocks(endpoint: &Endpoint, indices: impl IntoIterator<Item = u64>, bytes: u64) -> Result<()> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let requests = indices.into_iter().map(|i| Request::Write { offset: i * bytes, length: bytes as u32 });
    client.run(LAYOUT_DEPTH, requests, |_| ())?;
    client.flush()
}
