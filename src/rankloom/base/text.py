"""Text that came from outside, made safe to show."""


def printable(text: str) -> str:
    """Control characters as escapes, so that no text can move the cursor or colour the screen; line ends stay, tabs are 4 spaces.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text.replace("\t", "    "))
