"""A stand-in for Hugging Face's hub: huggingface_hub's download, which ends in memory."""

from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError


class HubServer:
    """`files`: by repository and name."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[str, dict[str, bytes]] = {}

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
    monkeypatch.setattr("huggingface_hub.hf_hub_download", server.hf_hub_download)
    return server
