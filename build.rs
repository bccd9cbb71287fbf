//! Tells the program which commit it is built from, for `--version`, and lists the migrations.
//!
//! The commit in release builds only: a development build would be compiled anew after every commit. Where there is no git, as
//! in a container build, the environment variable ORDER_TIMEOUT_COMMIT (`COMMIT DATE`) says it, or nothing does.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    list_migrations();
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ORDER_TIMEOUT_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = std::env::var("ORDER_TIMEOUT_COMMIT").ok().filter(|commit| !commit.is_empty());
    let built_from = given.or_else(|| is_release.then(last_commit).flatten());
    let version = env!("CARGO_PKG_VERSION");
    let version = built_from.map_or_else(|| version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=ORDER_TIMEOUT_VERSION={version}");
}

/// `migrations.rs`: a list of (name, SQL). `sqlx::migrate!` is not used, because with the feature `macros` the compiler builds
/// sqlx, tokio and rustls a second time, for itself.
fn list_migrations() {
    println!("cargo::rerun-if-changed=migrations");
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("migrations");
    let entries = std::fs::read_dir(folder).expect("the folder is part of the package");
    let paths = entries.map(|entry| entry.expect("it can be read").path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|end| end == "sql")).collect();
    paths.sort();
    let listed =
        paths.iter().map(|path| format!("({:?}, include_str!({path:?})),", path.file_stem().unwrap_or_default()));
    let list = format!("[{}]", listed.collect::<String>());
    let to = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("migrations.rs");
    std::fs::write(to, list).expect("cargo's own folder can be written");
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
