"""moto's S3 server: slow, in memory, honours ``If-None-Match`` and ``If-Match``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.process import S3Server, free_port, start, wait_until_up


def start_moto(folder: Path, *, port: int | None = None) -> S3Server:
    """Serve; ``folder`` takes the log. The caller stops it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "moto.log"
    port = port or free_port()
    script = Path(__file__).with_name("atomic_moto.py")
    # -P: the folder of the script holds a moto.py of its own.
    process = start([sys.executable, "-P", str(script), "-H", "127.0.0.1", "-p", str(port)], log=log)
    endpoint_url = f"http://127.0.0.1:{port}"
    wait_until_up(process, endpoint_url, log=log)
    return S3Server(endpoint_url=endpoint_url, key="test-access-key", secret="test-secret-key", process=process)
