//! Where settings come from: defaults, a file, the environment, the command line; and how a fault in one of them is
//! explained.
//!
//! Reads, never checks what a value means (that is `Settings::validate`), and never repeats a secret.

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

use config::{Config, ConfigError, File, FileFormat, Format, Map, Source, Value, ValueKind};
use secrecy::SecretString;

use super::validate::NOT_UTF8;
use super::{DEFAULTS, POSTGRES_FORM, Settings, SettingsError, is_a_key};

const ENV_PREFIX: &str = "ORDER_TIMEOUT__";
/// What the prefix is often mistaken for.
const ENV_PREFIX_CUT_SHORT: &str = "ORDER_TIMEOUT_";
const DATABASE_URL_NAME: &str = "ORDER_TIMEOUT__DATABASE__URL";
/// What many programs call the database's address.
const DATABASE_URL: &str = "DATABASE_URL";
const ENVIRONMENT: &str = "the environment";
const COMMAND_LINE: &str = "--set";
/// Settings that are lists and may be written with commas outside a file.
const LISTS: [&str; 2] = ["delay.lanes", "worker.take_shards"];
/// How a list is written in a file.
const LIST_FORM: &str = "lanes = [\"15m\"]";
/// The list whose elements are tables, for which commas do not do.
const RINGS: &str = "delay.rings";

/// How alike a key and the one that is suggested for it must be, from 0 to 1: two letters in five may differ.
const LEAST_LIKENESS: f64 = 0.6;

/// More than any address has.
const LARGEST_SECRET_BYTES: u64 = 64 * 1024;

/// A key and where its value came from; `None` for the defaults.
type Origins = Vec<(String, Option<String>)>;

impl Settings {
    /// Loads defaults, then `file`, then the environment, then `overrides` (`KEY=VALUE`), and checks the result. All that
    /// a publisher needs: the database's address is not looked at.
    ///
    /// # Errors
    /// [`SettingsError`]: an unknown key, a value of the wrong form, a file that is not there, or values that do not
    /// fit together; with key and origin.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        Self::load_with_environment(file, environment()?, overrides)
    }

    /// [`Settings::load`] for a program that needs the database, such as a worker.
    ///
    /// # Errors
    /// As [`Settings::load`], or if `database.url` is not the address of a Postgres.
    pub fn load_with_database(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        Self::load_with_database_and_environment(file, environment()?, overrides)
    }

    /// [`Settings::load_with_database`] for a program that writes tables: no address of a database is an error, for the
    /// default one is rarely meant.
    ///
    /// # Errors
    /// As [`Settings::load_with_database`], or if nothing names the database.
    pub fn load_with_named_database(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        let (settings, origins) = load_with_database(file, environment()?, overrides)?;
        if is_database_given(&origins) {
            return Ok(settings);
        }
        let default = "127.0.0.1:5432, database \"postgres\"";
        let why = format!(
            "is not given, and setup writes no tables to the default address ({default}) unasked; set {DATABASE_URL_NAME} to {POSTGRES_FORM}"
        );
        Err(SettingsError::of("database.url", why))
    }

    /// [`Settings::load`] for a program that asks the database where one is given and goes without it otherwise: then
    /// `database.url` is empty ([`DatabaseSettings::is_given`]), as for an address of another kind.
    ///
    /// [`DatabaseSettings::is_given`]: super::DatabaseSettings::is_given
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_with_database_if_given(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        Self::load_with_any_database_and_environment(file, environment()?, overrides)
    }

    pub(super) fn load_with_any_database_and_environment(
        file: Option<&Path>,
        environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, SettingsError> {
        let (mut settings, mut origins) = load(file, environment, overrides)?;
        let database = &mut settings.database;
        let is_read = read_secret("database.url", &mut database.url, &database.url_file, &mut origins).is_ok();
        if !(is_read && is_database_given(&origins) && settings.validate_database().is_ok()) {
            settings.database.url = SecretString::default();
        }
        Ok(settings)
    }

    fn load_with_database_and_environment(
        file: Option<&Path>,
        environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, SettingsError> {
        load_with_database(file, environment, overrides).map(|(settings, _)| settings)
    }

    /// The defaults alone, for a program that fills in its own addresses.
    ///
    /// # Panics
    /// Never: a test holds the defaults valid.
    #[must_use]
    pub fn defaults() -> Self {
        Self::load_with_environment(None, Map::new(), &[]).expect("config/default.toml is tested to be valid")
    }

    /// [`Settings::load`] with the environment given.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_with_environment(
        file: Option<&Path>,
        environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, SettingsError> {
        load(file, environment, overrides).map(|(settings, _)| settings)
    }
}

/// All that a program needs which uses the database, and where each value came from.
fn load_with_database(
    file: Option<&Path>,
    environment: Map<String, String>,
    overrides: &[String],
) -> Result<(Settings, Origins), SettingsError> {
    let (mut settings, mut origins) = load(file, environment, overrides)?;
    let database = &mut settings.database;
    read_secret("database.url", &mut database.url, &database.url_file, &mut origins)?;
    settings.validate_database().map_err(|fault| fault.with_origin(&origins))?;
    Ok((settings, origins))
}

/// Whether a setting says where the database is: the default address is for trying out.
fn is_database_given(origins: &Origins) -> bool {
    let of_the_address = origins.iter().find(|(key, _)| key == "database.url");
    of_the_address.is_some_and(|(_, origin)| origin.is_some())
}

/// This process' environment.
pub(super) fn environment() -> Result<Map<String, String>, SettingsError> {
    texts(std::env::vars_os())
}

/// What is not text is left out where it is somebody else's; ours, left out, would leave the program with the default
/// servers. `DATABASE_URL` may be either: whoever uses it sees what is wrong with it.
pub(super) fn texts(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Map<String, String>, SettingsError> {
    let mut texts = Map::new();
    for (name, value) in variables {
        let (shown, text) = (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned());
        let are_text = name.to_str().is_some() && value.to_str().is_some();
        if are_text || shown == DATABASE_URL {
            texts.insert(shown, text);
        } else if shown.starts_with(ENV_PREFIX) || name_meant_by(&shown, &every_key()).is_some() {
            let why = format!("its name or value is not UTF-8; {NOT_UTF8}");
            return Err(SettingsError::new(Some(shown), Some(ENVIRONMENT.to_owned()), why));
        }
    }
    Ok(texts)
}

pub(super) fn load(
    file: Option<&Path>,
    environment: Map<String, String>,
    overrides: &[String],
) -> Result<(Settings, Origins), SettingsError> {
    let merged = merge(file, environment, overrides)?;
    let mut origins = leaf_keys(&merged.cache);
    refuse_unknown_keys(&origins)?;
    refuse_kinds_of_no_setting(&merged.cache)?;
    let mut settings: Settings = merged.try_deserialize().map_err(|fault| explain(&fault).with_origin(&origins))?;
    read_secret("amqp.url", &mut settings.amqp.url, &settings.amqp.url_file, &mut origins)?;
    settings.validate().map_err(|fault| fault.with_origin(&origins))?;
    Ok((settings, origins))
}

/// Takes the address from the file that is named for it, if one is: as Docker and Kubernetes hand out secrets.
fn read_secret(key: &str, secret: &mut SecretString, path: &str, origins: &mut Origins) -> Result<(), SettingsError> {
    if path.is_empty() {
        return Ok(());
    }
    let file_key = format!("{key}_file");
    let fault =
        |why: String, origins: &Origins| SettingsError::new(Some(file_key.clone()), None, why).with_origin(origins);
    let given = origins.iter_mut().find(|(known, _)| known == key).map(|(_, origin)| origin);
    let origin = given.expect("config/default.toml has an address beside every file for one");
    if let Some(origin) = origin {
        let why = format!("is given, and so is {key} (from {origin}); drop one of the two");
        return Err(fault(why, origins));
    }
    match secret_in(path) {
        Ok(text) => {
            *origin = Some(format!("the file {path}"));
            *secret = text.into();
            Ok(())
        }
        Err(why) => Err(fault(format!("the file {path} {why}"), origins)),
    }
}

/// The one line of a secret's file. The end of the line is no part of it: editors and `echo` write one.
fn secret_in(path: &str) -> Result<String, String> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST_SECRET_BYTES).read_to_string(&mut text));
    read.map_err(|error| format!("cannot be read: {error}; mount the secret there, or name the file that holds it"))?;
    let line = text.trim_end_matches(['\r', '\n']);
    if line.is_empty() {
        return Err("is empty; write the whole address into it".to_owned());
    }
    if line.contains(['\r', '\n']) {
        return Err("has more than one line; write the address into it and nothing else".to_owned());
    }
    Ok(line.to_owned())
}

impl SettingsError {
    fn plain(why: String) -> Self {
        Self::new(None, None, why)
    }

    /// Fills in where the key's value came from, if that is not known yet.
    fn with_origin(mut self, origins: &Origins) -> Self {
        // An element of a list has the origin of the list.
        let name = self.key.as_deref().and_then(|key| key.split('[').next());
        let known = origins.iter().find(|(key, _)| name == Some(key));
        self.origin = self.origin.or_else(|| known.and_then(|(_, origin)| origin.clone()));
        self
    }
}

pub(super) fn merge(
    file: Option<&Path>,
    environment: Map<String, String>,
    overrides: &[String],
) -> Result<Config, SettingsError> {
    let mut builder = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml));
    if let Some(path) = file {
        builder = builder.add_source(SettingsFile::read(path)?);
    }
    refuse_names_cut_short(&environment)?;
    refuse_names_of_nothing(&environment)?;
    for (key, value) in keys_in(environment) {
        builder =
            builder.set_override(&key, value_from(ENVIRONMENT, &key, &value)?).map_err(|fault| explain(&fault))?;
    }
    for (index, text) in overrides.iter().enumerate() {
        // Not repeated: it may be an address, and its "=" one of the address' own.
        let (key, value) = text.split_once('=').filter(|(key, _)| is_a_key(key.trim())).ok_or_else(|| {
            let (ordinal, count) = (index + 1, overrides.len());
            SettingsError::plain(format!(
                "{COMMAND_LINE} ({ordinal} of {count}) is no KEY=VALUE; write it as --set delay.lead=3s"
            ))
        })?;
        let key = key.trim();
        let value = value_from(COMMAND_LINE, key, value)?;
        builder = builder.set_override(key, value).map_err(|fault| explain(&fault))?;
    }
    builder.build().map_err(|fault| explain(&fault))
}

/// A settings file that has been read. The config crate's own source writes another path into its errors than the one
/// that was given.
#[derive(Debug, Clone)]
struct SettingsFile {
    path: String,
    text: String,
}

impl SettingsFile {
    fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path);
        let path = path.display().to_string();
        match text {
            Ok(text) => Ok(Self { path, text }),
            Err(error) => {
                let shown = if path.contains("://") { "of that name" } else { &path };
                let why = format!("the file {shown} cannot be read: {error}; correct --config or leave it out");
                Err(SettingsError { key: None, origin: None, why })
            }
        }
    }
}

impl Source for SettingsFile {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        let parsed = FileFormat::Toml.parse(Some(&self.path), &self.text);
        parsed.map_err(|cause| ConfigError::FileParse { uri: Some(self.path.clone()), cause })
    }
}

/// The settings among the environment's variables. `DATABASE_URL` counts where no longer name says where it is.
fn keys_in(environment: Map<String, String>) -> Vec<(String, String)> {
    let database_url = environment.get(DATABASE_URL).map(|url| ("database.url".to_owned(), url.clone()));
    let database_url = database_url.filter(|_| !environment.contains_key("ORDER_TIMEOUT__DATABASE__URL_FILE"));
    let ours = environment.into_iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(ENV_PREFIX)?;
        Some((key.to_lowercase().replace("__", "."), value))
    });
    database_url.into_iter().chain(ours).collect()
}

/// Refuses names that would be ours but for an underscore: unread, they would leave the program with the default
/// servers. Other names that begin like ours are somebody else's: our scripts', or Kubernetes', which makes some for
/// every service.
fn refuse_names_cut_short(environment: &Map<String, String>) -> Result<(), SettingsError> {
    let known = every_key();
    let meant = environment.keys().filter_map(|name| Some((name, name_meant_by(name, &known)?)));
    // The first by name, so that the same environment is always told the same.
    let Some((name, meant)) = meant.min() else { return Ok(()) };
    let why = format!("nobody reads it; did you mean {meant}?");
    Err(SettingsError::new(Some(name.clone()), Some(ENVIRONMENT.to_owned()), why))
}

/// Refuses what has our prefix and no key behind it: the config crate would say of it that an identifier is invalid.
fn refuse_names_of_nothing(environment: &Map<String, String>) -> Result<(), SettingsError> {
    let is_a_name =
        |rest: &str| rest.split("__").all(|part| part.starts_with(|first: char| first.is_ascii_alphabetic()));
    let names_nothing = |name: &&String| name.strip_prefix(ENV_PREFIX).is_some_and(|rest| !is_a_name(rest));
    let Some(name) = environment.keys().filter(names_nothing).min() else { return Ok(()) };
    let why = format!("it names no setting; write it as {ENV_PREFIX}DELAY__LEAD");
    Err(SettingsError::new(Some(name.clone()), Some(ENVIRONMENT.to_owned()), why))
}

/// `ORDER_TIMEOUT_DATABASE__ANYTHING`, where there is such a section, and `ORDER_TIMEOUT_DATABASE_URL`, where there is
/// such a key.
fn name_meant_by(name: &str, known: &[String]) -> Option<String> {
    let rest = name.strip_prefix(ENV_PREFIX_CUT_SHORT).filter(|rest| !rest.starts_with('_'))?;
    let written = rest.to_lowercase();
    let section = written.split_once("__").map(|(section, _)| format!("{section}."));
    if section.is_some_and(|section| known.iter().any(|key| key.starts_with(&section))) {
        return Some(format!("{ENV_PREFIX}{rest}"));
    }
    let key = known.iter().find(|key| key.replace('.', "_") == written)?;
    Some(format!("{ENV_PREFIX}{}", key.replace('.', "__").to_uppercase()))
}

/// Text as it was written; what it must be is said by the setting it is for.
fn value_from(origin: &str, key: &str, text: &str) -> Result<Value, SettingsError> {
    let origin = origin.to_owned();
    if key == RINGS {
        let why = "its elements are tables, which can be written only in a file (--config)".to_owned();
        return Err(SettingsError::new(Some(key.to_owned()), Some(origin), why));
    }
    if LISTS.contains(&key) {
        let parts: Vec<String> = match text.trim() {
            "" => Vec::new(),
            text => text.split(',').map(|part| part.trim().to_owned()).collect(),
        };
        return Ok(Value::new(Some(&origin), parts));
    }
    Ok(Value::new(Some(&origin), text))
}

/// Refuses keys that `config/default.toml` does not have. Done here rather than by serde so that the sentence can say
/// where the key stands and what was probably meant.
fn refuse_unknown_keys(origins: &Origins) -> Result<(), SettingsError> {
    let known = every_key();
    let Some((key, origin)) = origins.iter().find(|(key, _)| !known.contains(key)) else {
        return Ok(());
    };
    let likeness = |name: &str| strsim::normalized_damerau_levenshtein(name, key);
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    // The section alone makes no likeness.
    let is_like = |name: &&String| strsim::normalized_damerau_levenshtein(&last(name), &last(key)) >= LEAST_LIKENESS;
    let meant = known.iter().filter(is_like).max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let meant = meant.map_or_else(String::new, |name| format!("; did you mean {name}?"));
    let why = format!("there is no such setting{meant}");
    Err(SettingsError::new(Some(key.clone()), origin.clone(), why))
}

/// Refuses fractions and truth values, which no setting has: the config crate would round the former and take the latter
/// for a number or a word.
fn refuse_kinds_of_no_setting(root: &Value) -> Result<(), SettingsError> {
    let leaves = elements("", root);
    let mut found = leaves.iter().filter_map(|(key, value)| match &value.kind {
        ValueKind::Float(fraction) => Some((key, value, format!("{fraction} is a fraction"))),
        ValueKind::Boolean(truth) => Some((key, value, format!("{truth} is a truth value"))),
        _ => None,
    });
    let Some((key, value, found)) = found.next() else { return Ok(()) };
    let why = format!("{found}; write a whole number, or a text in quotes, as config/default.toml has it");
    Err(SettingsError::new(Some(key.clone()), value.origin().map(str::to_owned), why))
}

/// The keys that `config/default.toml` has.
pub(super) fn every_key() -> Vec<String> {
    let defaults = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml)).build();
    let defaults = defaults.expect("config/default.toml is tested to be valid");
    leaf_keys(&defaults.cache).into_iter().map(|(key, _)| key).collect()
}

/// Every key that holds a value rather than a section, with the origin of its value.
fn leaf_keys(root: &Value) -> Origins {
    leaves("", root).into_iter().map(|(key, value)| (key, value.origin().map(str::to_owned))).collect()
}

/// What stands beneath `key` and is no section, by its key, in the keys' order; a list counts as one.
pub(super) fn leaves<'a>(key: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    let ValueKind::Table(table) = &value.kind else { return vec![(key.to_owned(), value)] };
    let dot = if key.is_empty() { "" } else { "." };
    let mut leaves: Vec<_> =
        table.iter().flat_map(|(name, value)| leaves(&format!("{key}{dot}{name}"), value)).collect();
    leaves.sort_by(|(a, _), (b, _)| a.cmp(b));
    leaves
}

/// The same, and the elements of lists by their numbers.
fn elements<'a>(key: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    let of_leaf = |(key, value): (String, &'a Value)| match &value.kind {
        ValueKind::Array(list) => {
            (0..).zip(list).flat_map(|(number, value)| elements(&format!("{key}[{number}]"), value)).collect()
        }
        _ => vec![(key, value)],
    };
    leaves(key, value).into_iter().flat_map(of_leaf).collect()
}

fn explain(error: &ConfigError) -> SettingsError {
    match error {
        ConfigError::Type { origin, unexpected, expected, key } => {
            // An address may hold a password, so its value is never repeated.
            let secret = key.as_deref().is_some_and(|key| key.ends_with("url"));
            let found = if secret { "another kind of value".to_owned() } else { unexpected.to_string() };
            let why = format!("expected {expected}, found {found}");
            SettingsError::new(key.as_deref().map(written_key), origin.clone(), why)
        }
        ConfigError::At { error, origin, key } => {
            let inner = explain(error);
            let key = key.as_deref().map(written_key).or(inner.key);
            SettingsError::new(key, origin.clone().or(inner.origin), inner.why)
        }
        ConfigError::FileParse { uri, cause } => {
            // Between its first and its last line the parser quotes the line that is wrong, password and all.
            let text = cause.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let place = lines.first().copied().unwrap_or_default();
            let what = lines.last().copied().filter(|_| lines.len() > 1).unwrap_or_default();
            SettingsError::new(None, uri.clone(), format!("the file is not valid: {place}: {what}"))
        }
        ConfigError::NotFound(key) => SettingsError::new(Some(written_key(key)), None, "is missing; add it".to_owned()),
        other => SettingsError::plain(mend(other.to_string())),
    }
}

/// serde's words for a value of the wrong form, with what to write instead.
fn mend(text: String) -> String {
    if text.ends_with("expected a duration") {
        return text + "; write a number and its unit, such as 3s or 250ms";
    }
    if let Some(found) = text.strip_suffix("expected a sequence") {
        return format!("{found}expected a list; write it in brackets, such as {LIST_FORM}");
    }
    match text.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected ")) {
        Some((word, words)) => format!("{word} is none of its words; write {words}").replace('`', "\""),
        None => text,
    }
}

/// The config crate leaves out the dot behind an index.
fn written_key(key: &str) -> String {
    let mut written = String::new();
    for (index, character) in key.char_indices() {
        if index > 0 && key[..index].ends_with(']') && character.is_alphanumeric() {
            written.push('.');
        }
        written.push(character);
    }
    written
}
