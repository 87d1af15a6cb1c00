//! Arguments for the configuration of cloud-init in a guest.

use clap::Args;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use vm::definition::{Seed, USER_DATA_MAX};

/// The beginnings of the types of public keys, which distinguish a key from the name of a file.
const KEY_TYPES: [&str; 3] = ["ssh-", "ecdsa-", "sk-"];

/// Options for the seed of cloud-init.
#[derive(Debug, Args)]
pub struct SeedArguments {
    /// A file with the configuration of cloud-init in the guest, such as one that begins with #cloud-config.
    #[arg(long, value_name = "FILE")]
    pub user_data: Option<PathBuf>,
    /// A public key of SSH for cloud-init's default user, or a file with public keys; may be repeated.
    #[arg(long = "ssh-key", value_name = "FILE|TEXT")]
    pub ssh_keys: Vec<String>,
    /// The host name that cloud-init gives the guest. Default: the name of the machine.
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
}

impl SeedArguments {
    /// The seed; `None` if no option is given.
    pub fn seed(&self) -> Result<Option<Seed>, String> {
        let mut ssh_keys = Vec::new();
        for key in &self.ssh_keys {
            match KEY_TYPES.iter().any(|begin| key.starts_with(begin)) {
                true => ssh_keys.push(key.trim().to_owned()),
                false => ssh_keys.extend(keys(Path::new(key))?),
            }
        }
        let user_data = self.user_data.as_deref().map(text).transpose()?;
        let seed = Seed { hostname: self.hostname.clone(), ssh_keys, user_data };
        Ok((seed != Seed::default()).then_some(seed))
    }
}

/// The text of a file, or of a pipe such as the `<(COMMAND)` of a shell. Data in other forms, such as compressed data,
/// cannot be in a definition.
fn text(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    // A device may have no end.
    let read = File::open(path).and_then(|file| file.take(USER_DATA_MAX as u64 + 1).read_to_end(&mut bytes));
    read.map_err(|error| format!("'{}': {error}", path.display()))?;
    if bytes.len() > USER_DATA_MAX {
        return Err(format!("'{}' has more than {USER_DATA_MAX} bytes", path.display()));
    }
    String::from_utf8(bytes).map_err(|_| format!("'{}': it is no text in UTF-8", path.display()))
}

/// The public keys in a file.
fn keys(path: &Path) -> Result<Vec<String>, String> {
    let text = text(path)?;
    if text.contains("PRIVATE KEY-----") {
        return Err(format!(
            "'{}' is a private key, which must stay secret: name the file of the public key",
            path.display()
        ));
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}
