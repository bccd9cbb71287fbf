//! Stack for the threads that handle messages: the AMQP client parses nested tables by recursion, and a message whose
//! tables are nested deeply would otherwise overflow the stack and end the process.
//!
//! The client parses on a thread that it starts itself, so the stack size can only be set through the environment of
//! the process. The runtime's threads need it as well: they drop what was parsed, which is a recursion too, and
//! `quarantine/` parses messages on them.

/// The environment variable from which std takes the stack size of new threads.
const STACK_SETTING: &str = "RUST_MIN_STACK";
/// Address space, not memory, until it is used. A frame of 128 KiB holds 18 700 tables inside one another with a name of
/// one letter, and 21 800 without a name. Parsing these takes 36 to 38 MiB in a release build and over 200 MiB in a debug
/// build; dropping them takes over 8 MiB in a debug build. glibc keeps 40 MiB of stacks that have become free, so each
/// of these is unmapped soon after its thread has ended (docs/decisions/0065-threads-are-joined.md).
const STACK_BYTES: usize = 268_435_456;

/// Has new threads get a stack that is large enough for every message, unless `RUST_MIN_STACK` is set already. Call it
/// first in `main` of a program that runs a [`Worker`](crate::Worker).
///
/// # Safety
/// No other thread may be running that could read the environment.
#[expect(unsafe_code, reason = "the environment is the only way to that thread's stack")]
pub unsafe fn reserve_for_parsing() {
    if std::env::var_os(STACK_SETTING).is_none() {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(STACK_SETTING, STACK_BYTES.to_string()) };
    }
}

/// Whether [`reserve_for_parsing`] was called, or `RUST_MIN_STACK` is as large.
pub(crate) fn is_reserved() -> bool {
    let bytes = std::env::var(STACK_SETTING).ok().and_then(|bytes| bytes.parse::<usize>().ok());
    bytes.is_some_and(|bytes| bytes >= STACK_BYTES)
}
