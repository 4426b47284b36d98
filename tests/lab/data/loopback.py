"""A small HTTP server on loopback that can break off."""

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
        requests: The paths of everything asked for.
    """

    files: dict[str, bytes]
    break_after: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
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
            site.requests.append(self.path)
            if self.path not in site.files:
                return self.send_error(404)
            return self.answer(site.files[self.path])

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.break_after.pop(0)] if site.break_after else body)

        def log_message(self, *_):
            pass

    return Handler
