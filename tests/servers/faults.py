"""A small S3 server in this process that fails on command, by real sockets on loopback."""

from __future__ import annotations

import hashlib
import http.server
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ALWAYS = 10**9


@dataclass
class Fault:
    """What to do to the next ``times`` requests whose method and target match.

    ``kind``: "status" answers ``status`` with ``code``; "reset" drops the connection unanswered;
    "stall" answers nothing for ``seconds``; "lost_reply" does the work and drops the connection;
    "cut" sends ``nbytes`` of the body, then ends the connection; "reset_body" resets it there;
    "twice" does the work twice and tells of the second time; "duplicate" does it once and tells of it twice,
    the second time after ``seconds``, on a connection that stays open; "stale" does nothing and repeats the answer
    to the request before; "flip" inverts byte ``nbytes`` of the body;
    "whole_object" answers a ranged GET with 200 and everything.
    """

    kind: str
    method: str = ""
    contains: str = ""
    times: int = 1
    status: int = 500
    code: str = "InternalError"
    nbytes: int = 0
    seconds: float = 0.0
    after: int = 0
    """So many matching requests are left alone first."""


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.target).path).split("/", 2)[-1]

    @property
    def query(self) -> dict[str, str]:
        return {k: v[0] for k, v in parse_qs(urlsplit(self.target).query, keep_blank_values=True).items()}


@dataclass(frozen=True)
class Answer:
    """``told_nbytes``: what a HEAD says of a body that is not here."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    told_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self.body) if self.told_nbytes is None else self.told_nbytes


def error(status: int, code: str) -> Answer:
    text = f"<Error><Code>{code}</Code><Message>{code} on command</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


class FaultyS3:
    """One bucket, ``bkt``. Everything is public to the tests: objects, uploads, requests, faults."""

    bucket = "bkt"

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.last_answer = Answer(200)
        self.injected: Counter[str] = Counter()
        """Faults that were really done, by kind."""
        self.rejects_checksums = False
        self.ignores_conditions = False
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls:
            # Handshakes in the handlers' threads: one that fails must not hold up the rest.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint_url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": "test-key", "secret": "test-secret", "endpoint_url": self.endpoint_url}

    def count(self, method: str, contains: str = "") -> int:
        return sum(r.method == method and contains in r.target for r in self.requests)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Harmless if repeated."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and request.method.startswith(fault.method) and fault.contains in request.target:
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    self.injected[f"{fault.kind} {fault.status}" if fault.kind == "status" else fault.kind] += 1
                    return fault
        return None

    def answer(self, request: Request) -> Answer:
        if self.rejects_checksums and self._has_checksum(request):
            return error(501, "NotImplemented")
        if urlsplit(request.target).path.split("/")[1] != self.bucket:
            return error(404, "NoSuchBucket")
        with self.lock:
            return getattr(self, f"_{request.method.lower()}")(request)

    @staticmethod
    def _has_checksum(request: Request) -> bool:
        names = [n for n in request.headers if n.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer"))]
        return bool(names) or "aws-chunked" in request.headers.get("content-encoding", "")

    def _store(self, key: str, body: bytes) -> dict[str, str]:
        self.objects[key] = body
        self.modified[key] = time.time()
        return self._headers(key)

    def _headers(self, key: str) -> dict[str, str]:
        digest = hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()
        return {"ETag": f'"{digest}"', "Last-Modified": formatdate(self.modified[key], usegmt=True)}

    def _put(self, request: Request) -> Answer:
        if "partNumber" in request.query:
            parts = self.uploads.get(request.query["uploadId"])
            if parts is None:
                return error(404, "NoSuchUpload")
            parts[int(request.query["partNumber"])] = request.body
            return Answer(200, b"", {"ETag": f'"{request.query["partNumber"]}"'})
        condition = request.headers.get("if-none-match")
        if condition and request.key in self.objects and not self.ignores_conditions:
            return error(412, "PreconditionFailed")
        return Answer(200, b"", self._store(request.key, request.body))

    def _post(self, request: Request) -> Answer:
        if "uploads" in request.query:
            upload_id = f"upload-{len(self.uploads)}-{len(self.requests)}"
            self.uploads[upload_id] = {}
            text = f"<UploadId>{upload_id}</UploadId>"
            return Answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket>bkt</Bucket><Key>{escape(request.key)}</Key>{text}"
                "</InitiateMultipartUploadResult>".encode(),
            )
        parts = self.uploads.pop(request.query["uploadId"], None)
        if parts is None:
            return error(404, "NoSuchUpload")
        headers = self._store(request.key, b"".join(parts[number] for number in sorted(parts)))
        etag = escape(headers["ETag"])
        return Answer(
            200, f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>".encode()
        )

    def _delete(self, request: Request) -> Answer:
        if "uploadId" in request.query:
            self.uploads.pop(request.query["uploadId"], None)
        else:
            self.objects.pop(request.key, None)
        return Answer(204)

    def _head(self, request: Request) -> Answer:
        if request.key not in self.objects:
            return Answer(404)
        return Answer(200, self.objects[request.key], self._headers(request.key))

    def _get(self, request: Request) -> Answer:
        if "list-type" in request.query:
            return self._list(request.query)
        if request.key not in self.objects:
            return error(404, "NoSuchKey")
        body, headers = self.objects[request.key], self._headers(request.key)
        wanted = request.headers.get("range")
        if wanted is None:
            return Answer(200, body, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(len(body), int(last) + 1 if last else len(body))
        if start >= len(body):
            return error(416, "InvalidRange")
        return Answer(206, body[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(body)}"})

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found = {key: body for key, body in sorted(self.objects.items()) if key.startswith(prefix)}
        below = {key: key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "") for key in found}
        folders = dict.fromkeys(name + mark for name, mark, _ in below.values() if mark)
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size><ETag>x</ETag>"
            f"<LastModified>{_iso(self.modified.get(key, 0))}</LastModified></Contents>"
            for key, body in found.items()
            if not below[key][1]
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(prefix + f)}</Prefix></CommonPrefixes>" for f in folders)
        return Answer(
            200,
            f"<ListBucketResult><Name>bkt</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{rows.count('<Key>') + len(folders)}</KeyCount>{rows}{common}</ListBucketResult>".encode(),
        )


def _iso(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _handler(server: FaultyS3) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body in two packets would wait for the client's delayed ACK.
        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            """Tests look at ``requests`` instead."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # the client went away, or refused our certificate
                self.close_connection = True

        def handle_all(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            fault = server.take_fault(request)
            kind = fault.kind if fault else ""
            if kind == "reset":
                self.reset()
            elif kind == "stall":
                server.stopping.wait(fault.seconds)
                self.reset()
            elif kind == "status":
                self.send(error(fault.status, fault.code))
            elif kind == "lost_reply":
                server.answer(request)
                self.reset()
            elif kind == "twice":
                server.answer(request)
                self.send(server.answer(request))
            elif kind == "duplicate":
                answer = server.answer(request)
                self.send(answer)
                self.wfile.flush()
                server.stopping.wait(fault.seconds)
                self.send(answer)
            elif kind == "stale":
                self.send(server.last_answer)
            elif kind == "flip":
                answer = server.answer(request)
                body = bytearray(answer.body)
                body[fault.nbytes] ^= 0xFF
                self.send(replace(answer, body=bytes(body)))
            elif kind == "whole_object":
                self.send(Answer(200, server.objects[request.key], server._headers(request.key)))
            else:
                server.last_answer = server.answer(request)
                self.send(server.last_answer, cut_at=fault.nbytes if fault else None, reset=kind == "reset_body")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_all

        def send(self, answer: Answer, *, cut_at: int | None = None, reset: bool = False) -> None:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.status != 204:
                self.send_header("Content-Length", str(answer.nbytes))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[:cut_at])
            if cut_at is not None:
                self.wfile.flush()
                if reset:
                    # Let the client take what was sent: a reset discards what is still on the way.
                    time.sleep(0.05)
                    self.reset()
                else:
                    self.close_connection = True

        def reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

    return Handler


@contextmanager
def faulty_s3(tls: ssl.SSLContext | None = None) -> Iterator[FaultyS3]:
    server = FaultyS3(tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()
