# Builds `order-timeout` and the example shop. `docker compose up --build` does it for you; by hand:
#
#     docker build -t order-timeout:local .
#     docker run --rm order-timeout:local --help
#
# Needs BuildKit, the default builder since Docker Engine 23. Base images are named by tag here; before a release
# `scripts/pin-images` writes their digests behind the tags.

FROM rust:1.95-bookworm AS builder
WORKDIR /build

# Everything at once, tests and examples included: Cargo refuses a manifest that names a file which is
# not there, and the crate embeds config/default.toml, sql/ and migrations/ when it is compiled.
COPY . .
# For --version; the build context has no git history: --build-arg ORDER_TIMEOUT_COMMIT="$(git log -1 --format="%h %cs")"
ARG ORDER_TIMEOUT_COMMIT

# Dependencies are cached in cache mounts, not in a layer built from empty stub sources: stubs have to
# repeat every [[bin]], [[example]] and [[bench]] of Cargo.toml and break when one is added, and such a
# layer starts from nothing when one dependency changes. The price: a builder that keeps no state (most
# hosted CI) compiles everything.
#
# sharing=locked: compose may build this image for several services at once, and two Cargos must not write
# one target folder.
#
# touch: Cargo decides by modification time what to compile. A checkout older than the cached build, with
# other contents, would look finished, and the image would hold the other version's binary.
#
# install: what stays in a cache mount is not part of the image, so the binaries are copied out in the same step.
RUN --mount=type=cache,id=order-timeout-registry,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=order-timeout-target,target=/build/target,sharing=locked \
    touch src/lib.rs src/main.rs examples/shop.rs \
    && cargo build --release --locked --bin order-timeout --example shop \
    && install -D -t /out target/release/order-timeout target/release/examples/shop \
    && cargo run --release --locked --example sbom -- /out/doc

# The same Debian release as the builder: a binary linked against a newer libc would not start.
FROM debian:bookworm-slim

# For amqps:// and for Postgres over TLS: the worker trusts what the system trusts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*

COPY --from=builder /out/order-timeout /out/shop /usr/local/bin/
# What the programs are made of, and the licence texts that have to go with them.
COPY --from=builder /out/doc /usr/share/doc/order-timeout

# A number, not a name, so that Kubernetes' runAsNonRoot can see that it is not root. It owns no file:
# nothing here is written at run time.
USER 10001:10001

# No HEALTHCHECK: `setup` and the shop run from this image, too, and have no health to ask for. For a worker it is
#
#     HEALTHCHECK CMD ["order-timeout", "health", "--live"]
#
# or, in Kubernetes, probes of /livez and /readyz with ORDER_TIMEOUT__HTTP__LISTEN=0.0.0.0:9394 (docs/OPERATING.md,
# "Health").

# The exec form: the worker is process 1 and gets SIGTERM itself, on which it drains. It needs no init
# process, for it handles that signal and starts no children. Give it longer to stop than its own
# `shutdown_grace` (25 s), or Docker kills it after 10.
ENTRYPOINT ["order-timeout"]
CMD ["worker"]
