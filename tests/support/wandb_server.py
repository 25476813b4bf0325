"""A stand-in for wandb's server on this machine: it takes runs, their history and files, and keeps them in memory.

It answers what wandb 0.31 asks for a run: wandb's own server is not part of these tests.
"""

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """Say nothing of connections that wandb closes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict] = {}
        """Variables of the first request for each run, by id: displayName, groupName, tags, project, config"""
        self.config: dict = {}
        """The run's config, as last sent"""
        self.later_names: list = []
        """Display names of all later requests for a run"""
        self.history: dict[int, dict] = {}
        """Rows of the run, by step"""
        self.files: dict[str, bytes] = {}

    def answer(self, operation: str, variables: dict) -> dict | None:
        """Return the data of a GraphQL answer, or None for a request that this server does not know."""
        name = variables.get("name")
        if operation == "UpsertBucket":
            if name in self.runs:
                self.later_names.append(variables["displayName"])
            self.runs.setdefault(name, variables)
            self.config |= {key: part["value"] for key, part in json.loads(variables.get("config") or "{}").items()}
            return {"upsertBucket": {"bucket": self._bucket(name), "inserted": True}}
        if operation == "RunResumeStatus":
            known = self._bucket(name) if name in self.runs else None
            return {"model": {"id": "P", "name": "p", "entity": {"id": "E", "name": "someone"}, "bucket": known}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        return None

    def _bucket(self, name: str) -> dict:
        project = {"id": "P", "name": "p", "entity": {"id": "E", "name": "someone"}}
        last = max(self.history, default=-1)
        tail = json.dumps([json.dumps({"_step": last, "_runtime": 1})]) if self.history else "[]"
        shown = {"displayName": "shown", "description": None, "config": "{}", "summaryMetrics": "{}", "tags": []}
        counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": tail, "eventsTail": "[]"}
        return (
            {"id": "B", "name": name, "sweepName": None, "project": project, "wandbConfig": '{"t": 1}'}
            | shown
            | counts
            | tails
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = {}
        if self.path == "/graphql":
            request = json.loads(body)
            data = self.server.answer(request["operationName"], request.get("variables") or {})
            answer = {"data": data} if data else {"data": None, "errors": [{"message": "not known here"}]}
        elif self.path.endswith("/file_stream"):
            for line in json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                row = json.loads(line)
                self.server.history[row["_step"]] = row
        elif self.path.startswith("/upload/"):
            self.server.files[self.path.removeprefix("/upload/")] = body
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST


@contextmanager
def wandb_server():
    """A running ``WandbServer``."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
