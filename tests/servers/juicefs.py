"""JuiceFS' S3 gateway (MinIO's front end) over a folder: the everyday real S3 server.

Known quirks: ignores ``If-None-Match`` and ``If-Match``; multi-delete demands Content-MD5; refuses
``..`` in keys.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.servers.process import S3Server, find_binary, free_port, start, wait_until_up

KEY = "test-access-key"
SECRET = "test-secret-key"


def start_juicefs(folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> S3Server:
    """Format a new volume in ``folder`` (unless one is there) and serve it; the caller stops it."""
    juicefs = find_binary("juicefs")
    folder.mkdir(parents=True, exist_ok=True)
    meta = f"sqlite3://{folder}/meta.db"
    log = folder / "gateway.log"
    if not (folder / "meta.db").exists():
        subprocess.run(
            [juicefs, "format", meta, "volume", "--storage", "file", "--bucket", f"{folder}/objects/"]
            + ["--trash-days", "0"],
            check=True,
            capture_output=True,
        )
    port = port or free_port()
    process = start(
        [juicefs, "gateway", meta, f"{host}:{port}", "--multi-buckets", "--keep-etag"]
        # Without these, loads differ from run to run by the gateway's own read-ahead.
        + ["--cache-size", "0", "--prefetch", "0", "--buffer-size", "1024"]
        + ["--cache-dir", f"{folder}/cache", "--no-usage-report", "--log", str(folder / "juicefs.log")],
        log=log,
        env={"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET},
    )
    endpoint_url = f"http://{host}:{port}"
    wait_until_up(process, endpoint_url, log=log)
    return S3Server(endpoint_url=endpoint_url, key=KEY, secret=SECRET, process=process)
