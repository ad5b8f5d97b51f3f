"""Which workers are the ranks of a job, and who takes the place of one that is lost. Pure."""

from __future__ import annotations

from collections.abc import Callable

MOST_FRUITLESS = 3
"""Times in a row that a job is formed anew without a step done between."""


class Members:
    """Workers by number: some are ranks of the present job, some wait for a place in the next one.

    The job is formed anew when one of its ranks is lost, or when more workers are there than it has ranks. Each time
    is an epoch; what workers say of an earlier one is passed over.

    Attributes:
        epoch: Number of the present job, from 0.
        ranks: Its workers, by rank.
        lost: Those of its ranks that have ended.
        waiting: Workers that ask for a place, in the order in which they get one.
        fruitless: How often in a row a job was formed after a loss and lost a rank before it had done a step.
    """

    def __init__(
        self,
        wanted: int,
        least: int,
        fits: Callable[[int], bool] = lambda ranks: True,
        host_of: Callable[[int], int] = lambda number: 0,
    ) -> None:
        """The first job has workers 0 to `wanted` - 1.

        Args:
            wanted: Ranks of a whole job.
            least: Ranks with which it goes on at least.
            fits: Whether so many ranks can share the work.
            host_of: Where a worker is.
        """
        self._wanted, self._least, self._fits, self._host_of = wanted, least, fits, host_of
        self.epoch = self.fruitless = 0
        self.ranks = list(range(wanted))
        self.lost: set[int] = set()
        self.waiting: list[int] = []
        self._holds: dict[int, str] = {}
        self._steps_done: dict[int, int] = {}
        self._ended: set[int] = set()
        self._done: set[int] = set()
        self._asked = False
        self._has_stepped = False

    @property
    def is_broken(self) -> bool:
        """Whether some rank has left the present job, so that all others will."""
        return bool(self.lost) or any(number in self.waiting for number in self.ranks)

    @property
    def silent(self) -> list[int]:
        """Ranks of a job that is broken which have neither ended nor asked for another place."""
        return [number for number in self.ranks if self._is_in(number)] if self.is_broken else []

    @property
    def is_settled(self) -> bool:
        """Whether the present job has lost nobody and has done a step."""
        return self._has_stepped and not self.is_broken

    @property
    def is_short(self) -> bool:
        """Whether all that are left ask for a place, and are too few."""
        return self.is_broken and not self.silent and not self._largest(len(self.waiting))

    @property
    def is_over(self) -> bool:
        """Whether the work is done: some rank has ended well, and none is still at it."""
        return bool(self._done.intersection(self.ranks)) and not any(map(self._is_in, self.ranks))

    @property
    def waiting_ranks(self) -> list[int]:
        """Ranks of the present job that ask for a place in another one, in their order."""
        return [number for number in self.ranks if number in self.waiting]

    def wait(self, number: int, epoch: int, holds: str = "", done: int = 0) -> None:
        """A worker asks for a place.

        Args:
            number: Which.
            epoch: Of the job that it has left; -1 if it never had a place.
            holds: What it holds in memory of that job's work: others that say the same hold the same.
            done: How many steps of it.
        """
        if epoch == -1 and number in self.ranks:
            # It was given one before it asked.
            return
        if epoch in (-1, self.epoch) and number not in self.waiting and number not in self._ended:
            self.waiting.append(number)
            self._holds[number], self._steps_done[number] = holds, done

    def step(self, epoch: int) -> None:
        """The job of `epoch` has done a step."""
        if epoch == self.epoch:
            self._has_stepped, self.fruitless = True, 0

    def end(self, number: int, lost: bool) -> None:
        """A worker has ended: well, or not."""
        self._ended.add(number)
        if number in self.waiting:
            self.waiting.remove(number)
        if not lost:
            self._done.add(number)
        elif number in self.ranks:
            self.lost.add(number)

    def should_grow(self, coming: int = 0) -> bool:
        """Whether to ask the ranks of the present job to leave it at the end of a step: once in a job.

        Args:
            coming: See `form`: they are waited for, as a host's workers that come one after the other would else
                interrupt the others as often.
        """
        if self._asked or self.is_broken or not self._has_stepped or coming:
            return False
        running = sum(self._is_in(number) for number in self.ranks)
        self._asked = running == len(self.ranks) and self._largest(running + len(self.waiting)) > running
        return self._asked

    def form(self, coming: int) -> list[int] | None:
        """Forms the next job where all ranks of the present one have left it; its workers by rank.

        Ranks keep their order, so that rank 0 stays the same as long as it lives and none has done a step that it has
        not; others come behind them. Those of a host are next to each other.

        Args:
            coming: Workers that have been started and will ask for a place.

        Returns:
            None where nothing is to be formed yet; an empty list where too few are left.
        """
        if self.is_over or not self.is_broken or self.silent:
            return None
        remaining = sorted(self.waiting_ranks, key=lambda number: -self._steps_done[number])
        candidates = remaining + [number for number in self.waiting if number not in remaining]
        size = self._largest(len(candidates))
        if size == 0:
            return None if self._largest(len(candidates) + coming) else []
        self.fruitless = 0 if self._has_stepped else self.fruitless + 1
        if self.lost and self.fruitless >= MOST_FRUITLESS:
            return []
        self.epoch += 1
        # Where not all are needed, each thing that some hold is worth more than a copy of it.
        first = {self._holds[number]: number for number in reversed(remaining)}.values()
        chosen = sorted(candidates, key=lambda number: (number not in first, candidates.index(number)))[:size]
        hosts = list(dict.fromkeys(self._host_of(number) for number in candidates if number in chosen))
        self.ranks = sorted(chosen, key=lambda number: (hosts.index(self._host_of(number)), candidates.index(number)))
        self.waiting = [number for number in candidates if number not in chosen]
        self.lost, self._asked, self._has_stepped = set(), False, False
        return self.ranks

    def _is_in(self, number: int) -> bool:
        return number not in self._ended and number not in self.waiting

    def _largest(self, workers: int) -> int:
        """The most ranks that so many workers can be; 0 if those are too few."""
        sizes = range(min(workers, self._wanted), self._least - 1, -1)
        return next((size for size in sizes if self._fits(size)), 0)
