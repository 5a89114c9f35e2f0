"""The base of the fake servers for tests: an HTTP server in a thread that logs nothing; and one without end."""

import json
import socket
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """A request handler that reads and writes JSON and tolerates clients that have disconnected."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgment of its headers

    def body(self):
        """Return the request's JSON, None if it is empty."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")

    def send(self, status, data, headers=(), *, body=True):
        """Send bytes, or any other value as JSON; return False if the client has disconnected."""
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


class _SilentServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serve_http(handler, port=0):
    """Run a server with a handler class; yield its address, such as http://127.0.0.1:40123."""
    server = _SilentServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serve_endless(start, drip):
    """Run a server that begins each response with `start`, and then sends `drip` without end; yield its port."""
    stopped = threading.Event()

    def serve(connection):
        with suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(start)
            while drip and not stopped.wait(0.02):
                connection.sendall(drip)
            stopped.wait()

    def accept():
        with suppress(OSError):
            while not stopped.is_set():
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        stopped.set()
