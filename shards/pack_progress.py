"""How far a data set is: what the tasks of its shards report, added up per split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# Called with the split's name, the images done so far and the images of the split.
Progress = Callable[[str, int, int], None]


class SplitProgress:
    """Takes (number of the task, images done of it) and tells how many images of its split are done by now."""

    def __init__(self, split_of_task: Sequence[str], totals: Mapping[str, int], tell: Progress | None) -> None:
        self._split_of_task, self._totals, self._tell = split_of_task, totals, tell
        self._of_task = [0] * len(split_of_task)
        self._of_split = dict.fromkeys(totals, 0)

    def __call__(self, number: int, done: int) -> None:
        split = self._split_of_task[number]
        self._of_split[split] += done - self._of_task[number]
        self._of_task[number] = done
        if self._tell:
            self._tell(split, self._of_split[split], self._totals[split])
