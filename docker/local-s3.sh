#!/bin/sh
# Stands in for MinIO's image where none can be pulled: `minio server DIR` and `mc ready local` by JuiceFS' gateway,
# which is MinIO's S3 front end.
set -eu
case "$1" in
server)
    meta="sqlite3://$2/meta.db"
    mkdir -p "$2"
    juicefs format "$meta" volume --storage file --bucket "$2/objects/" --trash-days 0
    exec juicefs gateway "$meta" 0.0.0.0:9000 --multi-buckets --keep-etag --cache-dir "$2/cache" --no-usage-report
    ;;
ready)
    exec python -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:9000/minio/health/live", timeout=5)'
    ;;
*)
    echo "unknown command: $1" >&2
    exit 2
    ;;
esac
