//! Where the tests find the repository and the program under test.
//!
//! The compiler tells the program's path only to the test programs of its own package, and cargo tells it to the test
//! programs that it runs. So it is looked up when a test needs it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// How cargo names the path of the binary in the environment of tests and benches (since 1.94).
const PROGRAM_VARIABLE: &str = "CARGO_BIN_EXE_order-timeout";

/// The root of the repository.
pub fn repository() -> &'static Path {
    // crates/testkit
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a crate two folders below the root")
}

/// The program `order-timeout` that was built with this test program.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let named = std::env::var_os(PROGRAM_VARIABLE).map_or_else(program_beside_tests, PathBuf::from);
        assert!(named.is_file(), "there is no program {}; build it with cargo build", named.display());
        named
    })
}

/// For test programs that cargo does not run: `scripts/chaos`, a debugger. They are in the folder `deps` beside it.
fn program_beside_tests() -> PathBuf {
    let test_program = std::env::current_exe().expect("the path of this program");
    test_program.ancestors().nth(2).expect("a folder of the build").join("order-timeout")
}

/// The folder for the files of tests, in the build folder.
pub fn scratch_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // target/debug/order-timeout
        let build_folder = program().ancestors().nth(2).expect("a folder of the build");
        let folder = build_folder.join("tmp");
        std::fs::create_dir_all(&folder).expect("the folder for the files of tests");
        folder
    })
}
