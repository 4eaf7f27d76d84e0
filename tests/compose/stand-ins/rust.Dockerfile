# A stand-in of rust:1.95-slim-bookworm: Debian 12 with a linker, and the toolchain that this machine has (its folder is
# the build context).
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV CARGO_HOME=/usr/local/cargo
COPY bin /usr/local/bin
COPY lib /usr/local/lib
RUN cargo --version && rustc --version
