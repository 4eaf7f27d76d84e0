# Somebody who reads the README: a user without privileges who has Rust, Python and curl. tests/compose/readme.py puts the clone into the
# home folder; tests/compose/run.py has the README's first commands run here.
FROM rust:1.95-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10002 --create-home --shell /bin/bash reader
USER reader
# Rust's image has Cargo's folder for root.
ENV CARGO_HOME=/home/reader/.cargo \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PATH=/home/reader/venv/bin:/home/reader/.cargo/bin:$PATH
# Debian's Python takes packages in an environment only.
ARG OPENAI=openai
RUN mkdir /home/reader/vramq \
    && python3 -m venv /home/reader/venv \
    && pip install --disable-pip-version-check --no-cache-dir --quiet "$OPENAI"
WORKDIR /home/reader/vramq
CMD ["sleep", "infinity"]
