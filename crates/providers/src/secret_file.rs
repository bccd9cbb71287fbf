//! Keys come from files, never from the settings themselves.
//!
//! No error repeats any content of a file.

use std::io::Read;
use std::path::Path;

use order_timeout_core::InvalidSetting;
use secrecy::SecretString;

/// Larger than any key or bundle of certificates.
const LARGEST_FILE_BYTES: u64 = 1024 * 1024;

/// Reads a text file, and removes the space and line breaks around its text.
///
/// # Errors
/// [`InvalidSetting`] of `section.key` if it cannot be read, is no text, or is empty.
pub(crate) fn read_text(section: &str, key: &str, path: &Path) -> Result<SecretString, InvalidSetting> {
    let refuse = |why: String| Err(InvalidSetting::new(format!("{section}.{key}"), why));
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST_FILE_BYTES).read_to_string(&mut text));
    if let Err(error) = read {
        return refuse(format!(
            "names {path:?}, which cannot be read: {error}; name a text file that exists and is readable"
        ));
    }
    match text.trim() {
        "" => refuse(format!("names {path:?}, which is empty; write the key into it")),
        trimmed => Ok(trimmed.to_owned().into()),
    }
}

/// As [`read_text`], for a key that is sent in a header.
///
/// # Errors
/// As there, and if it contains anything but visible ASCII.
pub(crate) fn read_token(section: &str, key: &str, path: &Path) -> Result<SecretString, InvalidSetting> {
    use secrecy::ExposeSecret;
    let token = read_text(section, key, path)?;
    if token.expose_secret().bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(token);
    }
    let why = format!("names {path:?}, whose content is not one line of visible ASCII; write only the key into it");
    Err(InvalidSetting::new(format!("{section}.{key}"), why))
}
