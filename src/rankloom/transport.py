"""`import rankloom.transport` makes the backend "rankloom" known to torch.

After an install torch does that by itself: pyproject.toml names `register` as a plug-in, which torch calls when it is
imported. Read world/transport/ for the backend itself.
"""

from rankloom.world.transport.backend import create, register

__all__ = ["create", "register"]

register()
