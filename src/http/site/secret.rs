//! The token that allows changes: read from a file, compared in constant time.
//!
//! Never printed.

use std::io::Read;

use secrecy::{ExposeSecret, SecretString};
use subtle::ConstantTimeEq;

/// A file with more is not a token.
const LARGEST_FILE_BYTES: u64 = 4_096;
/// 20 random hexadecimal digits are 80 bits: a million tries a second find them in 19 billion years, on average.
const LEAST_CHARACTERS: usize = 20;

/// Why the token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file.
    #[error("http.token_file: {path} cannot be read: {why}; mount the secret there, or name the file that holds it")]
    File {
        /// Its path.
        path: String,
        /// The system's words.
        why: std::io::Error,
    },
    /// Its contents.
    #[error(
        "http.token_file: {0} must have one line with a token of at least {LEAST_CHARACTERS} visible ASCII characters; `openssl rand -hex 32` makes one"
    )]
    Form(String),
}

#[derive(Debug)]
pub(super) struct Token(SecretString);

impl Token {
    pub fn read(path: &str) -> Result<Self, TokenError> {
        let mut text = String::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST_FILE_BYTES).read_to_string(&mut text));
        read.map_err(|why| TokenError::File { path: path.to_owned(), why })?;
        Self::new(text.trim_end_matches(['\r', '\n'])).ok_or_else(|| TokenError::Form(path.to_owned()))
    }

    fn new(text: &str) -> Option<Self> {
        let is_token = text.len() >= LEAST_CHARACTERS && text.bytes().all(|byte| byte.is_ascii_graphic());
        is_token.then(|| Self(text.into()))
    }

    /// Takes the same time for every text of the token's length.
    pub fn is(&self, given: &str) -> bool {
        self.0.expose_secret().as_bytes().ct_eq(given.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_token_is_accepted() {
        let token = Token::new("0123456789abcdefghij").unwrap();
        assert!(token.is("0123456789abcdefghij"));
        for other in ["", "0123456789abcdefghi", "0123456789abcdefghijk", "0123456789abcdefghiJ"] {
            assert!(!token.is(other), "{other}");
        }
        for bad in ["short", "with space 0123456789", "two\nlines0123456789abc", "ümlaut0123456789abcdef"] {
            assert!(Token::new(bad).is_none(), "{bad}");
        }
        assert!(!format!("{token:?}").contains("0123"));
    }

    #[test]
    fn token_file_errors_name_fix() {
        let missing = Token::read("/nonexistent/token").unwrap_err().to_string();
        assert!(missing.contains("http.token_file: /nonexistent/token") && missing.contains("mount"), "{missing}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "short\n").unwrap();
        let short = Token::read(file.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(short.contains("openssl rand -hex 32") && !short.contains("short\n"), "{short}");
        std::fs::write(file.path(), "0123456789abcdefghij\r\n").unwrap();
        assert!(Token::read(file.path().to_str().unwrap()).unwrap().is("0123456789abcdefghij"));
    }
}
