"""Runs of `rankloom train` that take a second: their configs, in an empty folder of their own."""

from rankloom.train.run.config import make_config


def maker_of_configs(folder, table):
    """A function that gives the config of `table` with some keys replaced, on a small text in `folder`."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 103)
    places = {"run": {"folder": str(folder / "runs")}, "data": {"source": str(text), "cache": str(folder / "cache")}}

    def make(**sections):
        merged = {}
        for part in (table, places, sections):
            for section, keys in part.items():
                merged[section] = merged.get(section, {}) | keys
        return make_config(merged, "test")

    return make
