"""Names of parameters and buffers in a model: those of modules, joined by dots."""


def full_name(module: str, key: str) -> str:
    """The name of what a module calls `key`.

    >>> full_name("blocks.0", "weight"), full_name("", "weight")
    ('blocks.0.weight', 'weight')
    """
    return f"{module}.{key}" if module else key
