"""Runs real stores on loopback: an S3 server and a WebDAV server, which can be told to misbehave or to go away."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

Wsgi = Callable[..., Any]
ACCESS_KEY, BUCKET = "swarm-tests", "swarms"


class Silent(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class Store:
    """Serves a WSGI application on a real socket, and counts its requests."""

    def __init__(self, application: Wsgi) -> None:
        self.application = application
        self.port = 0
        self.requests: Counter[str] = Counter()  # by method
        self.ranges: list[str] = []  # that were asked for
        self.refusals: list[tuple[int, str]] = []  # status and code of the answers to the next requests
        self.shaky = False  # then the first request for anything fails, and every third one after it
        self.asked: Counter[tuple[str, str]] = Counter()  # while it was
        self.lock = threading.Lock()
        self.server: Any = None
        self.start()

    def start(self) -> None:
        self.server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=Silent)
        self.port = self.server.port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def count(self) -> int:
        return sum(self.requests.values())

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        with self.lock:
            method = environ["REQUEST_METHOD"]
            listing = method == "GET" and "list-type" in environ.get("QUERY_STRING", "")
            self.requests["LIST" if listing else method] += 1
            self.ranges += filter(None, [environ.get("HTTP_RANGE")])
            refusal = self.refusals.pop(0) if self.refusals else None
            if refusal is None and self.shaky:
                what = (method, environ["PATH_INFO"])
                self.asked[what] += 1
                if self.asked[what] % 3 == 1:
                    kinds = ((500, "InternalError"), (503, "ServiceUnavailable"))
                    refusal = kinds[self.asked[what] // 3 % 2]
        if refusal is None and self._is_stranger(environ):
            refusal = (403, "InvalidAccessKeyId")
        if refusal is None:
            return self.application(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code = refusal
        body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(f"{status} {code}", headers)
        return [body]

    def _is_stranger(self, environ: dict[str, Any]) -> bool:
        given = environ.get("HTTP_AUTHORIZATION", "")
        return given.startswith("AWS4-") and f"Credential={ACCESS_KEY}/" not in given


class S3(Store):
    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        super().__init__(DomainDispatcherApplication(create_backend_app))

    @property
    def environ(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://{self.host}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        import boto3

        session = boto3.Session(ACCESS_KEY, "secret", region_name="us-east-1")
        session.client("s3", endpoint_url=f"http://{self.host}").create_bucket(Bucket=name)


class WebDav(Store):
    def __init__(self, folder: Path, user: str, password: str) -> None:
        from wsgidav.wsgidav_app import WsgiDAVApp

        super().__init__(
            WsgiDAVApp(
                {
                    "provider_mapping": {"/": str(folder)},
                    "simple_dc": {"user_mapping": {"*": {user: {"password": password}}}},
                    "logging": {"enable": False},
                    "verbose": 0,
                }
            )
        )

    def start(self) -> None:
        from cheroot.wsgi import Server  # the one it is made for: it takes uploads in chunks

        self.server = Server(("127.0.0.1", self.port), self._answer, numthreads=4, shutdown_timeout=1)
        self.server.prepare()
        self.port = self.server.bind_addr[1]
        threading.Thread(target=self.server.serve, daemon=True).start()

    def stop(self) -> None:
        self.server.stop()
