"""A quiet HTTP server in a thread: what the servers for tests share."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Says nothing of its own; whoever asked may have lost patience when the answer comes."""

    protocol_version = "HTTP/1.1"

    def body(self):
        """The JSON that was sent, or None."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")

    def send(self, status, data, headers=(), *, body=True):
        """Answer with bytes, or with anything else as JSON; False where nobody listens any more."""
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        try:
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data if body else b"")
        except OSError:
            return False
        return True

    def log_message(self, *args):
        pass


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def listening(handler, port=0):
    """The address of a server that a handler class answers for, such as http://127.0.0.1:40123."""
    found = _Quiet(("127.0.0.1", port), handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()
