"""Show the report of a run in a browser, and keep it up to date while the run trains.

    ./launch.sh watch runs/my-voice

The page is served to this machine only (127.0.0.1). To see the run of another machine, start this there and forward the
port: ssh -L 8765:127.0.0.1:8765 HOST. Ctrl-C ends it without affecting the training.
"""

import argparse
import hashlib
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the recipes

from common.errors import UserError, command_parser, run_command
from infer.dispatch import read_recipe

SHOWN = ("config.json", "metrics.jsonl", "samples/*/*", "figures/*.png", "export/*.json")  # what the page is made of


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.prog = "./launch.sh watch"
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--port", type=int, default=8765, help="port of the page (default: 8765; 0 = any free one)")
    return parser.parse_args(argv)


def version_of(run: Path) -> str:
    """Changes whenever the page would."""
    states = []
    for path in sorted(path for pattern in SHOWN for path in run.glob(pattern)):
        try:
            status = path.stat()
        except FileNotFoundError:  # a draft that was renamed since
            continue
        states.append((str(path), status.st_mtime_ns, status.st_size))
    return hashlib.sha256(repr(states).encode()).hexdigest()


def make_server(run: Path, port: int) -> ThreadingHTTPServer:
    from common.report import report_page

    building = threading.Lock()
    built = {}  # version -> page, of the newest only

    def page() -> str:
        with building:
            version = version_of(run)
            if version not in built:
                built.clear()
                built[version] = report_page(run, live=True)
            return built[version]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if name not in ("127.0.0.1", "localhost"):  # another site that had its name point to this machine
                return self.answer(403, "only for this machine", "text/plain")
            try:
                if self.path == "/version":
                    return self.answer(200, version_of(run), "text/plain")
                if self.path == "/":
                    return self.answer(200, page(), "text/html")
            except (OSError, ValueError) as error:  # a file that is being replaced: the browser asks again
                return self.answer(503, f"not readable now: {error}", "text/plain")
            return self.answer(404, "not found", "text/plain")

        def answer(self, code: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:  # the browser has gone
                pass

        def log_message(self, *_):
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) else "ports are 0 to 65535"
        raise UserError(f"--port {port} cannot be used ({why}); --port 0 takes any that is free.") from None


def main() -> None:
    args = parse_args()
    read_recipe(str(args.run))
    server = make_server(args.run, args.port)
    try:
        print(f"http://127.0.0.1:{server.server_port}/ shows {args.run} while it trains; Ctrl-C ends this", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    server.server_close()


if __name__ == "__main__":
    run_command(main)
