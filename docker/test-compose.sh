#!/usr/bin/env bash
# Run the S3 tests of compose.yaml; exit with the test service's exit code; leave nothing running.
set -euo pipefail
cd "$(dirname "$0")"

compose() { ${COMPOSE:-docker compose} -p cloudckpt-test -f compose.yaml "$@"; }

finish() {
    local code=$?
    # A server that does not get healthy says why in its own log.
    if ((code)); then compose logs --tail 50 s3 bucket || true; fi
    compose down --volumes --remove-orphans
    exit "$code"
}
trap finish EXIT

# Not `run test` or `--exit-code-from`: both end or start too early when another service is meant to finish.
compose up -d
test=$(compose ps -aq test)
docker logs --follow "$test"
exit "$(docker wait "$test")"
