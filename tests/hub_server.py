"""A small hub on this machine: serves a folder tree by the part of the HTTP interface that loading uses.

    folder/models/owner/tiny/config.json      folder/datasets/owner/reviews/train.csv

Ids ending in "-gated" answer as a repository whose owner must let you in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """A running hub: where it listens, and what it was asked."""

    url: str
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve `folder` on a free port of 127.0.0.1 until the block ends."""

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Handler.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    hub: Hub

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if match := _FILE.fullmatch(path):
            kind = "datasets" if match[1] else "models"
            self.send_file(kind, match[2], revision=match[3], name=match[4])
        elif match := _API.fullmatch(path):
            self.send_facts(*match.groups())
        elif path == "/":
            self.send_data(b"a small hub", {})
        else:
            self.refuse(404, "")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def send_file(self, kind: str, repository: str, *, revision: str, name: str) -> None:
        folder = self.repository_folder(kind, repository, revision)
        if folder is None:
            return
        if not (folder / name).is_file():
            self.refuse(404, "EntryNotFound")
            return
        data = (folder / name).read_bytes()
        self.send_data(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"})

    def send_facts(
        self, kind: str, repository: str, topic: str | None, revision: str | None, below: str | None
    ) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        folder = self.repository_folder(kind, repository, revision or "main")
        if folder is None:
            return
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        entries = [_entry(folder, name) for name in names]
        facts: object
        if topic == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            facts = [entry for entry in entries if entry["path"] in asked]
        elif topic == "tree":
            facts = [entry for entry in entries if str(entry["path"]).startswith(below or "")]
        else:
            siblings = [{"rfilename": name} for name in names]
            facts = {"id": repository, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self.send_data(json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def repository_folder(self, kind: str, repository: str, revision: str) -> Path | None:
        folder = self.root / kind / repository
        if repository.endswith("-gated"):
            self.refuse(403, "GatedRepo")
        elif not folder.is_dir():
            self.refuse(401, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        else:
            return folder
        return None

    def send_data(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the tests look at `Hub.requests`."""


def _entry(folder: Path, name: str) -> dict[str, object]:
    data = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
