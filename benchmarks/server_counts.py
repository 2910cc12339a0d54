"""What the S3 server itself counts: the same figures for every client, whatever the client claims.

JuiceFS' gateway is MinIO's front end and has its Prometheus page, behind a token signed with the secret key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
import urllib.request
from dataclasses import dataclass, field

_PAGE = "/minio/prometheus/metrics"  # the older of two pages; the newer one is cached for seconds
_LINE = re.compile(r'^(?P<name>s3_\w+)(?:\{api="(?P<api>\w+)"\})? (?P<value>\S+)$', re.MULTILINE)
_PUTS = ("putobject", "putobjectpart", "newmultipartupload", "completemutipartupload", "copyobject")  # sic


@dataclass(frozen=True)
class ServerCounts:
    """``requests`` by S3 call; ``received`` and ``sent`` in bytes, seen from the server, bodies only."""

    requests: dict[str, int] = field(default_factory=dict)
    received: int = 0
    sent: int = 0

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_puts(self) -> int:
        """Everything that is billed as a PUT."""
        return sum(self.requests.get(api, 0) for api in _PUTS)

    def since(self, earlier: ServerCounts) -> ServerCounts:
        grown = {api: n - earlier.requests.get(api, 0) for api, n in self.requests.items()}
        return ServerCounts(
            {api: n for api, n in grown.items() if n}, self.received - earlier.received, self.sent - earlier.sent
        )


def read_counts(endpoint_url: str, key: str, secret: str) -> ServerCounts:
    request = urllib.request.Request(endpoint_url + _PAGE, headers={"Authorization": f"Bearer {_token(key, secret)}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        page = answer.read().decode()
    requests: dict[str, int] = {}
    received = sent = 0
    for line in _LINE.finditer(page):
        value = int(float(line["value"]))
        if line["name"] == "s3_requests_total":
            requests[line["api"]] = value
        elif line["name"] == "s3_rx_bytes_total":
            received = value
        elif line["name"] == "s3_tx_bytes_total":
            sent = value
    return ServerCounts(requests, received, sent)


def _token(key: str, secret: str) -> str:
    """The JSON web token that MinIO's metrics pages ask for."""
    head = {"alg": "HS512", "typ": "JWT"}
    claims = {"exp": int(time.time()) + 600, "sub": key, "iss": "prometheus"}
    signed = b".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
    return b".".join([signed, _base64(hmac.new(secret.encode(), signed, hashlib.sha512).digest())]).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
