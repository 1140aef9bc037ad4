"""A stand-in for S3 over HTTP on the loopback: what obstore asks of a bucket, and the faults that a bucket may have."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from patience import FOREVER_S

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


REFUSAL = (
    b"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>NoSuchThing</Code><Message>The specified thing does not"
    b" exist, or is not yours, and this is told at length.</Message><BucketName>bucket</BucketName><RequestId>"
    + b"0123456789abcdef" * 16
    + b"</RequestId></Error>"
)


class FakeS3:
    """``objects`` by name. ``status``: the answer to everything, if not 0. ``cut``: bytes that a body lacks."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status = 0
        self.cut = 0
        self.requests = 0
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        owner = self

        class Handler(_Handler):
            fake = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.port = self._server.server_address[1]

    def close(self) -> None:
        """Connections are refused from now on."""
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that left is no news."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", length: int | None = None, place: str = "") -> None:
        self.send_response(status)
        if place:
            self.send_header("Content-Range", place)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", DATE)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _stops(self) -> bool:
        self.fake.requests += 1
        if self.fake.hangs.is_set():
            self.fake.goes_on.wait(FOREVER_S)
            self.close_connection = True
            return True
        if self.fake.status:
            self.close_connection = True
            self._answer(self.fake.status, REFUSAL)
            return True
        return False

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._stops():
            self.fake.objects[self._name()] = body
            self._answer(200)

    def do_HEAD(self) -> None:
        if not self._stops():
            found = self.fake.objects.get(self._name())
            self._answer(404) if found is None else self._answer(200, b"", len(found))

    def do_GET(self) -> None:
        if self._stops():
            return
        if "list-type" in urlsplit(self.path).query:
            self._list(parse_qs(urlsplit(self.path).query).get("prefix", [""])[0])
            return
        found = self.fake.objects.get(self._name())
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>")
            return
        if self.fake.cut:
            self.close_connection = True
        if not self.fake.cut and (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            first, last = map(int, asked.groups())
            self._answer(206, found[first : last + 1], place=f"bytes {first}-{last}/{len(found)}")
            return
        self._answer(200, found[: len(found) - self.fake.cut], len(found))

    def do_DELETE(self) -> None:
        if not self._stops():
            self.fake.objects.pop(self._name(), None)
            self._answer(204)

    def do_POST(self) -> None:
        """Many objects are deleted at once."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._stops():
            return
        names = re.findall("<Key>(.*?)</Key>", body)
        for name in names:
            self.fake.objects.pop(name, None)
        gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def _list(self, prefix: str) -> None:
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>1</ETag><Size>{len(body)}</Size></Contents>"
            for name, body in sorted(self.fake.objects.items())
            if name.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())
