"""What keeps the dashboard harmless: it answers to its own name alone, and its page runs nothing but its own files."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 100_000  # bytes of a request
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def protect(app: FastAPI, hosts: Sequence[str]) -> None:
    """No other site can read it in a visitor's browser: there is no CORS, and a name that somebody lets point to this
    machine is not answered."""
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(Guard)
    app.add_exception_handler(RequestValidationError, explain)


async def explain(request: Request, error: Exception) -> Response:
    """What is wrong with a request, without repeating it: it may hold what cannot be written as JSON."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 422)


class Guard:
    """Adds the headers, and ends requests whose bodies are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, refused = 0, False

        async def bounded() -> Message:
            """The body as far as it is allowed; one that is longer ends there and is refused."""
            nonlocal read, refused
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BODY:
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
