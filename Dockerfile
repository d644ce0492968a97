# One image for every service: `docker run ullage master`, `... node`, `... status`.
FROM python:3.11-slim

# gcc compiles what stands between OpenBLAS and MLX, once, at the first start of a shard.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ullage
COPY requirements.lock pyproject.toml README.md ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY protos protos
COPY services services
COPY migrations migrations
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .

ENV ULLAGE_STATE_DIR=/var/lib/ullage/state \
    ULLAGE_MODELS_DIR=/var/lib/ullage/models
VOLUME /var/lib/ullage
ENTRYPOINT ["ullage"]
CMD ["--help"]
