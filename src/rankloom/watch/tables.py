"""Tables for the terminal."""

from rich.table import Column, Table


def folding_table(*headings: str, title: str | None = None) -> Table:
    """A table whose words a narrow terminal folds; rich would cut them."""
    return Table(*(Column(heading, overflow="fold") for heading in headings), title=title)
