//! A worker that serves the page and the API.

use std::time::Duration;

use order_timeout::Settings;
use tempfile::NamedTempFile;

use crate::figures::serve_http;

/// The token that allows changes.
pub const TOKEN: &str = "0123456789abcdefghijklmnop";

/// Has the worker serve API and page, and read the token from this file, if there is one.
pub fn with_page(token: Option<&NamedTempFile>) -> impl FnOnce(&mut Settings) + use<> {
    let token_file = token.map_or_else(String::new, |file| {
        std::fs::write(file.path(), format!("{TOKEN}\n")).expect("the token's file");
        file.path().to_str().expect("a path in plain letters").to_owned()
    });
    move |settings| {
        serve_http(settings);
        settings.http.page = true;
        settings.http.token_file = token_file;
        // An order without an alarm is closed at once.
        settings.sweep.grace = Duration::ZERO;
    }
}
