"""What torch calls at the end of its own import, if rankloom is installed (pyproject.toml): it registers the backend "rankloom"."""

from importlib import import_module


def register() -> None:
    """Make the backend known to torch."""
    backend = import_module("rankloom.world.transport.backend")
    if hasattr(backend, "register"):   # else it is being imported, and torch by it: `rankloom.transport` registers it after that
        backend.register()
