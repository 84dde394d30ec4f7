"""Where the ranks of a launcher write, and what is left of it when they have ended. torch's elastic agent asks `RankLogs` for the files."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from rankloom.base.errors import ConfigError


class RankLogs(LogsSpecs):
    """Where each rank writes: flat names in one folder; what it says of its failure in another."""

    def __init__(self, folder: Path, failures: Path, environment: dict[str, str]):
        super().__init__(str(folder))
        self.folder, self.failures, self.environment = folder, failures, environment
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write logs in {folder}: {error.strerror}") from None

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self.folder)

    def log(self, rank: int, stream: str) -> Path:
        """Where a rank writes. stream: "stdout", which is the terminal's for rank 0, or "stderr"."""
        return self.folder / f"rank-{rank}.{stream}.log"

    def failure(self, rank: int) -> Path:
        """What a rank that fails leaves behind."""
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
        """Complete the log of a rank that left it to the launcher to show its error."""
        with contextlib.suppress(OSError), self.log(rank, "stderr").open("a") as log:
            log.write(text)

    def worth_reading(self, rank: int) -> str:
        """The log that may say why a rank ended: of its errors, else of its output."""
        logs = [self.log(rank, stream) for stream in ("stderr", "stdout")]
        return str(next(filter(_size, logs), logs[0]))

    def tidy(self) -> None:
        """Remove the logs in which nothing stands."""
        for log in self.folder.glob("rank-*.log"):
            if not _size(log):
                log.unlink(missing_ok=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class _QuietFile(logging.FileHandler):
    """A log that a full disk may cut short: the chatter in it is not worth hiding the real error for."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, if the file can be opened."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop what cannot be written."""


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
        with contextlib.suppress(OSError):   # a full disk, once more
            handler.close()
