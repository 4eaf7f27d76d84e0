# A stand-in of python:3.13.5-slim-bookworm: Debian 13 has the same Python. The image's entry is `python3`.
FROM debian:trixie-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip \
    && rm -rf /var/lib/apt/lists/*
CMD ["python3"]
