"""A stand-in for the model hub's HTTP API, as far as uploads and downloads use it: it keeps what it is sent."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    def __init__(self):
        self.repos, self.files, self.blobs, self.tokens, self.refuse = {}, {}, {}, set(), None
        self.models = {}  # owner/name -> commit -> file -> bytes; the last commit is `main`
        self.gated = set()  # names
        self.refuse_downloads = None  # a status for every GET
        self.stall_after = None  # bytes of weights after which nothing more comes
        self.go_on = threading.Event()  # ends such a stall, and the connection with it
        self.downloads = []  # (file, first byte that was sent) of weights

    def add_model(self, name: str, folder, commit: str = "c" * 40) -> None:
        self.models.setdefault(name, {})[commit] = {
            file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
        }


def etag_of(path: str, data: bytes) -> str:
    """Weights are stored by their SHA-256, other files as git does."""
    if path.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def describe(path: str, data: bytes) -> dict:
    """A file as the hub lists it."""
    facts = {"type": "file", "path": path, "size": len(data), "oid": etag_of(path, data)}
    if path.endswith(".safetensors"):
        facts["lfs"] = {"oid": etag_of(path, data), "size": len(data), "pointerSize": 134}
    return facts


@contextmanager
def serve():
    """The stand-in and its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, body: dict | list, status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def do_PUT(self):
            hub.blobs[self.path.rsplit("/", 1)[1]] = self.body()
            self.reply({})

        def refused(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if not (api or file):
                return self.reply({"error": "not found"}, 404)
            name, revision = (api[1], api[3] or "main") if api else (file[1], file[2])
            if hub.refuse_downloads:
                return self.refused(hub.refuse_downloads, "")
            if name not in hub.models:
                return self.refused(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
            if name in hub.gated and (file or api[2] == "tree"):
                return self.refused(403 if self.headers.get("Authorization") else 401, "GatedRepo")
            commits = hub.models[name]
            commit = list(commits)[-1] if revision == "main" else revision
            if commit not in commits:
                return self.refused(404, "RevisionNotFound")
            files = commits[commit]
            if api and api[2] == "tree":
                return self.reply([describe(path, data) for path, data in files.items()])
            if api:
                siblings = [{"rfilename": path} for path in files]
                return self.reply({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
            if file[3] not in files:
                return self.refused(404, "EntryNotFound")
            self.send_file(file[3], files[file[3]], commit)

        do_HEAD = do_GET  # noqa: N815  # the name that http.server looks for

        def send_file(self, path: str, data: bytes, commit: str) -> None:
            first = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
            is_weights = path.endswith(".safetensors")
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{etag_of(path, data)}"')
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            if self.command == "HEAD":
                return
            if is_weights:
                hub.downloads.append((path, first))
            if is_weights and hub.stall_after is not None:
                self.wfile.write(data[first : first + hub.stall_after])
                hub.go_on.wait(60)
                self.close_connection = True
                return
            with contextlib.suppress(ConnectionError):  # the other side may give up
                self.wfile.write(data[first:])

        def do_POST(self):
            data = self.body()
            hub.tokens.add(self.headers.get("Authorization"))
            if hub.refuse:
                return self.reply({"error": "refused"}, hub.refuse)
            if self.path.endswith("/repos/create"):
                wish = json.loads(data)
                hub.repos[f"{wish['organization']}/{wish['name']}"] = wish
                self.reply({"url": f"{address}/{wish['organization']}/{wish['name']}"})
            elif self.path.endswith("/validate-yaml"):
                self.reply({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(data)["files"]]
                modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
                files = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]
                self.reply({"files": files})
            elif self.path.endswith("/objects/batch"):
                asked = json.loads(data)["objects"]
                actions = [{"upload": {"href": f"{address}/blob/{item['oid']}", "header": {}}} for item in asked]
                self.reply(
                    {
                        "transfer": "basic",
                        "objects": [item | {"actions": a} for item, a in zip(asked, actions, strict=True)],
                    }
                )
            elif "/commit/" in self.path:
                for line in data.splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "file":
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        hub.files[value["path"]] = hub.blobs[value["oid"]]
                [repo] = hub.repos
                url = f"{address}/{repo}/commit/{'0' * 40}"
                self.reply({"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})
            else:
                self.reply({"error": f"unknown {self.path}"}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield hub, address
    hub.go_on.set()
    server.shutdown()
    server.server_close()
