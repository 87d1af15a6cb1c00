//! Arguments for the configuration of cloud-init in a guest.

use backend::regular;
use clap::Args;
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
        let user_data = self.user_data.as_deref().map(|path| text(path, "file of user data")).transpose()?;
        let seed = Seed { hostname: self.hostname.clone(), ssh_keys, user_data };
        Ok((seed != Seed::default()).then_some(seed))
    }
}

/// The text of a file; `what` is what the file should be. Data in other forms, such as compressed data, cannot be in a
/// definition.
fn text(path: &Path, what: &str) -> Result<String, String> {
    let bytes = regular::read(path, USER_DATA_MAX as u64, what).map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|_| format!("'{}': it is no text in UTF-8", path.display()))
}

/// The public keys in a file.
fn keys(path: &Path) -> Result<Vec<String>, String> {
    let text = text(path, "file of public keys")?;
    if text.contains("PRIVATE KEY-----") {
        return Err(format!(
            "'{}' is a private key, which must stay secret: name the file of the public key",
            path.display()
        ));
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}
