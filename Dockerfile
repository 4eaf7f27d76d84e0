# syntax=docker/dockerfile:1

# vramq-worker and vramq in one small image. CUDA libraries are opened at run time,
# so the same binary serves CPU and GPU: docker-compose.yml gives the GPU worker a
# base image that holds them.
ARG RUNTIME=debian:bookworm-slim

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# The caches survive a change of the sources, so the binaries are copied out of them.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin vramq-worker --bin vramq \
    && install -D -t /out target/release/vramq-worker target/release/vramq

FROM ${RUNTIME}
# Root certificates for amqps:// and for the Hugging Face hub.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/vramq vramq
COPY --from=build /out/ /usr/local/bin/
USER vramq
WORKDIR /var/lib/vramq
# The worker drains on SIGTERM: it finishes what it has, replies, acknowledges, and ends.
STOPSIGNAL SIGTERM
ENTRYPOINT ["vramq-worker"]
CMD ["run", "--config", "/etc/vramq/worker.toml"]
