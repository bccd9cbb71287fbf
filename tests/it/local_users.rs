//! Other users of the machine cannot log in to the private servers that scripts and tests start, nor read the
//! credentials.
//!
//! What it may not do: touch a server that it did not start. It needs root, because only root can act as another user.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::bare;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{linux, with_parts};
use tempfile::TempDir;

use secrecy::ExposeSecret;

/// `nobody` on every Linux.
const OTHER_USER: u32 = 65_534;

/// Accounts and passwords that an intruder would try: those of other servers, of this repository, and none.
const DATABASE_ACCOUNTS: [&str; 6] = [
    "postgres",
    "postgres:postgres",
    "postgres:services-dev",
    "order-timeout-dev",
    "nobody",
    "order_timeout:order-timeout-dev",
];
const BROKER_ACCOUNTS: [&str; 5] =
    ["guest:guest", "guest:", "order-timeout:services-dev", "order-worker:worker-dev", "order-publisher:publisher-dev"];

/// The program in a place where another user can run it: the build directory may be closed to that user.
struct Program {
    folder: TempDir,
}

impl Program {
    fn open_to_all() -> Self {
        let folder = open_folder(0o755);
        let copy = folder.path().join("order-timeout");
        std::fs::copy(bare().get_program(), &copy).unwrap();
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).unwrap();
        Self { folder }
    }

    /// Runs the program as the other user and returns its standard error. The address is in the environment, as in real
    /// use.
    fn called_by_other_user(&self, setting: &str, url: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(self.folder.path().join("order-timeout"));
        command.env_clear().env(setting, url).args(["--set", "log.filter=off"]).args(arguments);
        String::from_utf8_lossy(&as_other_user(command, self.folder.path()).stderr).into_owned()
    }

    /// Logs in to a database.
    fn asks_database(&self, url: &str) -> String {
        self.called_by_other_user("ORDER_TIMEOUT__DATABASE__URL", url, &["parked", "list"])
    }

    /// Logs in to a broker.
    fn asks_broker(&self, url: &str) -> String {
        let arguments = ["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", "--in", "5m"];
        self.called_by_other_user("ORDER_TIMEOUT__AMQP__URL", url, &arguments)
    }
}

fn open_folder(mode: u32) -> TempDir {
    let folder = tempfile::Builder::new().prefix("order-timeout-test-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(mode)).unwrap();
    folder
}

fn as_other_user(mut command: Command, folder: &Path) -> Output {
    command.uid(OTHER_USER).gid(OTHER_USER).current_dir(folder).output().unwrap()
}

/// Whether this process may act as another user; prints why not.
fn is_root(test: &str) -> bool {
    let root = linux::is_root();
    if !root {
        skipped(test, "only root can act as another user");
    }
    root
}

/// Collects the arguments of every process of the machine.
struct ArgumentWatch {
    stop: Arc<AtomicBool>,
    seen: JoinHandle<BTreeSet<String>>,
}

impl ArgumentWatch {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let seen = std::thread::spawn(move || {
            let mut seen = BTreeSet::new();
            while !stopped.load(Ordering::Relaxed) {
                // One that has ended meanwhile has no arguments any more.
                let processes = linux::all_processes().unwrap();
                seen.extend(processes.into_iter().filter_map(|pid| linux::arguments(pid).ok()));
                std::thread::sleep(Duration::from_millis(5));
            }
            seen
        });
        Self { stop, seen }
    }

    /// Insists that programs with `expected` in their arguments were seen, and none with one of the secrets.
    fn assert_shows_no(self, secrets: &[String], expected: &[&str]) {
        self.stop.store(true, Ordering::Relaxed);
        let seen = self.seen.join().unwrap();
        for program in expected {
            assert!(seen.iter().any(|arguments| arguments.contains(program)), "{program} was not seen");
        }
        for secret in secrets {
            assert!(secret.len() == 32, "a random secret");
            let shown = seen.iter().filter(|arguments| arguments.contains(secret.as_str())).count();
            assert_eq!(shown, 0, "a secret is in a process' arguments");
        }
    }
}

fn folder_of(server: &Private) -> PathBuf {
    server.state().parent().unwrap().to_owned()
}

/// Runs `scripts/private` with these arguments. Returns whether it succeeded, and its standard error.
fn private_script(arguments: &[&str]) -> (bool, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/private");
    let output = Command::new(script).args(arguments).process_group(0).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The other user can read nothing below the server's folders except the empty marker file.
fn assert_files_are_closed(server: &Private) {
    let folder = folder_of(server);
    let state = server.state().canonicalize().unwrap();
    let mut find = Command::new("find");
    find.args([&folder, &state]).args(["-type", "f", "-size", "+0", "-readable"]);
    let readable = String::from_utf8_lossy(&as_other_user(find, Path::new("/")).stdout).into_owned();
    assert_eq!(readable, "", "another user can read this");
    for (path, mode) in [(folder.join("env"), 0o600), (state, 0o700)] {
        let found = std::fs::metadata(&path).unwrap().mode() & 0o777;
        assert_eq!(found, mode, "{}: {found:o}", path.display());
    }
}

/// The server runs neither as root nor as the account that owns the machine's own servers.
fn assert_runs_as_own_account(server: &Private) {
    let account = linux::account(server.recorded("PID").parse().unwrap()).unwrap();
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap();
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let name =
        accounts.lines().map(fields).find(|fields| fields[2] == account.to_string()).map(|fields| fields[0].clone());
    assert_eq!(name.as_deref(), Some("order-timeout-dev"));
}

#[test]
fn other_users_cannot_use_private_postgres() {
    const TEST: &str = "local_users::other_users_cannot_use_private_postgres";
    if !is_root(TEST) || !Private::can_have_standby(TEST) {
        return;
    }
    let program = Program::open_to_all();
    let sockets = open_folder(0o1777);
    let socket_option = format!("unix_socket_directories={}", sockets.path().display());
    let watch = ArgumentWatch::start();
    let postgres = Private::postgres(&["-c", &socket_option]);
    let standby = postgres.standby();
    let password = postgres.recorded("PASSWORD");
    assert_eq!(standby.recorded("PASSWORD"), password);

    let url = postgres.url.clone().into();
    let socket = |url: &str| format!("{url}?host={}", sockets.path().display());
    for account in DATABASE_ACCOUNTS {
        let tried = with_parts(&url, Some(account), None, None);
        for tried in [tried.expose_secret().to_owned(), socket(tried.expose_secret())] {
            let said = program.asks_database(&tried);
            assert!(said.contains("check the user and password"), "{tried}: {said}");
        }
    }
    // The same calls succeed with the password, so the password was what kept the other user out.
    for address in [postgres.url.clone(), socket(&postgres.url), standby.url.clone()] {
        let said = program.asks_database(&address);
        assert!(said.contains("migration"), "{said}");
    }
    for server in [&postgres, &standby] {
        assert_files_are_closed(server);
        assert_runs_as_own_account(server);
    }

    let folder = folder_of(&postgres);
    postgres.kill();
    let copy = format!("{}-copy", folder.display());
    let (started, said) = private_script(&["postgres", "start", &copy, "--standby-of", folder.to_str().unwrap()]);
    assert!(!started && said.contains("pg_basebackup") && !said.contains(&password), "{said}");
    assert!(private_script(&["postgres", "remove", &copy]).0);
    watch.assert_shows_no(&[password], &["initdb", "pg_basebackup"]);
}

#[test]
fn other_users_cannot_use_private_rabbitmq() {
    if !is_root("local_users::other_users_cannot_use_private_rabbitmq") {
        return;
    }
    let program = Program::open_to_all();
    let watch = ArgumentWatch::start();
    let broker = Private::broker(&[]);
    let secrets = ["PASSWORD", "COOKIE"].map(|name| broker.recorded(name));
    let url = broker.url.clone().into();
    for account in BROKER_ACCOUNTS {
        let said = program.asks_broker(with_parts(&url, Some(account), None, None).expose_secret());
        assert!(said.contains("refuses user"), "{account}: {said}");
    }
    let said = program.asks_broker(&broker.url);
    assert!(!said.contains("refuses user"), "the password lets in: {said}");
    assert_files_are_closed(&broker);
    assert_runs_as_own_account(&broker);
    broker.change_password(&secrets[0]);
    broker.restart();
    watch.assert_shows_no(&secrets, &["rabbitmq-server", "epmd", "new-password"]);
}

#[test]
fn private_servers_listen_on_loopback_alone() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (kind, option) in [("postgres", ["-c", "listen_addresses=*"]), ("broker", ["--plugin", "rabbitmq_management"])]
    {
        let folder = folder.join(format!("{kind}-open-{}", uuid::Uuid::now_v7().simple()));
        let folder = folder.to_str().unwrap();
        let (started, said) = private_script(&[&[kind, "start", folder], &option[..]].concat());
        let (removed, _) = private_script(&[kind, "remove", folder]);
        assert!(!started && said.contains("connections from other machines"), "{kind}: {said}");
        assert!(removed, "{kind}");
    }
}
