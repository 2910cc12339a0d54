"""Faults on the wire before a real server: requests are handed on as they are, answers come back as they are."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.servers.faults import Answer, FaultyS3, Request
from tests.servers.process import S3Server

# The proxy's own server says these.
_OF_THE_CONNECTION = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}


class FaultProxy(FaultyS3):
    """``objects`` and ``uploads`` stay empty. Signatures hold, since they cover the Host that the client names."""

    def __init__(self, upstream: S3Server) -> None:
        super().__init__()
        self._upstream = upstream
        parts = urlsplit(upstream.endpoint_url)
        self._address = (parts.hostname or "", parts.port or 80)

    @property
    def storage_options(self) -> dict[str, Any]:
        return {**self._upstream.storage_options, "endpoint_url": self.endpoint_url}

    def answer(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(*self._address, timeout=30)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name not in ("connection", "expect", "content-length"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            response = connection.getresponse()
            body = response.read()
            told = response.getheader("content-length") if request.method == "HEAD" else None
            headers = {name: value for name, value in response.getheaders() if name.lower() not in _OF_THE_CONNECTION}
            return Answer(response.status, body, headers, None if told is None else int(told))
        finally:
            connection.close()


@contextmanager
def fault_proxy(upstream: S3Server) -> Iterator[FaultProxy]:
    server = FaultProxy(upstream)
    server.start()
    try:
        yield server
    finally:
        server.stop()
