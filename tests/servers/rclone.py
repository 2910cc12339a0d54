"""``rclone serve s3`` over a folder: answers ranged GETs with 200 and wrong headers."""

from __future__ import annotations

from pathlib import Path

from tests.servers.process import S3Server, find_binary, free_port, start, wait_until_up

KEY = "test-access-key"
SECRET = "test-secret-key"


def start_rclone(folder: Path, *, port: int | None = None) -> S3Server:
    """Serve ``folder/data``, whose folders are the buckets. The caller stops it."""
    data, log = folder / "data", folder / "rclone.log"
    data.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    process = start(
        [find_binary("rclone"), "serve", "s3", str(data), "--addr", f"127.0.0.1:{port}"]
        + ["--auth-key", f"{KEY},{SECRET}", "--config", str(folder / "no-config"), "--vfs-cache-mode", "off"],
        log=log,
    )
    endpoint_url = f"http://127.0.0.1:{port}"
    wait_until_up(process, endpoint_url, log=log)
    return S3Server(endpoint_url=endpoint_url, key=KEY, secret=SECRET, process=process)
