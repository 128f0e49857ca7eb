"""HTTP servers on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Answering(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nothing."""

    def send(self, body: bytes, code: int = 200, **headers: str) -> None:
        """Headers are named with underscores in place of dashes."""
        self.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Its URL; it is up inside."""
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
