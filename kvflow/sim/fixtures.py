"""The old name of `kvflow.testing.fixtures`; a module of its own,
because it needs pytest_asyncio.
"""

from kvflow.testing.fixtures import kvflow_clean_loop, kvflow_pair

__all__ = ["kvflow_clean_loop", "kvflow_pair"]
