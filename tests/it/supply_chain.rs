//! The program's dependencies: permitted licences, only packages of the registry, one crypto provider, and complete
//! lists of contents. The rules are those of deny.toml, which `cargo deny` reads as well where it is installed.
//!
//! It may not reach the network. The packages are present, otherwise these tests would not compile.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use regex::Regex;
use serde_json::Value;

// Compiled in: a `cargo run` inside `cargo test` has a different environment, for which half of the packages would be
// recompiled.
#[path = "../../scripts/sbom.rs"]
#[allow(dead_code)] // its `main`
mod sbom;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rules() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

/// A list of texts in deny.toml; for a list of tables, their `key`.
fn listed(section: &str, name: &str, key: &str) -> BTreeSet<String> {
    let rules = rules();
    let list = rules[section][name].as_array().unwrap().iter();
    list.map(|value| value.get(key).unwrap_or(value).as_str().unwrap().to_owned()).collect()
}

/// Every package of the lock file, for every platform.
fn packages() -> Vec<Value> {
    let metadata = |arguments: &[&str]| {
        let usual = ["metadata", "--locked", "--format-version", "1", "--all-features"];
        Command::new(env!("CARGO")).args(usual).args(arguments).current_dir(root()).output().unwrap()
    };
    let mut output = metadata(&["--offline"]);
    if !output.status.success() {
        // What other platforms or features alone need was not fetched yet. For this platform it is, now.
        let host = Command::new("rustc").arg("-vV").output().unwrap().stdout;
        let host = String::from_utf8(host).unwrap();
        output = metadata(&["--filter-platform", host.lines().find_map(|line| line.strip_prefix("host: ")).unwrap()]);
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Whether this is a package of the workspace, which has neither a source nor a checksum.
fn is_ours(name: &str) -> bool {
    let own = ["", "-amqp", "-client", "-core", "-demo", "-providers", "-testkit", "-tools"];
    name.split(' ').next().unwrap().strip_prefix("order-timeout").is_some_and(|rest| own.contains(&rest))
}

fn name(package: &Value) -> String {
    format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap())
}

/// Whether an SPDX expression can be satisfied with these licences. Supports `AND`, `OR`, `WITH` and parentheses, and
/// the slash that older packages write for `OR`.
fn is_permitted(expression: &str, permitted: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ").replace(" WITH ", "+WITH+");
    let mut words = spaced.split_whitespace().peekable();
    let outcome = any_of(&mut words, permitted);
    assert_eq!(words.next(), None, "{expression}");
    outcome
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, permitted: &BTreeSet<String>) -> bool {
    let mut outcome = all_of(words, permitted);
    while words.next_if_eq(&"OR").is_some() {
        outcome |= all_of(words, permitted);
    }
    outcome
}

fn all_of(words: &mut Words<'_>, permitted: &BTreeSet<String>) -> bool {
    let mut outcome = one(words, permitted);
    while words.next_if_eq(&"AND").is_some() {
        outcome &= one(words, permitted);
    }
    outcome
}

fn one(words: &mut Words<'_>, permitted: &BTreeSet<String>) -> bool {
    match words.next().expect("a licence") {
        "(" => {
            let outcome = any_of(words, permitted);
            assert_eq!(words.next(), Some(")"));
            outcome
        }
        licence => permitted.contains(&licence.replace("+WITH+", " WITH ")),
    }
}

#[test]
fn licence_expressions_are_understood() {
    let permitted = BTreeSet::from(["MIT", "Apache-2.0 WITH LLVM-exception", "ISC"].map(str::to_owned));
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("ISC AND MIT", true),
        ("(GPL-3.0 OR MIT) AND ISC", true),
        ("MIT AND (GPL-3.0 OR Apache-2.0)", false),
        ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(is_permitted(expression, &permitted), expected, "{expression}");
    }
}

#[test]
fn every_package_has_permitted_licence() {
    let permitted = listed("licenses", "allow", "license");
    let packages = packages();
    assert!(packages.len() > 200, "only {} packages", packages.len());
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(is_permitted(licence, &permitted), "{}: {licence}, which deny.toml does not permit", name(&package));
    }
}

#[test]
fn every_package_comes_from_registry() {
    let registries = listed("sources", "allow-registry", "registry");
    for package in packages() {
        // A package without a source is our own.
        if let Some(source) = package["source"].as_str() {
            let is_known = source.strip_prefix("registry+").is_some_and(|registry| registries.contains(registry));
            assert!(is_known, "{} comes from {source}", name(&package));
        } else {
            assert!(is_ours(package["name"].as_str().unwrap()), "{} comes from nowhere", name(&package));
        }
    }
    let lock: toml::Table = std::fs::read_to_string(root().join("Cargo.lock")).unwrap().parse().unwrap();
    for package in lock["package"].as_array().unwrap() {
        assert!(
            package.get("source").is_none() || package.get("checksum").is_some(),
            "{package} can be replaced unnoticed: the lock file has no checksum of it"
        );
    }
}

#[test]
fn refused_packages_are_not_in_lock_file() {
    let refused = listed("bans", "deny", "crate");
    assert!(refused.contains("openssl") && refused.contains("aws-lc-rs"));
    let found: Vec<_> = packages().iter().map(name).collect();
    let refused: Vec<_> = found.iter().filter(|name| refused.contains(name.split(' ').next().unwrap())).collect();
    assert_eq!(refused, Vec::<&String>::new(), "deny.toml says why these are refused");
    assert!(found.iter().any(|name| name.starts_with("ring ")), "the crypto provider");
}

#[test]
fn lists_of_contents_are_complete() {
    let folder = tempfile::tempdir().unwrap();
    sbom::write_to(folder.path()).unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let (sbom, notices) = (read("sbom.cdx.json"), read("THIRD-PARTY-NOTICES.txt"));
    // Neither list contains the path where it was generated.
    let home = std::env::var("HOME").unwrap_or_else(|_| "/root".to_owned());
    for place in [root().to_str().unwrap(), home.as_str()].into_iter().filter(|place| place.len() > 1) {
        assert!(!sbom.contains(place) && !notices.contains(place), "{place}");
    }

    let sbom: Value = serde_json::from_str(&sbom).unwrap();
    assert_eq!((&sbom["bomFormat"], &sbom["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let components = sbom["components"].as_array().unwrap();
    let by_name: BTreeMap<String, &Value> = components.iter().map(|component| (name(component), component)).collect();
    assert_eq!(by_name.len(), components.len(), "each once");
    let references: BTreeSet<_> = components.iter().map(|component| component["bom-ref"].as_str().unwrap()).collect();
    for dependency in sbom["dependencies"].as_array().unwrap() {
        for on in dependency["dependsOn"].as_array().unwrap() {
            assert!(references.contains(on.as_str().unwrap()), "{on} is not described");
        }
    }
    // The manifest's dependencies are a subset of the lists.
    let manifest: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    for (table, scope) in [("dependencies", "required"), ("dev-dependencies", "optional")] {
        for package in manifest[table].as_table().unwrap().keys() {
            let found: Vec<_> = components.iter().filter(|component| component["name"] == **package).collect();
            assert!(!found.is_empty(), "{package} is not in the list");
            assert!(table == "dev-dependencies" || found.iter().any(|found| found["scope"] == scope), "{package}");
        }
    }
    let listed: BTreeSet<&str> = notices.lines().collect();
    for (name, component) in by_name {
        let checksum = component["hashes"][0]["content"].as_str().unwrap_or_default();
        assert!(is_ours(&name) || checksum.len() == 64, "{name} has no checksum");
        assert!(component["licenses"][0]["expression"].is_string(), "{name} has no licence");
        assert!(listed.contains(name.as_str()), "{name} is not in the notices");
    }
    for text in ["Permission is hereby granted, free of charge", "Apache License", "UNICODE LICENSE V3"] {
        assert!(notices.contains(text), "{text} is not in the notices");
    }
}

/// A copy of the files that name images, beside the script, and a fake `docker` that knows one digest.
fn pinned_by(docker: &str) -> (bool, String, BTreeMap<&'static str, String>) {
    const FILES: [&str; 4] = ["Dockerfile", "docker-compose.yml", "deploy/services.yml", "scripts/pin-images"];
    let folder = tempfile::tempdir().unwrap();
    for file in FILES {
        let to = folder.path().join(file);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(root().join(file), to).unwrap();
    }
    let program = folder.path().join("docker");
    std::fs::write(&program, format!("#!/bin/sh\n{docker}\n")).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let call = || Command::new(folder.path().join("scripts/pin-images")).env("PATH", &path).output().unwrap();
    let output = call();
    // A second run, with images that are pinned already.
    let again = call();
    assert_eq!(output.status, again.status);
    let files = FILES.map(|file| (file, std::fs::read_to_string(folder.path().join(file)).unwrap()));
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned(), BTreeMap::from(files))
}

#[test]
fn images_are_pinned_by_digest() {
    let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
    let (succeeded, said, files) = pinned_by(&format!("echo {digest}"));
    assert!(succeeded, "{said}");
    let image = Regex::new(r"(?m)^(?:FROM|  +image:) (\S+)").unwrap();
    let digests = Regex::new("@sha256:[0-9a-f]{64}").unwrap();
    for file in ["Dockerfile", "docker-compose.yml", "deploy/services.yml"] {
        let was = std::fs::read_to_string(root().join(file)).unwrap();
        let pulled = |text: &str| {
            let named = image.captures_iter(text).map(|found| found[1].to_owned());
            named.filter(|name| name != "order-timeout:local").collect::<Vec<_>>()
        };
        let found = pulled(&files[file]);
        assert!(found.len() >= 2 && found.iter().all(|name| name.ends_with(&format!("@{digest}"))), "{found:?}");
        // Nothing else has changed.
        assert_eq!(digests.replace_all(&files[file], ""), digests.replace_all(&was, ""), "{file}");
    }
}

#[test]
fn images_are_never_pinned_by_guess() {
    for docker in ["echo latest", "echo sha256:0", "exit 1", ":"] {
        let (succeeded, said, files) = pinned_by(docker);
        assert!(!succeeded && said.contains("nothing has been changed"), "{docker}: {said}");
        for (file, text) in files {
            assert_eq!(text, std::fs::read_to_string(root().join(file)).unwrap(), "{docker}, {file}");
        }
    }
}
