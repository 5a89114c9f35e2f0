"""A hub for tests: a real server that speaks those of the hub's endpoints that fetching a data set needs."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Site:
    """Data sets by name: their revisions, each a commit with files by path. `asked` notes every request."""

    def __init__(self):
        self.sets, self.asked, self.broken, self.url = {}, [], set(), ""
        self.sizes, self.digests = {}, {}  # what is said of files in place of the truth

    def put(self, name, files, revision="main"):
        content = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
        commit = hashlib.sha1(repr((name, sorted(content.items()))).encode()).hexdigest()
        self.sets.setdefault(name, {}).update({revision: (commit, content), commit: (commit, content)})
        return commit

    def described(self, path, data):
        size, digest = self.sizes.get(path, len(data)), self.digests.get(path, hashlib.sha256(data).hexdigest())
        large = {"lfs": {"size": size, "sha256": digest, "pointerSize": 130}} if path.endswith((".zip", ".aa")) else {}
        return {"rfilename": path, "size": size, **large}


@contextmanager
def hub():
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(False)

        def do_GET(self):
            self.answer(True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            site.asked.append(f"{self.command} {path}")
            listed = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            wanted = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if not listed and not wanted:
                return self.send(404, b"", {}, body)
            name, revision = (listed or wanted)[1], (listed or wanted)[2] or "main"
            if name in site.broken:
                return self.send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
            if name not in site.sets:
                return self.send(401, b"", {"X-Error-Code": "RepoNotFound"}, body)
            if revision not in site.sets[name]:
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
            commit, files = site.sets[name][revision]
            if listed:
                siblings = [site.described(each, data) for each, data in files.items()]
                return self.send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), {}, body)
            if wanted[3] not in files or f"{name}/{wanted[3]}" in site.broken:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            data = files[wanted[3]]
            etag = hashlib.sha256(data).hexdigest()
            return self.send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body)

        def send(self, status, data, headers, body):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    site.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
