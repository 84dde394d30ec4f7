"""`import rankloom.transport` registers the backend "rankloom" with torch.

If rankloom is installed this is not needed: pyproject.toml names `register` as a plug-in, which torch calls on its own import.
The backend itself is in world/transport/.
"""

from rankloom.world.transport.backend import create, register

__all__ = ["create", "register"]

register()
