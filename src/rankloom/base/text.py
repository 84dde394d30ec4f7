"""Text that came from outside, made safe to show."""

import io
import re
import sys
from collections.abc import Sequence
from typing import Any

LONG = 100   # characters of a line to quote


def printable(text: str) -> str:
    """Control characters as escapes, so that no text can move the cursor or colour the screen; line ends stay, tabs are 4 spaces.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text.replace("\t", "    "))


def with_its_line(error: ValueError, text: str) -> str:
    """The error of a TOML or JSON parser, followed by the line of `text` that it names.

    >>> with_its_line(ValueError("Cannot overwrite a value (at line 2, column 9)"), "lr = 1\\nlr = 2")
    'Cannot overwrite a value (at line 2, column 9): lr = 2'
    """
    found = re.search(r"\bline (\d+)", str(error))
    line = text.split("\n")[int(found[1]) - 1].strip() if found else ""
    return f"{error}: {printable(line[:LONG])}{' ...' * (len(line) > LONG)}" if line else str(error)


def not_drawn(plot: str) -> str:
    """The line in place of a plot where matplotlib is missing."""
    return f"{plot} was not drawn: it needs matplotlib (pip install matplotlib)"


def whole_number(kind: type, words: Sequence[Any]) -> int:
    """Parse a whole number from the command line, for cyclopts. `8.5` and `8.0` are refused. words: one token"""
    try:
        return int(words[0].value)
    except ValueError:
        raise ValueError(f"{words[0].value!r} is not a whole number") from None


def show_any_text() -> None:
    """From here on, print a question mark for each character that the encoding of the output lacks, instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
