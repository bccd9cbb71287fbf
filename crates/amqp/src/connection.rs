//! An open connection whose I/O thread is joined after use, never detached.
//!
//! Opens and closes nothing: that is `connect.rs`.

use std::ops::Deref;
use std::sync::mpsc;
use std::thread::Builder;

use lapin::Connection;

/// Enough for the thread that waits, which parses nothing.
const STACK_BYTES: usize = 2_097_152;

/// A lapin connection that may be dropped anywhere and at any time.
///
/// lapin's own detaches its I/O thread when it is dropped, which is when the thread ends. glibc may then read the
/// thread's stack after it was unmapped (<https://sourceware.org/bugzilla/show_bug.cgi?id=19951>), a segmentation fault.
/// `tests/threads` counts such detaches.
#[derive(Debug)]
pub struct JoinedConnection {
    /// `None` only while it is dropped.
    open: Option<Connection>,
}

impl JoinedConnection {
    pub(crate) fn new(connection: Connection) -> Self {
        Self { open: Some(connection) }
    }
}

impl Deref for JoinedConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.open.as_ref().expect("only a drop takes it")
    }
}

impl Drop for JoinedConnection {
    fn drop(&mut self) {
        if let Some(connection) = self.open.take() {
            join(connection);
        }
    }
}

/// Drops the connection and joins its I/O thread, on a thread of its own. That may take minutes: a channel may be in use
/// still, or the broker may not answer. A blocking task would keep the runtime from ending for as long.
fn join(connection: Connection) {
    let (sender, receiver) = mpsc::sync_channel::<Connection>(1);
    let wait = move || {
        if let Ok(connection) = receiver.recv() {
            // Drops the connection first. Its error has been reported to those that used it.
            let _joined = connection.run();
        }
    };
    // Without a thread (the process has no more) it is dropped here, and its I/O thread detached.
    if let Ok(waiting) = Builder::new().name("amqp-join".to_owned()).stack_size(STACK_BYTES).spawn(wait) {
        // Detached while it certainly runs: it waits for the connection.
        drop(waiting);
        let _received = sender.send(connection);
    }
}
