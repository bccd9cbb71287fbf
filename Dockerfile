# Builds `order-timeout` and the example shop. `docker compose up --build` uses it; by hand:
#
#     docker build -t order-timeout:local .
#     docker run --rm order-timeout:local --help
#
# Needs BuildKit, the default builder since Docker Engine 23. Base images are named by tag here; before a release
# `scripts/pin-images` appends their digests to the tags.

FROM rust:1.95-bookworm AS builder
WORKDIR /build

# Everything at once, tests and examples included: Cargo rejects a manifest that names a missing file, and the crate
# embeds config/default.toml, sql/ and migrations/ when it is compiled.
COPY . .
# For --version, because the build context has no git history:
# --build-arg ORDER_TIMEOUT_COMMIT="$(git log -1 --format="%h %cs")"
ARG ORDER_TIMEOUT_COMMIT

# Dependencies are cached in cache mounts, not in a layer built from empty stub sources. Stubs must repeat every
# [[bin]], [[example]] and [[bench]] of Cargo.toml and break when one is added, and such a layer is rebuilt from nothing
# when one dependency changes. The price: a builder that keeps no state (most hosted CI) compiles everything.
#
# sharing=locked: compose may build this image for several services at once, and two Cargos must not write
# one target folder.
#
# touch: Cargo decides by modification time what to compile. A checkout that is older than the cached build but has
# other contents would look up to date, and the image would contain the other version's binary.
#
# install: the contents of a cache mount are not part of the image, so the same step copies the binaries out of it.
RUN --mount=type=cache,id=order-timeout-registry,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=order-timeout-target,target=/build/target,sharing=locked \
    touch src/lib.rs src/main.rs crates/*/src/lib.rs examples/shop.rs \
    && cargo build --release --locked -p order-timeout -p order-timeout-demo -p order-timeout-tools \
        --bin order-timeout --bin shop --bin sbom \
    && install -D -t /out target/release/order-timeout target/release/shop \
    && target/release/sbom /out/doc

# The same Debian release as the builder: a binary linked against a newer libc would not start.
FROM debian:bookworm-slim

# For amqps:// and for Postgres over TLS: the worker uses the system trust store.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*

COPY --from=builder /out/order-timeout /out/shop /usr/local/bin/
# The software bill of materials, and the licence texts that must be distributed with the programs.
COPY --from=builder /out/doc /usr/share/doc/order-timeout

# A number, not a name, so that Kubernetes' runAsNonRoot can verify that it is not root. The user owns no file, because
# nothing here is written at run time.
USER 10001:10001

# No HEALTHCHECK, because `setup` and the shop also run from this image and have no health endpoint. For a worker it is
#
#     HEALTHCHECK CMD ["order-timeout", "health", "--live"]
#
# or, in Kubernetes, probes of /livez and /readyz with ORDER_TIMEOUT__HTTP__LISTEN=0.0.0.0:9394
# (docs/operating/monitor.md, "Health").

# The exec form: the worker is process 1, receives SIGTERM itself, and drains. It needs no init process, because it
# handles that signal and starts no children. Set a stop timeout longer than `shutdown_grace` (25 s): by default Docker
# kills it after 10.
ENTRYPOINT ["order-timeout"]
CMD ["worker"]
