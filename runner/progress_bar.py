"""Show progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass
class ProgressDisplay:
    """A progress bar, `timed` if it estimates the remaining time; without a terminal a line every `PLAIN_SECONDS`."""

    PLAIN_SECONDS: ClassVar = 10.0

    what: str
    total: int
    _: KW_ONLY
    done: int = 0
    unit: str = "steps"
    quiet: bool = False
    timed: bool = True

    def __post_init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._shown = time.monotonic()
        # Steps of an earlier process took no time of this one: the estimate leaves them out.
        self._done_before, self._named = self.done, False

    def __enter__(self) -> ProgressDisplay:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn()]
            columns += [TextColumn(self.unit), *([TimeRemainingColumn()] if self.timed else [])]
            facts = TextColumn("{task.fields[facts]}", style="dim")
            self._bar = Progress(*columns, facts, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, facts="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, **facts: float | str) -> None:
        """Set the number of finished items; `facts` are shown next to it."""
        self.done = done
        short = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in facts.items()}
        shown = "  ".join(f"{name} {value}" for name, value in short.items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self.total, facts=shown)
        elif not self.quiet and time.monotonic() - self._shown >= self.PLAIN_SECONDS:
            self._shown = time.monotonic()
            if not self._named:
                self.print(f"{self.what}:")
                self._named = True
            elapsed, new = self._shown - self._started, done - self._done_before
            times = f"{format_duration(elapsed)} elapsed"
            if self.timed and new > 0:
                times += f", {format_duration(elapsed / new * (self.total - done))} left"
            self.print(f"  {done}/{self.total} {self.unit}  {times}  {shown}".rstrip())

    def print(self, line: str) -> None:
        """Print a line, above the bar if there is one; print nothing if quiet."""
        if self.quiet:
            return
        if self._bar is not None:
            # rich would read words in brackets as markup.
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Format an estimated duration with few digits: `45 s`, `3.4 min`, `12 min`, `4.2 h`, `3.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 90:
        return f"{minutes:.{0 if minutes >= 9.95 else 1}f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
