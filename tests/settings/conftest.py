from ..typed import typed

__all__ = ["typed"]
