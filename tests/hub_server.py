"""A stand-in for Hugging Face's hub, with the parts that a push and a download of small files need."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class HubServer:
    """`files`: by repository and name, as the last commit left them. `private`: the repositories that began so.

    `commits`: how many there were. `refuses`: a part of an address that gets 403.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits, self.refuses = 0, "nothing"
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                name, _, file = self.path.strip("/").partition("/resolve/main/")
                content = owner.files.get(name, {}).get(file)
                if content is None:
                    missing = "EntryNotFound" if name in owner.files else "RepoNotFound"
                    self.answer(404, b"", {"X-Error-Code": missing, "X-Repo-Commit": "c" * 40})
                else:
                    tag = hashlib.sha256(content).hexdigest()
                    self.answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": "c" * 40})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                known = self.headers.get("Authorization") == "Bearer hf_of_a_test"
                if not known or owner.refuses in self.path:
                    self.answer(403, b"{}")
                else:
                    self.answer(200, json.dumps(owner.take(self.path, body)).encode())

            def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}"
            self.files.setdefault(name, {})
            if told.get("private") or told.get("visibility") == "private":
                self.private.add(name)
            return {"url": f"{self.url}/{name}"}
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return {"files": [{"path": it["path"], "uploadMode": "regular", "shouldIgnore": False} for it in asked]}
        assert path == f"/api/models/{name}/commit/main"
        lines = [json.loads(line) for line in body.splitlines()]
        sent = {it["value"]["path"]: base64.b64decode(it["value"]["content"]) for it in lines if it["key"] == "file"}
        self.files[name] |= sent
        self.commits += 1
        return {"commitUrl": f"{self.url}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40, "success": True}


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that huggingface_hub in this process takes for Hugging Face's. It reads HF_ENDPOINT once, when imported."""
    server = HubServer()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield server
    server.server.shutdown()
    server.server.server_close()
