from ...hub_server import hub_server

__all__ = ["hub_server"]
