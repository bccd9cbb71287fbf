//! Tells the program which commit it is built from, for `--version`.
//!
//! In release builds only: a development build would be compiled anew after every commit. Where there is no git, as in a
//! container build, the environment variable ORDER_TIMEOUT_COMMIT (`COMMIT DATE`) says it, or nothing does.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ORDER_TIMEOUT_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = std::env::var("ORDER_TIMEOUT_COMMIT").ok().filter(|commit| !commit.is_empty());
    let built_from = given.or_else(|| is_release.then(last_commit).flatten());
    let version = env!("CARGO_PKG_VERSION");
    let version = built_from.map_or_else(|| version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=ORDER_TIMEOUT_VERSION={version}");
}

/// `COMMIT DATE`: the abbreviated hash and the day of the commit.
fn last_commit() -> Option<String> {
    // The reflog of HEAD grows with each commit, checkout and merge.
    for file in [".git/HEAD", ".git/logs/HEAD"] {
        if std::path::Path::new(file).exists() {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    let log = Command::new("git").args(["log", "-1", "--format=%h %cs"]).output().ok()?;
    let text = String::from_utf8(log.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| log.status.success() && !text.is_empty())
}
