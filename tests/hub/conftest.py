"""A small hub on this machine: the part of the protocol that a download uses, and its failures."""

import hashlib
import json
import re
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from vlarl.assets import hub as client
from vlarl.assets import manifest
from vlarl.assets.manifest import Asset

COMMIT = "c0ffee" * 6 + "c0ff"
PAGE = 3
TOKEN = "hf_SecretSecretSecret"


@dataclass
class Seen:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """Repositories and what goes wrong with them.

    repos: files by repository. lfs: paths from this size on are LFS files, on the second server.
    faults: per path, what happens to the next GETs: a status, ("cut", N): N bytes, then the line
    breaks; ("short", N): N bytes announced and sent; "other": as many other bytes; "whole": Range
    is ignored; ("pause", N): N bytes, then nothing until `go` is set.
    """

    repos: dict = field(default_factory=dict)
    lfs_from: int = 1000
    needs_token: set = field(default_factory=set)
    faults: dict = field(default_factory=lambda: defaultdict(list))
    seen: list = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn: str = ""

    def gets(self, part):
        return [s for s in self.seen if s.method == "GET" and part in s.path]


def git_sha1(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            path = unquote(urlsplit(self.path).path)
            bearer = self.headers.get("Authorization")
            hub.seen.append(Seen(self.command, self.path, self.headers.get("Range"), bearer))
            if path.startswith("/cdn/"):
                return self.content(path.removeprefix("/cdn/"))
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if not (api or file):
                return self.status(404)
            repo, revision = (api[1], api[3]) if api else (file[1], file[2])
            if repo in hub.needs_token and bearer != f"Bearer {TOKEN}":
                return self.status(401, "GatedRepo", f"Access to {repo} is restricted")
            if repo not in hub.repos:
                return self.status(404, "RepoNotFound", "Repository not found")
            if revision not in ("main", COMMIT):
                return self.status(404, "RevisionNotFound", "Invalid rev id")
            if fault := self.fault(api[2] if api else None):
                return self.status(fault)
            if not api:
                return self.resolve(repo, file[3])
            if api[2] == "revision":
                return self.json({"id": repo, "sha": COMMIT, "siblings": []})
            return self.tree(repo)

        def fault(self, key):
            return hub.faults[key].pop(0) if hub.faults[key] else None

        def tree(self, repo):
            """Pages of three, with a Link to the next one."""
            start = int(dict(re.findall(r"(\w+)=(\w+)", self.path)).get("cursor", 0))
            rows = [self.row(path, data) for path, data in sorted(hub.repos[repo].items())]
            rows.insert(0, {"type": "directory", "path": "dataset", "oid": "0" * 40, "size": 0})
            links = {}
            if start + PAGE < len(rows):
                base = f"{hub.url}/api/models/{repo}/tree/{COMMIT}?recursive=True"
                links = {"Link": f'<{base}&cursor={start + PAGE}>; rel="next"'}
            self.json(rows[start : start + PAGE], links)

        def row(self, path, data):
            row = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
            if len(data) >= hub.lfs_from:
                oid = hashlib.sha256(data).hexdigest()
                row |= {"oid": "1" * 40, "lfs": {"oid": oid, "size": len(data), "pointerSize": 99}}
            return row

        def resolve(self, repo, path):
            data = hub.repos[repo].get(path)
            if data is None:
                return self.status(404, "EntryNotFound", "Entry not found")
            if len(data) < hub.lfs_from:
                return self.content(f"{repo}/{path}", {"ETag": f'"{git_sha1(data)}"'})
            linked = {
                "Location": f"{hub.cdn}/cdn/{repo}/{path}?Signature=abc",
                "X-Linked-Size": str(len(data)),
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            }
            return self.send(302, b"", linked | {"X-Repo-Commit": COMMIT})

        def content(self, name, headers=()):
            owner, repo, path = name.split("/", 2)
            data = hub.repos[f"{owner}/{repo}"][path]
            fault = self.fault(path) if self.command == "GET" else None
            if isinstance(fault, int):
                return self.status(fault)
            start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
            if fault == "whole":
                start = 0
            if fault == "other":
                data = bytes(b ^ 1 for b in data)
            body = data[start:]
            extra = dict(headers) | {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if start:
                extra["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            kind, amount = fault if isinstance(fault, tuple) else (None, len(body))
            length = amount if kind == "short" else len(body)
            self.send(206 if start else 200, b"", extra, length=length)
            if self.command == "HEAD":
                return None
            self.wfile.write(body[:amount])
            self.wfile.flush()
            if kind == "cut":
                self.close_connection = True
                self.connection.shutdown(2)
            if kind == "pause":
                hub.paused.set()
                hub.go.wait(60)
                self.wfile.write(body[amount:])
            return None

        def json(self, data, headers=()):
            kind = {"Content-Type": "application/json"}
            self.send(200, json.dumps(data).encode(), dict(headers) | kind)

        def status(self, status, code=None, message=None):
            headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
            self.send(status, b"", headers)

        def send(self, status, body, headers, length=None):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def handle(self):
            try:
                super().handle()
            except OSError:  # the client went away
                self.close_connection = True

    return Handler


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub and, on another port, its store of large files; the client in this process uses it."""
    from huggingface_hub import constants

    made = Hub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(made)) for _ in range(2)]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    made.url, made.cdn = (f"http://127.0.0.1:{s.server_port}" for s in servers)
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(client, "WAITS_S", (0.0, 0.0, 0.0))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("VLARL_HOME", str(tmp_path / "home"))
    yield made
    made.go.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def duck(hub, monkeypatch):
    """The asset `duck` (and `swan`) of the manifest, of a config and large weights, on the hub."""
    weights = bytes(i * 7 % 251 for i in range(50_000))
    hub.repos["o/duck"] = {
        "config.json": b'{"a": 1}',
        "empty.txt": b"",
        "model.safetensors": weights,
        "dataset/a.npy": bytes(2000),
        "dataset/b.npy": b"small",
        "extra/adapter.bin": b"not wanted",
        ".gitattributes": b"*.bin",
    }
    hub.repos["o/swan"] = {"config.json": b"{}", "model.safetensors": weights[:5000]}
    files = [
        {"pattern": "config.json", "what": "c", "count": 1, "bytes": None},
        {"pattern": "*.safetensors", "what": "w"},
    ]
    data = {"pattern": "dataset/*.npy", "what": "d", "count": 2, "bytes": 2005}
    assets = {
        "duck": Asset(
            name="duck", about="x", repo="o/duck", files=[*files, data], skip=["extra/*"]
        ),
        "swan": Asset(name="swan", about="x", repo="o/swan", files=files),
    }
    monkeypatch.setattr(manifest, "_read", lambda: assets)
    return hub
