#!/usr/bin/env bash
# Build the images of compose.yaml without pulling any: a Debian tree with Python as the base, and an S3 server that
# stands in for MinIO. For machines that reach package registries but no image registry. Needs root and debootstrap.
#
#   docker/local-images.sh && S3_IMAGE=cloudckpt-local-s3 S3_CONDITIONS=no make test-compose
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$tree" "$mirror" >"$tree.log" 2>&1 ||
    { tail -n 20 "$tree.log"; exit 1; }
rm -rf "$tree.log" "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
# The machine may trust a certificate authority of its own, for its package mirror.
certificates=/etc/ssl/certs/ca-certificates.crt
cp "$certificates" "$tree$certificates"
tar -C "$tree" -c . | docker import --change "ENV PIP_CERT=$certificates" - cloudckpt-local-base

# The classic builder needs no plugin; the host's network is there even where the daemon cannot forward packets.
export DOCKER_BUILDKIT=0
docker build --quiet --network host --build-arg BASE=cloudckpt-local-base -t cloudckpt-test -f docker/Dockerfile .
docker build --quiet -t cloudckpt-local-s3 -f docker/local-s3.Dockerfile .
