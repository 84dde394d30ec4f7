"""Names of parameters and buffers in a model: those of modules, joined by dots."""


def full_name(module: str, key: str) -> str:
    """The name of what a module calls `key`.

    >>> full_name("blocks.0", "weight"), full_name("", "weight")
    ('blocks.0.weight', 'weight')
    """
    return f"{module}.{key}" if module else key


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is that of something inside the module named `module` ("" is the model), not of the module itself.

    >>> is_inside("blocks.1.norm", "blocks.1"), is_inside("blocks.10", "blocks.1"), is_inside("blocks", "")
    (True, False, True)
    """
    return name != module and name.startswith(full_name(module, ""))
