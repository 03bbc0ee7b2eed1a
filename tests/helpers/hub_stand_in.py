"""A stand-in for the model hub's HTTP API, as far as an upload uses it: it keeps what it is sent."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    def __init__(self):
        self.repos, self.files, self.blobs, self.tokens, self.refuse = {}, {}, {}, set(), None


@contextmanager
def serve():
    """The stand-in and its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, body: dict, status: int = 200) -> None:
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

        def do_GET(self):
            self.reply({"error": "not found"}, 404)

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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub, address
    server.shutdown()
    server.server_close()
