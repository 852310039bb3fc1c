"""Stores files at a URL, through fsspec: a bucket or a WebDAV server.

An object is written whole or not at all, and readers see it at once, so a bucket is a better shared folder than most.
Listings are never cached: cached ones would hide what other nodes write.

The errors of the libraries become those of this package: `FileNotFoundError`, `Refused` where a person has to change a
setting or a permission, and `OSError` for the rest.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from rl_swarm.errors import UsageError, UserError
from rl_swarm.storage.files import Changed, Refused

APPENDED_BYTES = 64 << 20  # of a log that is still appended to, which writes it anew
CONNECT_SECONDS, READ_SECONDS = 10, 60
ATTEMPTS = 4  # of the library, with growing pauses, before it raises an error

CREDENTIALS = {
    "s3": "credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and the server from "
    "AWS_ENDPOINT_URL where it is not Amazon's",
    "gs": "credentials are read from GOOGLE_APPLICATION_CREDENTIALS",
    "az": "credentials are read from AZURE_STORAGE_CONNECTION_STRING",
    "webdav": "credentials are read from WEBDAV_USERNAME and WEBDAV_PASSWORD",
}
SAME = {"gcs": "gs", "webdavs": "webdav", "dav": "webdav", "davs": "webdav"}
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "webdav": "'webdav4[fsspec]'", "memory": "fsspec"}

NOWHERE = {"NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "IllegalLocationConstraintException"}
NOT_ALLOWED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401",
"403"}  # fmt: skip
WRONGLY_SET = re.compile("Credential|Profile|Config|NoRegion|ParamValidation")  # in the names of errors
EMPTY = {"InvalidRange", "416"}  # the first bytes of nothing


class RemoteFiles:
    """`Files` below a URL."""

    def __init__(self, url: str) -> None:
        self.root = url
        scheme = urlsplit(url).scheme
        self.store = SAME.get(scheme, scheme)
        self._made = (os.getpid(), *_open(url, self.store))  # process, file system, path of the root in it

    def read(self, path: str, limit: int) -> bytes:
        store, root = self._opened()
        try:
            with self._explained(path):
                return bytes(store.cat_file(f"{root}/{path}", end=limit + 1)[: limit + 1])
        except OSError as error:
            if _codes(error) & EMPTY:
                return b""
            raise

    def write(self, path: str, data: bytes) -> None:
        store, root = self._opened()
        with self._explained(path):
            store.pipe_file(f"{root}/{path}", data)

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        """Read and write the whole object: for a log with one writer."""
        try:
            before = self.read(path, APPENDED_BYTES)
        except FileNotFoundError:
            before = b""
        if len(before) > APPENDED_BYTES:
            raise OSError(errno.EFBIG, "too large to be appended to", self._url(path))
        if at is not None and len(before) != at:
            raise Changed(errno.ESTALE, f"{len(before)} bytes instead of {at}", self._url(path))
        self.write(path, before + data)

    def names(self, folder: str) -> list[str]:
        store, root = self._opened()
        here = f"{root}/{folder}"
        try:
            with self._explained(folder):
                listed = store.ls(here, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = {name.rstrip("/").rpartition("/")[2] for name in listed if not _same(name, here)}
        return sorted(found - {""})

    def remove(self, folder: str) -> None:
        store, root = self._opened()
        with suppress(FileNotFoundError), self._explained(folder):
            store.rm(f"{root}/{folder}", recursive=True)

    def move(self, folder: str, target: str) -> None:
        """Copy the objects, then remove them: a store has no folders that could be renamed."""
        store, root = self._opened()
        with self._explained(folder):
            for source in store.find(f"{root}/{folder}"):
                inside = source.lstrip("/")[len(f"{root}/{folder}".lstrip("/")) + 1 :]
                goal = f"{root}/{target}/{inside}"
                if self.store == "webdav":  # the others make what is missing on the way
                    store.makedirs(goal.rpartition("/")[0], exist_ok=True)
                store.cp_file(source, goal)
            store.rm(f"{root}/{folder}", recursive=True)

    def _url(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _opened(self) -> tuple[Any, str]:
        """Return the file system and the path of the root in it. Its connections and threads do not survive a fork."""
        made = self._made
        if made[0] != os.getpid():
            made = self._made = (os.getpid(), *_open(self.root, self.store))
        return made[1:]

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Translate the errors of a library."""
        url = self._url(path)
        try:
            yield
        except Exception as error:
            codes = _codes(error)
            if codes & NOWHERE:
                bucket = urlsplit(self.root).netloc
                raise Refused(
                    errno.ENXIO,
                    f"the store has no bucket {bucket!r} that could be used ({_message(error)}). Make it first, or "
                    f"correct the address; {CREDENTIALS.get(self.store, '')}",
                    url,
                ) from error
            if codes & NOT_ALLOWED or isinstance(error, PermissionError) or _wrongly_set(error):
                raise Refused(
                    errno.EACCES,
                    f"the store does not let us in ({_message(error)}): {CREDENTIALS.get(self.store, '')}",
                    url,
                ) from error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
            if isinstance(error, NotADirectoryError):
                raise
            if not isinstance(error, OSError) and type(error).__module__ == "builtins":
                raise  # a bug, and not an error of the network
            raise OSError(errno.EIO, _message(error), url) from error


def _open(url: str, store: str) -> tuple[Any, str]:
    if store not in PACKAGES:
        raise UsageError(
            f"{url}: {store}:// is no known kind of address. Use a path, s3://bucket/name, gs://bucket/name, "
            "az://container/name or webdavs://server/folder/name."
        )
    try:
        if store == "webdav":
            return _open_webdav(url)
        import fsspec

        made = fsspec.filesystem(store, use_listings_cache=False, **_options(store))
    except ImportError as error:
        raise UserError(
            f"{url}: a swarm at a {store}:// address needs a package that is not installed ({_message(error)}). "
            f"Install it: .venv/bin/pip install {PACKAGES[store]}"
        ) from error
    return made, made._strip_protocol(re.sub(r"^[^:]+", store, url)).rstrip("/")


def _open_webdav(url: str) -> tuple[Any, str]:
    from webdav4.fsspec import WebdavFileSystem

    parts = urlsplit(url)
    web = "https" if parts.scheme.endswith("s") else "http"
    user, password = os.environ.get("WEBDAV_USERNAME"), os.environ.get("WEBDAV_PASSWORD")
    auth = (user, password) if user and password else None
    made = WebdavFileSystem(f"{web}://{parts.netloc}", auth=auth, timeout=READ_SECONDS, skip_instance_cache=True)
    return made, parts.path.strip("/")


def _options(store: str) -> dict[str, object]:
    if store != "s3":
        return {}
    retries = {"retries": {"mode": "standard", "total_max_attempts": ATTEMPTS}}
    return {"config_kwargs": {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, **retries}}


def _same(name: str, path: str) -> bool:
    return name.strip("/") == path.strip("/")


def _codes(error: BaseException | None) -> set[str]:
    """Return the error codes of a store's answer, wherever a library keeps them."""
    found = set()
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            found.add(str(response.get("Error", {}).get("Code", "")))
        for name in ("status", "status_code", "code"):
            found.add(str(getattr(error, name, "") or getattr(response, name, "")))
        error = error.__cause__ or error.__context__
    return found


def _wrongly_set(error: Exception) -> bool:
    """Tell whether a library made no request: it has no key, or cannot use the endpoint or the name."""
    return isinstance(error, ValueError) or WRONGLY_SET.search(type(error).__name__) is not None


def _message(error: BaseException) -> str:
    """Return a library's message, as one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300].rstrip(".")
