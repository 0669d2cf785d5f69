# Debian's Prometheus, in the place of the upstream image of docker-compose.yml: for tests.
FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o nobody -g nogroup /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
