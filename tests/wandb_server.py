"""A stand-in for W&B's server, with the parts that a run needs."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
import wandb


class Artifact(NamedTuple):
    """A version of an artifact. Its number is its place in `WandbServer.artifacts`."""

    name: str
    digest: str
    aliases: set[str]


class WandbServer:
    """Takes runs as W&B's server does, until `leave` is called; `runs` and `artifacts` hold what has arrived."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.artifacts: list[Artifact] = []
        self.used: list[int] = []  # numbers of those that runs started from
        self._uploads: dict[str, bytes] = {}  # by path
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
                owner._uploads[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not owner.gone:
                    self.answer({})

            def do_GET(self) -> None:  # a manifest, or /artifactsV2/…/ID of its version/DIGEST/NAME
                *_, number, _, name = self.path.split("/")
                content = owner._uploads.get(self.path) or owner._uploads[f"/artifacts/{number}/{name}"]
                self.send(content)

            def answer(self, content: dict[str, Any]) -> None:
                self.send(json.dumps(content).encode())

            def send(self, text: bytes) -> None:
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
        if answer := self._answer_of_artifacts(query, values):
            return {"data": answer}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in values["files"]]
            return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _answer_of_artifacts(self, query: str, values: dict[str, Any]) -> dict[str, Any] | None:
        user = {"id": "e", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        if "viewer {" in query:
            return {"viewer": user}
        if "query ArtifactType(" in query:
            return {"project": {"artifact": None}}
        if "CreateArtifact " in query:
            new = Artifact(values["input"]["artifactCollectionName"], values["input"]["digest"], set())
            aliases = {entry["alias"] for entry in values["input"]["aliases"]}
            number = next((n for n, one in enumerate(self.artifacts) if one[:2] == new[:2]), len(self.artifacts))
            state = "COMMITTED" if number < len(self.artifacts) else "PENDING"
            self.artifacts += [new] * (state == "PENDING")
            for artifact in self.artifacts:
                if artifact.name == new.name:
                    artifact.aliases.difference_update(aliases)
            self.artifacts[number].aliases.update(aliases)
            sequence = {"id": "s", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": f"{number}", "state": state, "artifactSequence": sequence}}}
        if "CreateArtifactManifest " in query:
            url = f"{self.url}/manifests/{values['artifactID']}"
            file = {"id": "f", "uploadUrl": url, "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
        if "CreateArtifactFiles " in query:
            edges = []
            for file in values["input"]["artifactFiles"]:
                place = {"storagePath": file["name"], "artifact": {"id": file["artifactID"]}}
                url = f"{self.url}/artifacts/{file['artifactID']}/{file['name']}"
                edges.append({"node": place | {"uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if "CommitArtifact " in query:
            return {"commitArtifact": {"artifact": {"id": values["artifactID"], "digest": "d"}}}
        if "UseArtifact" in query:
            self.used.append(int(values["artifactID"]))
            return {"useArtifact": {"artifact": {"id": values["artifactID"]}}}
        if "FetchArtifactManifest" in query:
            return {"artifact": {"currentManifest": {"file": {"directUrl": f"{self.url}/manifests/{values['id']}"}}}}
        if "ArtifactMembershipByName" in query:
            return {"project": {"artifactCollectionMembership": self._membership(*values["name"].split(":"))}}
        return None

    def _membership(self, name: str, alias: str) -> dict[str, Any] | None:
        number = next((n for n, one in enumerate(self.artifacts) if one.name == name and alias in one.aliases), None)
        if number is None:
            return None
        artifact = self.artifacts[number]
        project = {"id": "p", "internalId": "p", "name": "p", "entity": {"name": "me"}}
        collection = {"__typename": "ArtifactSequence", "name": name, "project": project}
        version = {
            "__typename": "Artifact", "id": f"{number}", "artifactSequence": collection, "versionIndex": number,
            "artifactType": {"name": "model"}, "description": None, "metadata": "{}", "ttlDurationSeconds": -2,
            "ttlIsInherited": False, "tags": [], "historyStep": None, "state": "COMMITTED", "size": 1,
            "digest": artifact.digest, "commitHash": "c", "fileCount": 1, "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
        }  # fmt: skip
        return {
            "__typename": "ArtifactCollectionMembership", "id": "a", "versionIndex": number, "artifact": version,
            "createdAt": "2026-01-01T00:00:00Z", "artifactCollection": collection,
            "aliases": [{"__typename": "ArtifactAlias", "id": "l", "alias": one} for one in artifact.aliases],
        }  # fmt: skip


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
