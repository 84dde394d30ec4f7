"""The log files of the ranks of a launcher. torch's elastic agent asks `RankLogs` for them."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from rankloom.base.errors import ConfigError


class RankLogs(LogsSpecs):
    """The files of each rank: logs with flat names in one folder, its failure file in another."""

    def __init__(self, folder: Path, failures: Path, environment: dict[str, str]):
        super().__init__(str(folder))
        self.folder, self.failures, self.environment = folder, failures, environment
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write logs in {folder}: {error.strerror}") from None

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs."""
        return str(self.folder)

    def log(self, rank: int, stream: str) -> Path:
        """The log of a rank. stream: "stdout", which for rank 0 is the terminal instead, or "stderr"."""
        return self.folder / f"rank-{rank}.{stream}.log"

    def failure(self, rank: int) -> Path:
        """The failure file of a rank."""
        return self.failures / f"rank-{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files, and complete the environment of every rank."""
        for rank, env in envs.items():
            env.update(self.environment, TORCHELASTIC_ERROR_FILE=str(self.failure(rank)))
        out = {rank: str(self.log(rank, "stdout")) if rank else "" for rank in envs}
        err = {rank: str(self.log(rank, "stderr")) for rank in envs}
        files = {rank: str(self.failure(rank)) for rank in envs}
        return LogsDest(stdouts=out, stderrs=err, tee_stderrs={0: err[0]}, error_files=files)

    def add_traceback(self, rank: int, text: str) -> None:
        """Append its error to the log of a rank that left it to the launcher to show it."""
        with contextlib.suppress(OSError), self.log(rank, "stderr").open("ab") as log:
            log.write(text.encode(errors="backslashreplace"))   # it may name a file whose name is no UTF-8

    def worth_reading(self, rank: int) -> str:
        """The log that may say why a rank ended: its stderr, or else its stdout."""
        logs = [self.log(rank, stream) for stream in ("stderr", "stdout")]
        return str(next(filter(_size, logs), logs[0]))

    def tidy(self) -> None:
        """Remove empty logs."""
        for log in self.folder.glob("rank-*.log"):
            if not _size(log):
                log.unlink(missing_ok=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class _QuietFile(logging.FileHandler):
    """A log file that ignores a full disk: its messages are not important enough to hide the real error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, if the file can be opened."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record that cannot be written."""


@contextlib.contextmanager
def chatter_in(file: Path) -> Iterator[None]:
    """Send the errors that torch's agent logs to a file, and nothing to the terminal, which belongs to rank 0."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, before = _QuietFile(file, mode="w", delay=True), logger.propagate
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):   # the disk may be full here, too
            handler.close()
