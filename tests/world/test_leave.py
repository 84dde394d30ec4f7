"""A process that has nothing to save ends at a signal, whatever it is doing."""

import signal
import subprocess
import sys

import pytest

from rankloom.world.leave import leaving_on_signals

IMPORTS = """
import signal, sys
from rankloom.world.leave import leaving_on_signals
assert "torch" not in sys.modules
with leaving_on_signals(as_killed={as_killed}):
    print("told", end="")
    try:
        signal.raise_signal({number})
    except BaseException:        # as libraries do that try an import
        raise ImportError("something else")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_an_import_that_swallows_exceptions_ends_the_process_with_its_code(number):
    for as_killed, code, said in ((False, 128 + number, f"stopped by {number.name}\n"), (True, -number, "")):
        script = IMPORTS.format(number=int(number), as_killed=as_killed)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "told", said)


def test_a_process_without_an_output_ends_at_a_signal_with_its_code_too():
    script = IMPORTS.format(number=int(signal.SIGTERM), as_killed=False)
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")


WRITING = """
import signal, sys, threading
from pathlib import Path
from rankloom.base.files import replacing
from rankloom.world.leave import leaving_on_signals

written = threading.Event()

def write():
    with replacing(Path("{path}")) as temporary:
        temporary.write_text("half of it")
        written.set()
        threading.Event().wait()

with leaving_on_signals(as_killed={as_killed}):
    threading.Thread(target=write, daemon=True).start()
    written.wait()
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("as_killed, code", [(False, 130), (True, -2)])
def test_a_file_that_a_thread_is_writing_when_a_signal_ends_the_process_leaves_nothing_behind(tmp_path, as_killed, code):
    script = WRITING.format(path=tmp_path / "tokens.bin", as_killed=as_killed)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code
    assert list(tmp_path.iterdir()) == []


def test_handlers_from_before_come_back_and_ignored_signals_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ours = signal.getsignal(signal.SIGINT)
        with leaving_on_signals():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and signal.getsignal(signal.SIGINT) is not ours
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
