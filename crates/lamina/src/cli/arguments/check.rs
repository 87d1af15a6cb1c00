//! `lamina check`.

use clap::Args;
use control::Request;

/// Arguments of `lamina check`.
#[derive(Debug, Args)]
pub struct CheckArguments {
    /// Also read every data block and verify its checksum.
    #[arg(long)]
    pub data: bool,
    /// Repair what can be repaired.
    #[arg(long)]
    pub repair: bool,
}

impl CheckArguments {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Check { data: self.data, repair: self.repair }
    }
}
