"""A local HTTP server with the endpoints of the Hugging Face hub that downloading a dataset or a model needs."""

import hashlib
import re
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import http_server


class FakeHub:
    """Datasets by name with their revisions, each a commit with files by path; `requests` records every request."""

    def __init__(self):
        self.datasets, self.requests, self.broken, self.url = {}, [], set(), ""
        self.sizes, self.digests = {}, {}  # wrong sizes and digests to announce

    def add_dataset(self, name, files, revision="main"):
        content = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
        commit = hashlib.sha1(repr((name, sorted(content.items()))).encode()).hexdigest()
        self.datasets.setdefault(name, {}).update({revision: (commit, content), commit: (commit, content)})
        return commit

    def describe_file(self, path, data):
        size, digest = self.sizes.get(path, len(data)), self.digests.get(path, hashlib.sha256(data).hexdigest())
        large = {"lfs": {"size": size, "sha256": digest, "pointerSize": 130}} if path.endswith((".zip", ".aa")) else {}
        return {"rfilename": path, "size": size, **large}


@contextmanager
def serve_hub():
    hub = FakeHub()

    class Handler(http_server.Handler):
        def do_HEAD(self):
            self.answer(False)

        def do_GET(self):
            self.answer(True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            listing = re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            download = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path)
            if tree:
                files = hub.datasets[tree[1]][tree[2]][1]
                rows = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in files.items()
                ]
                return self.send(200, rows, body=body)
            if not listing and not download:
                return self.send(404, b"", body=body)
            name, revision = (listing or download)[1], (listing or download)[2] or "main"
            if name in hub.broken:
                return self.send(403, b"", [("X-Error-Code", "GatedRepo")], body=body)
            if name not in hub.datasets:
                return self.send(401, b"", [("X-Error-Code", "RepoNotFound")], body=body)
            if revision not in hub.datasets[name]:
                return self.send(404, b"", [("X-Error-Code", "RevisionNotFound")], body=body)
            commit, files = hub.datasets[name][revision]
            if listing:
                siblings = [hub.describe_file(file, data) for file, data in files.items()]
                return self.send(200, {"id": name, "sha": commit, "siblings": siblings}, body=body)
            if download[3] not in files or f"{name}/{download[3]}" in hub.broken:
                return self.send(404, b"", [("X-Error-Code", "EntryNotFound")], body=body)
            data = files[download[3]]
            etag = hashlib.sha256(data).hexdigest()
            return self.send(200, data, [("ETag", f'"{etag}"'), ("X-Repo-Commit", commit)], body=body)

    with http_server.serve_http(Handler) as hub.url:
        yield hub
