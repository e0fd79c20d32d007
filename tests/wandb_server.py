"""A stand-in for W&B's server, with the parts that a run needs."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import wandb


class WandbServer:
    """Takes runs as W&B's server does, until `leave` is called; `runs` holds what has arrived."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.gone = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if not owner.gone:
                    self.answer(owner.answer(self.path, json.loads(body)))

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not owner.gone:
                    self.answer({})

            def answer(self, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client that hangs up is no error
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def leave(self) -> None:
        """Be there no more."""
        if not self.gone:
            self.gone = True
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("file_stream"):
            run = self.runs[path.split("/")[-2]]
            for name, content in request.get("files", {}).items():
                if name == "wandb-history.jsonl":
                    run["history"] += [json.loads(line) for line in content["content"]]
            if "exitcode" in request:
                run["exit_code"] = request["exitcode"]
            return {"exitcode": None, "limits": {}}
        query, values = request["query"], request.get("variables") or {}
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket" in query:
            run = self.runs.setdefault(values["name"], {"history": [], "exit_code": None})
            run |= {"name": values["displayName"] or run.get("name"), "group": values["groupName"] or run.get("group")}
            bucket = {"id": "x", "name": values["name"], "displayName": run["name"], "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}}
        if "RunResumeStatus" in query:
            return {"data": {"model": {"id": "p", "name": "p", "entity": project["entity"], "bucket": None}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in values["files"]]
            return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A server that wandb in this process takes for W&B's."""
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    wandb.teardown()  # it reads its surroundings once
    yield server
    server.leave()
    wandb.teardown()
