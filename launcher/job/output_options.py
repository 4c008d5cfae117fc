"""What is done with the lines of a job's processes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import LaunchError

LOG_SIZE = 16 << 20  # bytes of one file
LOG_FILES = 4  # of one process
_VALID = "all, none, or ranks of workers such as 0, 0,2 or 0,4-7"
_LARGEST = 9  # digits


@dataclass(frozen=True)
class OutputOptions:
    """Options of launch.py for what the processes print.

    Args:
        log_dir: the directory for a file for each process; None for no files.
        log_size: how large a file may be before a new one is begun, in bytes.
        log_files: how many files of each process are kept.
        show: the ranks of the workers whose lines are shown; None for all.
        live: whether a terminal shows one line for each process.
        scroll: whether it shows the lines of `show` above that, too.

    Raises:
        LaunchError: `live` would lose lines.
    """

    log_dir: str | None = None
    log_size: int = LOG_SIZE
    log_files: int = LOG_FILES
    show: tuple[int, ...] | None = None
    live: bool = False
    scroll: bool = False

    def __post_init__(self) -> None:
        if self.live and self.log_dir is None and not self.scroll:
            raise LaunchError(
                "--live shows the last line of each process; say where the others go: into files, with --log-dir DIR, "
                "or above it, with --show all or --show RANKS"
            )

    def open_files(self, num_processes: int) -> int:
        """How many files are open for so many processes, and for launch.py itself."""
        return num_processes + 2 if self.log_dir is not None else 0

    def require_ranks(self, num_workers: int) -> None:
        """Check that the job has the workers that are to be shown.

        Raises:
            LaunchError: it has not.
        """
        for rank in self.show or ():
            if rank >= num_workers:
                ranks = "rank is 0" if num_workers == 1 else f"ranks are 0 to {num_workers - 1}"
                raise LaunchError(f"--show {rank}: there is no worker {rank}; the workers' {ranks}")

    def shows(self, role: str, rank: int) -> bool:
        """Whether the lines of a member are shown, where `live` does not hide them."""
        return role != "worker" or self.show is None or rank in self.show


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """The ranks that `--show` names, in order; None for all.

    Raises:
        ValueError: the text is not valid. The message says what is.
    """
    if text in ("all", "none"):
        return None if text == "all" else ()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not _is_rank(first) or (dash and not _is_rank(last)):
            raise ValueError(f"{part!r} is not a rank; valid: {_VALID}")
        if dash and int(last) < int(first):
            raise ValueError(f"{part} ends before it begins; valid: {_VALID}")
        if int(last or first) - int(first) >= 1 << 16:
            raise ValueError(f"{part} are too many workers; valid: {_VALID}")
        ranks.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ranks))


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LARGEST
