//! The providers against a real HTTP server that answers as their documents say, and as they do not say.
//!
//! The server is in `server.rs`; each other file has the tests of one promise.

mod documents;
mod example;
mod limits;
mod rows;
mod server;
mod setup;
mod signatures;
mod transport;
