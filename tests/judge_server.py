"""A judge's server for tests: a real one, on a port of its own, that behaves as it is told."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Served:
    """What a server saw: request bodies, headers, and how many requests it had at a time."""

    def __init__(self, url):
        self.url, self.bodies, self.headers = url, [], []
        self.open = self.most = 0
        self.lock = threading.Lock()

    @property
    def prompts(self):
        return [body["messages"][0]["content"] for body in self.bodies]


def completion(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def candidate(prompt):
    """What stands between the two lines that hold the mark, and all that stands outside."""
    lines = prompt.split("\n")
    mark = next(line for line in lines if len(line) == 32 and lines.count(line) == 2)
    first, second = (i for i, line in enumerate(lines) if line == mark)
    return "\n".join(lines[first + 1 : second]), "\n".join(lines[:first] + lines[second + 1 :])


@contextmanager
def server(reply, *, seconds=0.0, headers=()):
    """`reply(number, prompt)` gives a text, or (status, body); the n-th request is number n, from 0."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            with served.lock:
                number = len(served.bodies)
                served.bodies.append(json.loads(raw))
                served.headers.append({"path": self.path, **dict(self.headers)})
                served.open += 1
                served.most = max(served.most, served.open)
            time.sleep(seconds)
            said = reply(number, served.bodies[number]["messages"][0]["content"])
            status, text = completion(said) if isinstance(said, str) else said
            with served.lock:
                served.open -= 1
            data = text.encode()
            try:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever asked has lost patience

        def log_message(self, *args):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request, client_address):
            pass

    listening = Quiet(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{listening.server_port}/v1")
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
