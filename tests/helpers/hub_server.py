"""Serves the part of the Hugging Face hub that an upload needs, on loopback, and keeps what it receives."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.large: dict[str, bytes] = {}  # by digest
        self.requests: list[tuple[str, str, str]] = []  # method, path, authorization
        self.refusals: list[int] = []  # status codes of the next requests to create a repository
        self.open = threading.Event()  # while it is not set, no request is answered
        self.open.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, part: str) -> list[str]:
        return [path for _, path, _ in self.requests if part in path]


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self) -> None:
        hub, body, path = self.server, self.body(), self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Authorization", "")))
        hub.open.wait(120)
        if path == "/api/repos/create":
            if hub.refusals:
                return self.answer({"error": "refused"}, hub.refusals.pop(0))
            asked = json.loads(body)
            hub.repos.setdefault(f"{asked['organization']}/{asked['name']}", {})
            return self.answer({"url": f"{hub.url}/{asked['organization']}/{asked['name']}"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/large/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            hub.large[found[1]] = body
            return self.answer({})
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{hub.url}/large/{o['oid']}"}}} for o in objects]
            return self.answer({"transfer": "basic", "objects": actions})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
        if found is None or found[1] not in hub.repos:
            return self.answer({"error": "not found"}, 404)
        return self.answer(self.repository(hub.repos[found[1]], found[2] or "", body))

    def repository(self, files: dict[str, bytes], what: str, body: bytes) -> object:
        if what.startswith("/preupload"):
            large = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {"path": f["path"], "uploadMode": large[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
            }
        if what.startswith("/commit"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.server.commits.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            return {"commitUrl": f"{self.server.url}/ada/model/commit/{COMMIT}", "commitOid": COMMIT}
        if what.startswith("/tree"):
            return [{"type": "file", "path": path, "size": len(data), "oid": COMMIT} for path, data in files.items()]
        return {
            "id": "a/b",
            "sha": COMMIT,
            "siblings": [{"rfilename": path} for path in files],
            "cardData": {"license": "mit"},
        }

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.open.set()
        server.shutdown()
        server.server_close()
