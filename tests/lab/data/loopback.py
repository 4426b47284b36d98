"""A small HTTP server on loopback that can misbehave: breaks off, knows no ranges, is slow to answer."""

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What is served, and how badly.

    Attributes:
        files: Contents by path.
        break_after: The next transfers end after so many bytes of their body, one entry each.
        ranges: Whether requests for a part are honoured.
        requests: Path and Range header of everything asked for.
    """

    files: dict[str, bytes]
    break_after: list[int] = field(default_factory=list)
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(site))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def handler(site):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            site.requests.append((self.path, asked))
            if self.path not in site.files:
                return self.send_error(404)
            content = site.files[self.path]
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and site.ranges else 0
            if start and start >= len(content):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            extra = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
            return self.answer(206 if start else 200, content[start:], extra)

        def answer(self, status, body, headers):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: site.break_after.pop(0)] if site.break_after else body)

        def log_message(self, *_):
            pass

    return Handler
