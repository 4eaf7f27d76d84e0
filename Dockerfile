# vramq-worker, vramq and vramq-gateway in one small image. CUDA libraries are opened at run time,
# so the same binary serves CPU and GPU: docker-compose.yml gives the GPU worker a
# base image that holds them. There is no `# syntax=` line: BuildKit of Docker 20.10 and later knows all that is used here,
# and without the line a build needs no other image of the Docker Hub.
ARG RUNTIME=debian:bookworm-slim

FROM rust:1.95-slim-bookworm AS build
# For scripts/sbom.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The caches survive a change of the sources, so the binaries are copied out of them, stripped as in the packages. The licences of
# everything in them, and the bill of materials, are in both images.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bins -p vramq-worker -p vramq-cli -p vramq-gateway -p vramq-inference \
    && install -s -D -t /out target/release/vramq-worker target/release/vramq target/release/vramq-gateway target/release/vramq-run-model \
    && install -D -m 644 -t /notices LICENSE \
    && scripts/sbom /notices

# docker build --target gateway: the same binary without what a GPU needs.
FROM debian:bookworm-slim AS gateway
LABEL org.opencontainers.image.title="vramq-gateway" \
      org.opencontainers.image.description="An HTTP gateway to vramq workers" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/vramq vramq
COPY --from=build /out/vramq-gateway /usr/local/bin/
COPY --from=build /notices/ /usr/share/doc/vramq/
USER vramq
WORKDIR /var/lib/vramq
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=6 \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && printf 'GET /livez HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3 && read -r _ code _ <&3 && [ \"$code\" = 200 ]"]
ENTRYPOINT ["vramq-gateway"]
CMD ["run"]

FROM ${RUNTIME}
LABEL org.opencontainers.image.title="vramq-worker" \
      org.opencontainers.image.description="A GPU-inference worker for RabbitMQ, with the command vramq" \
      org.opencontainers.image.licenses="Apache-2.0"
# Root certificates for amqps:// and for the Hugging Face hub.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/vramq vramq
COPY --from=build /out/ /usr/local/bin/
COPY --from=build /notices/ /usr/share/doc/vramq/
USER vramq
WORKDIR /var/lib/vramq
# The worker drains on SIGTERM: it finishes what it has, replies, acknowledges, and ends.
STOPSIGNAL SIGTERM
# Alive, not ready: a worker that waits for its broker is healthy. The image has no curl, but it has bash.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=6 \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9464 && printf 'GET /livez HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ code _ <&3 && [ \"$code\" = 200 ]"]
ENTRYPOINT ["vramq-worker"]
CMD ["run", "--config", "/etc/vramq/worker.toml"]
