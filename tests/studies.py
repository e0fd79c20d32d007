"""The settings of the studies beside the notebooks, for tests."""

from pathlib import Path

STUDIES = Path(__file__).parents[1] / "notebooks" / "studies"
SEARCH_PATH = f"hydra.searchpath=[file://{STUDIES}]"
"""The override that --config-dir notebooks/studies becomes."""
