"""`dew view`: a local server for the page, which is rebuilt as the runs train.

The server listens on 127.0.0.1 only, and its addresses start with a random token, so that no other user of the machine
and no web page can read the runs. Requests for another host name that resolves to 127.0.0.1 (DNS rebinding) are
refused. It only answers GET:

    /TOKEN/        the page        /TOKEN/stamp   changes whenever the runs do        /TOKEN/data   the page's new data
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dew.errors import ConfigError, DewError, Problem
from dew.report import read_content
from dew.report.readers import runs_at
from dew.report.write import blobs, page
from dew.run.records import Json

HOSTS = ("127.0.0.1", "localhost")  # with any port, because a tunnel may use another one
IDLE = 10.0
"""Maximum idle time of a connection in seconds."""
PAUSE = 4.0
"""After rebuilding, wait this many times as long as it took."""
FILES = ("*.json", "*.jsonl", "checkpoint-*/trainer_state.json", "records/*")
"""The files in a run's folder that the page depends on."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
ANSWERS: dict[str, tuple[str, Callable[[str, Json], str]]] = {
    "": ("text/html; charset=utf-8", lambda stamp, content: page(content, live=stamp)),
    "stamp": ("application/json", lambda stamp, _: json.dumps({"stamp": stamp})),
    "data": ("text/plain", lambda _, content: "\n".join(blobs(content))),
}
"""Content type of each address, and a function of stamp and content that returns its text."""


class View:
    """The page of some runs, rebuilt when their files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.stamp, self.content = self._files(), read_content(self.folders)
        self._next = 0.0
        self._lock = threading.Lock()

    def _files(self) -> str:
        """Return a hash of the names, sizes and times of the files that the page depends on."""
        inner = [run for folder in self.folders for run in (folder, *runs_at(folder))]
        paths = {path for folder in inner for kind in FILES for path in folder.glob(kind)}
        found = []
        for path in sorted(path for path in paths if path.name != "report.json"):
            with suppress(OSError):  # the file was just removed
                stat = path.stat()
                found.append((str(path), stat.st_size, stat.st_mtime_ns))
        return str(hash(tuple(found)))

    def update(self) -> tuple[str, Json]:
        """Return the newest stamp and content. If the runs cannot be read at the moment, the last content is kept."""
        with self._lock:
            start = time.monotonic()
            if start >= self._next and (stamp := self._files()) != self.stamp:
                with suppress(DewError, OSError):
                    self.content, self.stamp = read_content(self.folders), stamp
                self._next = time.monotonic() + PAUSE * (time.monotonic() - start)
            return self.stamp, self.content


def make_server(folders: Sequence[Path], port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """Return a server for the runs in `folders`, not yet serving, and the address of its page. Port 0: any free one."""
    view, token = View(folders), secrets.token_urlsafe(24)

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE

        def handle(self) -> None:
            with suppress(OSError):  # the browser has closed the page
                super().handle()

        def do_GET(self) -> None:
            given, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
            known = secrets.compare_digest(given.encode(errors="replace"), token.encode())
            host = str(self.headers["Host"]).partition(":")[0]
            if not (known and slash and name in ANSWERS and host in HOSTS):
                self.send_error(404)
                return
            kind, text = ANSWERS[name]
            body = text(*view.update()).encode(errors="replace")
            self.send_response(200)
            for header, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because addresses contain the token."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        what = f"port: {port} cannot be used ({error.strerror})."
        raise ConfigError(Problem(what, remedy="Choose another port, or remove --port.")) from None
    return server, f"http://127.0.0.1:{server.server_address[1]}/{token}/"
