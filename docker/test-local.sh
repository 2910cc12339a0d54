#!/usr/bin/env bash
# `make test-compose` where there is neither a Docker daemon nor an image registry: install Docker from the machine's
# Debian mirror, start a daemon of its own, build the images on the spot, test, stop the daemon.
# Exit code 77: it cannot be done here; the last line says why.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "compose test skipped: $1"
    exit 77
}

((EUID == 0)) || skip "needs root"
grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release || skip "needs Debian 12"
if ! type -P dockerd docker-compose debootstrap >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        docker.io docker-compose debootstrap >/dev/null || skip "Docker cannot be installed"
fi

home=$(mktemp -d)
export DOCKER_HOST=unix://$home/docker.sock
dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$home/pid" --host "$DOCKER_HOST" \
    >"$home/dockerd.log" 2>&1 &
daemon=$!
stop() {
    kill "$daemon" 2>/dev/null && wait "$daemon" || true
    umount "$home/exec/netns/default" 2>/dev/null || true  # the daemon leaves it mounted
    rm -rf "$home" || true
}
trap stop EXIT

for _ in {1..60}; do
    docker info >/dev/null 2>&1 && break
    kill -0 "$daemon" 2>/dev/null || { tail -n 5 "$home/dockerd.log"; skip "the Docker daemon does not start"; }
    sleep 0.5
done
docker info >/dev/null 2>&1 || skip "the Docker daemon does not answer"

docker/local-images.sh || skip "the images cannot be built here (see above)"
export TEST_IMAGE=cloudckpt-test S3_IMAGE=cloudckpt-local-s3 S3_CONDITIONS=no COMPOSE=docker-compose
docker/test-compose.sh
