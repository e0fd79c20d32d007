"""A stand-in for Hugging Face's hub: huggingface_hub's client, whose three calls of ours end in memory."""

from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError


class HubServer(HfApi):
    """`files`: by repository and name, as the last commit left them. `private`: the repositories that began so.

    `commits`: how many there were. `refuses`: whether the next gets 403.
    """

    def __init__(self, cache: Path) -> None:
        super().__init__()
        self.cache = cache
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits, self.refuses = 0, False

    def __call__(self) -> "HubServer":
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok or repo_id not in self.files
        if private and repo_id not in self.files:
            self.private.add(repo_id)
        self.files.setdefault(repo_id, {})

    def create_commit(self, repo_id: str, operations: Iterable[CommitOperationAdd], *, commit_message: str) -> None:
        if self.refuses:
            raise _error(HfHubHTTPError, 403)
        assert commit_message
        for operation in operations:
            with operation.as_file() as stream:
                self.files[repo_id][operation.path_in_repo] = stream.read()
        self.commits += 1

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        if filename not in self.files.get(repo_id, {}):
            raise _error(EntryNotFoundError if repo_id in self.files else RepositoryNotFoundError, 404)
        path = self.cache / repo_id / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[repo_id][filename])
        return str(path)


def _error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind(f"{status} for url", response=httpx.Response(status, request=httpx.Request("GET", "https://hub")))


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """The hub of this process."""
    server = HubServer(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", server)
    return server
