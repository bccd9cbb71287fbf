//! Writes the program's list of contents: `sbom.cdx.json` (`CycloneDX` 1.5) and `THIRD-PARTY-NOTICES.txt`, the licence
//! texts that the licences require to be passed on.
//!
//! `sbom FOLDER`; `scripts/sbom` calls it. The same lock file gives the same bytes on any machine of a platform.
//!
//! It may not reach the network beyond cargo's own fetching, name a path of this machine, guess a licence, or omit a
//! package because its author ships no text.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// The names under which authors ship licences and notices; some ship a folder of them.
const TEXTS: [&str; 6] = ["license", "licence", "copying", "notice", "unlicense", "copyright"];

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [folder] = arguments.as_slice() else { bail!("sbom takes one argument, the folder to write to") };
    write_to(Path::new(folder))
}

/// Writes both files. The tests call it as well.
pub fn write_to(folder: &Path) -> Result<()> {
    let packages = Packages::read()?;
    std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be created", folder.display()))?;
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))
    };
    write("sbom.cdx.json", &format!("{:#}\n", packages.sbom()))?;
    write("THIRD-PARTY-NOTICES.txt", &packages.notices()?)
}

/// The packages compiled for this platform, except our own.
struct Packages {
    root: Value,
    /// By name and version.
    others: BTreeMap<(String, String), Value>,
    /// Those that the program itself needs; the others are for building, testing and the example shop.
    required: BTreeSet<String>,
    /// The dependencies of each, by cargo's ids.
    edges: BTreeMap<String, BTreeSet<String>>,
    checksums: BTreeMap<(String, String), String>,
}

impl Packages {
    fn read() -> Result<Self> {
        let platform = platform()?;
        let metadata =
            cargo(&["metadata", "--locked", "--format-version", "1", "--filter-platform", platform.as_str()])?;
        let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata is not JSON")?;
        let root = text(&metadata["resolve"]["root"])?;
        let all: Vec<Value> = list(&metadata["packages"])?.clone();
        let nodes = list(&metadata["resolve"]["nodes"])?;
        let edges = nodes.iter().map(edges_of).collect::<Result<_>>()?;
        let required = required(nodes, &root)?;
        let mut others = BTreeMap::new();
        let mut own = None;
        for package in all {
            if text(&package["id"])? == root {
                own = Some(package);
            } else {
                others.insert((text(&package["name"])?, text(&package["version"])?), package);
            }
        }
        let root = own.context("cargo metadata does not describe this package")?;
        Ok(Self { root, others, required, edges, checksums: checksums()? })
    }

    fn sbom(&self) -> Value {
        let components: Vec<Value> = self.others.values().map(|package| self.component(package)).collect();
        let dependencies: Vec<Value> = std::iter::once(&self.root)
            .chain(self.others.values())
            .map(|package| {
                let on: Vec<String> = self.dependencies_of(package);
                json!({ "ref": purl(package), "dependsOn": on })
            })
            .collect();
        json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": { "component": {
                "type": "application",
                "bom-ref": purl(&self.root),
                "name": self.root["name"],
                "version": self.root["version"],
                "licenses": licenses(&self.root),
            } },
            "components": components,
            "dependencies": dependencies,
        })
    }

    fn component(&self, package: &Value) -> Value {
        let required = package["id"].as_str().is_some_and(|id| self.required.contains(id));
        let mut component = json!({
            "type": "library",
            "bom-ref": purl(package),
            "name": package["name"],
            "version": package["version"],
            "purl": purl(package),
            "scope": if required { "required" } else { "optional" },
            "licenses": licenses(package),
        });
        if let Some(checksum) = self.checksums.get(&key(package)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        component
    }

    fn dependencies_of(&self, package: &Value) -> Vec<String> {
        let Some(on) = package["id"].as_str().and_then(|id| self.edges.get(id)) else { return Vec::new() };
        let is_meant = |package: &&Value| package["id"].as_str().is_some_and(|id| on.contains(id));
        self.others.values().filter(is_meant).map(purl).collect()
    }

    fn notices(&self) -> Result<String> {
        let mut notices = String::from(
            "order-timeout is made with the packages below. Each is followed by its licence, as an expression, and by the\n\
             licence texts and notices that its author ships. A text that is there already is not repeated.\n",
        );
        let mut known = BTreeMap::new();
        for package in self.others.values() {
            let (name, version) = key(package);
            let licence = package["license"].as_str().with_context(|| format!("{name} {version} names no licence"))?;
            writeln!(notices, "\n{}\n{name} {version}\nLicence: {licence}", "=".repeat(100))?;
            if let Some(place) = package["repository"].as_str() {
                writeln!(notices, "Source: {place}")?;
            }
            let manifest = text(&package["manifest_path"])?;
            let folder = Path::new(&manifest).parent().context("a manifest in no folder")?;
            let texts = texts_in(folder)?;
            if texts.is_empty() {
                writeln!(
                    notices,
                    "\nIts author ships no text; that of the licence is meant, by: {}",
                    authors(package)
                )?;
            }
            for (file, text) in texts {
                let text = text.trim_end().to_owned();
                match known.get(&text) {
                    Some(at) => writeln!(notices, "\n--- {file}: word for word {at}")?,
                    None => {
                        writeln!(notices, "\n--- {file}\n\n{text}")?;
                        known.insert(text, format!("{file} of {name} {version}"));
                    }
                }
            }
        }
        Ok(notices)
    }
}

/// The platform that rustc compiles for.
fn platform() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("rustc does not run")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = said.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?;
    Ok(host.to_owned())
}

/// The repository: this file is compiled into a program of a crate in it, and into a test of the worker.
fn root() -> Result<&'static Path> {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join("Cargo.lock").is_file()).context("there is no Cargo.lock")
}

fn cargo(arguments: &[&str]) -> Result<String> {
    let program = std::env::var_os("CARGO");
    let mut command = Command::new(program.as_deref().unwrap_or(OsStr::new("cargo")));
    let output = command.args(arguments).current_dir(root()?).output().context("cargo does not run")?;
    ensure!(output.status.success(), "cargo {}: {}", arguments[0], String::from_utf8_lossy(&output.stderr).trim());
    String::from_utf8(output.stdout).context("cargo's answer is not UTF-8")
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).with_context(|| format!("cargo metadata has {value} where a text should be"))
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().context("cargo metadata lacks a list")
}

fn edges_of(node: &Value) -> Result<(String, BTreeSet<String>)> {
    let on = list(&node["deps"])?.iter().map(|on| text(&on["pkg"])).collect::<Result<_>>()?;
    Ok((text(&node["id"])?, on))
}

/// The ids reachable from the root without dependencies for tests and build scripts.
fn required(nodes: &[Value], root: &str) -> Result<BTreeSet<String>> {
    let by_id: BTreeMap<_, _> = nodes.iter().map(|node| (node["id"].as_str().unwrap_or_default(), node)).collect();
    let mut found = BTreeSet::new();
    let mut ahead = vec![root.to_owned()];
    while let Some(id) = ahead.pop() {
        let node = by_id.get(id.as_str()).with_context(|| format!("cargo metadata does not resolve {id}"))?;
        for on in list(&node["deps"])? {
            let is_normal = list(&on["dep_kinds"])?.iter().any(|kind| kind["kind"].is_null());
            let id = text(&on["pkg"])?;
            if is_normal && !found.contains(&id) {
                ahead.push(id);
            }
        }
        found.insert(id);
    }
    Ok(found)
}

/// SHA-256 of each package as the registry serves it, from the lock file.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let lock = std::fs::read_to_string(root()?.join("Cargo.lock"))?;
    let lock: toml::Table = lock.parse().context("Cargo.lock is not TOML")?;
    let packages = lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock names no package")?;
    let field = |package: &toml::Value, name: &str| package.get(name)?.as_str().map(str::to_owned);
    let checksum = |package| Some(((field(package, "name")?, field(package, "version")?), field(package, "checksum")?));
    Ok(packages.iter().filter_map(checksum).collect())
}

fn key(package: &Value) -> (String, String) {
    let field = |name: &str| package[name].as_str().unwrap_or_default().to_owned();
    (field("name"), field("version"))
}

fn purl(package: &Value) -> String {
    let (name, version) = key(package);
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

/// As an SPDX expression: older packages separate alternatives with a slash.
fn licenses(package: &Value) -> Value {
    let Some(licence) = package["license"].as_str() else { return json!([]) };
    let expression = licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ");
    json!([{ "expression": expression }])
}

fn authors(package: &Value) -> String {
    let authors = package["authors"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let authors = authors.collect::<Vec<_>>().join(", ");
    if authors.is_empty() { "its authors, who are not named".to_owned() } else { authors }
}

/// The texts beside a manifest, and in a folder of texts, by name.
fn texts_in(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !TEXTS.iter().any(|beginning| name.to_lowercase().starts_with(beginning)) {
            continue;
        }
        if path.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                let path = entry?.path();
                let inner = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if path.is_file() {
                    found.insert(format!("{name}/{inner}"), read(&path)?);
                }
            }
        } else {
            found.insert(name, read(&path)?);
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}
