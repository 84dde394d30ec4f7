"""Text that came from outside, made safe to show."""

import io
import sys


def printable(text: str) -> str:
    """Control characters as escapes, so that no text can move the cursor or colour the screen; line ends stay, tabs are 4 spaces.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text.replace("\t", "    "))


def show_any_text() -> None:
    """From here on, a character that the encoding of the output has not is shown as a question mark, and is no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
