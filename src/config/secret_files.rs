//! Files with secrets that others may change.
//!
//! Reads the files' modes, never their contents.

use std::os::unix::fs::PermissionsExt;

use order_timeout_core::problem::{Cause, Problem};

use super::Settings;

/// Ends of the keys that name files without a secret.
const PUBLIC: [&str; 2] = ["ca_file", "client_cert_file"];

/// Whether this setting names a file with a secret.
pub(super) fn is_secret_file(key: &str) -> bool {
    key.ends_with("_file") && !PUBLIC.iter().any(|public| key.ends_with(public))
}

impl Settings {
    /// A problem for each file with a secret that every user of this machine may write. Docker and Kubernetes mount secrets
    /// that every user of the container may read, so reading is none.
    #[must_use]
    pub fn writable_secret_files(&self) -> Vec<Problem> {
        let is_writable =
            |path: &str| std::fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o002 != 0);
        let writable = self.secret_files.iter().filter(|(_, path)| is_writable(path));
        let problem = |(key, path): &(String, String)| {
            let what = format!("every user of this machine may write {path}, the file of {key}");
            Problem::new(Cause::SecretFiles, what, format!("chmod 600 {path}"))
        };
        writable.map(problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_others_may_write_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let settings =
            Settings { secret_files: vec![("http.token_file".into(), path.clone())], ..Settings::defaults() };
        for (mode, is_named) in [(0o600, false), (0o444, false), (0o644, false), (0o666, true), (0o602, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let problems = settings.writable_secret_files();
            assert_eq!(problems.len(), usize::from(is_named), "{mode:o}");
            assert!(problems.iter().all(|problem| problem.fix == format!("chmod 600 {path}")), "{problems:?}");
        }
    }

    #[test]
    fn certificates_are_no_secrets() {
        let secret =
            ["database.url_file", "http.token_file", "amqp.client_key_file", "providers.card.bearer_token_file"];
        assert!(secret.into_iter().all(is_secret_file));
        assert!(!["amqp.ca_file", "database.client_cert_file", "providers.card.url"].into_iter().any(is_secret_file));
    }
}
