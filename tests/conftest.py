"""What the whole run prints at its end: the largest error of every layout that was compared with one process."""


def pytest_terminal_summary(terminalreporter):
    """The table of test_matrix.py, wherever its tests ran."""
    layouts = [value for report in terminalreporter.getreports("passed") for name, value in report.user_properties if name == "layout"]
    if layouts:
        terminalreporter.section("layouts against one process, fp64: largest relative error over stages 0 to 3")
        for layout, error in layouts:
            terminalreporter.write_line(f"{layout:<55} {error}")
