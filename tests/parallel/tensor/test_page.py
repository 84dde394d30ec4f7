"""What docs/tensor.md says about layouts and words is what the code derives."""

import re
from pathlib import Path

from rankloom.base.layout import Layout, collective, conjugate

PAGE = (Path(__file__).parents[3] / "docs" / "tensor.md").read_text()


def test_the_moves_of_a_half_block_are_those_that_the_code_derives():
    rows = re.findall(r"^\| (?:entrance|exit).*? \| `(.*?)` \| `(.*?)` \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for src, dst, forward, backward in rows:
        there = Layout.parse(src), Layout.parse(dst)
        assert (str(collective(*there, "tensor")), str(conjugate(*there, "tensor"))) == (forward, backward)
