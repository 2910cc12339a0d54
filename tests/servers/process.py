"""Start a server as a subprocess, wait until it answers, end it by its pid."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def find_binary(name: str) -> str:
    """Path of a command that came with a wheel: beside the running interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on PATH")
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and what a client needs to reach it."""

    endpoint_url: str
    key: str
    secret: str
    process: subprocess.Popen[bytes]

    @property
    def storage_options(self) -> dict[str, Any]:
        """In the form that s3fs takes."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    def client(self) -> Any:
        """A boto3 client; the caller closes it."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def make_bucket(self, name: str) -> str:
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )


def wait_until_up(process: subprocess.Popen[bytes], endpoint_url: str, *, log: Path, timeout_s: float = 60.0) -> None:
    """Return once any HTTP answer comes back; an exited process shows its log."""
    host, port = urlsplit(endpoint_url).hostname, urlsplit(endpoint_url).port
    assert host is not None
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"server exited with {process.returncode}:\n{log.read_text(errors='replace')}")
        connection = http.client.HTTPConnection(host, port, timeout=2)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                tail = log.read_text(errors="replace")
                raise RuntimeError(f"server is not up after {timeout_s} s:\n{tail}") from None
            time.sleep(0.1)
        finally:
            connection.close()
