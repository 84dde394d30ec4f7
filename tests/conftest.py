"""What holds for the whole run: signals that can be sent, and a table at its end."""

import signal


def pytest_configure():
    """A shell that runs this in the background has some signals ignored, and every process started from here would inherit that."""
    for each, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, handler)


def pytest_terminal_summary(terminalreporter):
    """The table of test_matrix.py, wherever its tests ran: the largest error of every layout that was compared with one process."""
    layouts = [value for report in terminalreporter.getreports("passed") for name, value in report.user_properties if name == "layout"]
    if layouts:
        terminalreporter.section("layouts against one process, fp64: largest relative error over stages 0 to 3")
        for layout, error in layouts:
            terminalreporter.write_line(f"{layout:<55} {error}")
