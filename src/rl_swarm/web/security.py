"""Protects the dashboard: it answers to its own host name alone, and its page runs only its own files."""

import binascii
import hmac
from base64 import b64decode
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 100_000  # bytes of a request
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def protect(app: FastAPI, hosts: Sequence[str], token: str | None = None) -> None:
    """Keep other sites from reading the dashboard in a visitor's browser.

    There is no CORS, and a foreign name that points to this machine gets no answer. A server that answers to any name
    asks for the token, if there is one.
    """
    if token is not None and "*" in hosts:
        app.add_middleware(TokenRequired, token=token)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(RequestGuard)
    app.add_exception_handler(RequestValidationError, explain)


async def explain(request: Request, error: Exception) -> Response:
    """Explain what is wrong with a request without repeating it: it may hold what JSON cannot."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 422)


def is_token(given: str, token: str) -> bool:
    """Compare with the token in constant time."""
    return hmac.compare_digest(given.encode(), token.encode())


def password(authorization: str) -> str:
    """Return the secret of an Authorization header: a bearer's token, or the password of any user name."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "basic":
        return given.strip() if kind.lower() == "bearer" else ""
    try:
        return b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


class TokenRequired:
    """Rejects requests without the token. A browser asks its user for it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_ = scope["type"] != "http"
        if open_ or is_token(password(Headers(scope=scope).get("authorization", "")), self.token):
            await self.app(scope, receive, send)
            return
        asked = {"WWW-Authenticate": 'Basic realm="RL Swarm: any name, and the token", charset="UTF-8"'}
        await JSONResponse({"detail": "Wrong or no token."}, 401, asked)(scope, receive, send)


class RequestGuard:
    """Adds security headers, and rejects requests whose bodies are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, refused = 0, False

        async def bounded() -> Message:
            """Pass on the body up to its limit; a longer one ends there and is refused."""
            nonlocal read, refused
            message = await receive()
            if message["type"] != "http.request":  # pass on a disconnect, or the response never ends
                return message
            read += len(message.get("body", b""))
            if read > MAX_BODY:
                refused = True
                return {"type": "http.request", "body": b"", "more_body": False}
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if refused:
                    message["status"] = 413
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await self.app(scope, bounded, with_headers)
