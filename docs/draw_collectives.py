"""Draws the pictures of docs/collectives.md, each algorithm from its algorithm: python docs/draw_collectives.py.

Ranks are columns and time runs downwards. Between the rounds a rank's buffer is shown, a cell for each shard in the
shard's colour, or one cell where an algorithm never cuts the buffer. A cell of a sum has a strip for each rank whose
elements are in it. What nothing needs any more is pale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from algorithm_runs import Held, Move, holdings, moves, needs, rounds, run
from collective_tables import TEXTBOOK, formula_of, times

from paceline.core.collectives.algorithms import REDUCTIONS, find_algorithm

IMAGES = Path(__file__).parent / "images" / "collectives"


@dataclass(frozen=True)
class Panel:
    """One algorithm, between so many ranks."""

    name: str
    ranks: int = 4
    ranks_per_host: int = 0
    values: tuple[float, ...] = ()
    """Numbers to add up, of each rank, shown under its cell."""


PICTURES: dict[str, list[list[Panel]]] = {
    "server": [[Panel("broadcast/server")], [Panel("reduce/server")]],
    "tree": [[Panel("broadcast/tree", 8)], [Panel("reduce/tree", 8, values=TEXTBOOK)]],
    "server-shards": [[Panel("scatter/server")], [Panel("gather/server")]],
    "tree-shards": [[Panel("scatter/tree")], [Panel("gather/tree")]],
    "direct": [[Panel("all_gather/direct")], [Panel("reduce_scatter/direct")]],
    "ring": [[Panel("all_gather/ring")], [Panel("reduce_scatter/ring")]],
    "doubling": [[Panel("all_gather/doubling", 6)], [Panel("reduce_scatter/halving", 6)]],
    "hierarchical": [
        [Panel("all_gather/hierarchical", ranks_per_host=2)],
        [Panel("reduce_scatter/hierarchical", ranks_per_host=2)],
    ],
    "all-reduce-ring": [[Panel("all_reduce/ring")], [Panel("all_reduce/tree", 8)]],
    "all-reduce-halving": [[Panel("all_reduce/halving")], [Panel("all_reduce/hierarchical", ranks_per_host=2)]],
    "all-reduce-direct": [[Panel("all_reduce/direct")], [Panel("all_reduce/server")]],
    "all-reduce-doubling": [[Panel("all_reduce/doubling")], [Panel("all_reduce/doubling", 6)]],
    "rooted-ring": [[Panel("broadcast/ring")], [Panel("reduce/ring")]],
    "through-server": [[Panel("all_gather/server")], [Panel("reduce_scatter/server")]],
    "all-to-all": [[Panel("all_to_all/direct")], [Panel("all_to_all/pairwise")]],
    "barrier": [
        [Panel("barrier/doubling", 6), Panel("barrier/server")],
        [Panel("barrier/tree"), Panel("barrier/direct")],
    ],
}
"""By file: columns of panels."""

SHARDS = ("#3f78b5", "#e09a3e", "#5fa777", "#a56cb4", "#cf5c4d", "#4aa5b0")
WHOLE = "#4c6f97"
INK, GREY, LINE, HOST, GROUND = "#20262e", "#707986", "#c3c9d1", "#edf1f6", "#fbfcfd"

WIDTH, GAP, EDGE = 430, 36, 14
LEFT, RIGHT = 62, 84
"""Of a panel: room for the rounds' names and for their costs."""
HEAD, HOST_NAME, CELL, BAND, NUMBER = 44, 15, 22, 50, 13
"""Heights: of titles, of a host's name, of cells, of arrows, of a number under a cell."""


class Drawing:
    """One panel as SVG, its upper left corner at (0, 0)."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.collective = panel.name.partition("/")[0]
        self.algorithm = find_algorithm(panel.name, panel.ranks_per_host)
        self.numel = self._cells()
        self.turns = rounds(self.algorithm, panel.ranks, self.numel)
        self.states = holdings(self.collective, self.algorithm, panel.ranks, self.numel)
        self.needs = needs(self.collective, self.algorithm, panel.ranks, self.numel)
        self.strips = panel.ranks if self.collective in (*REDUCTIONS, "barrier") else 1
        self.pitch = (WIDTH - LEFT - RIGHT) / panel.ranks
        self.cell = (self.pitch - (12 if panel.ranks < 6 else 8)) / self.numel
        self.head = HEAD + (HOST_NAME if panel.ranks_per_host else 0)
        self.row = CELL + (NUMBER if panel.values else 0)
        self.height = self.head + self.row + len(self.turns) * (BAND + self.row) + 8

    def _cells(self) -> int:
        """Elements to draw for: one for each shard, or one where no part is less than the buffer."""
        ranks = self.panel.ranks
        parts = [part for turns in rounds(self.algorithm, ranks, ranks) for turn in turns for part in turn.sends]
        return 1 if self.collective == "barrier" or {part[1:] for part in parts} == {(0, ranks)} else ranks

    def x(self, rank: int, place: float = 0) -> float:
        """Left edge of a cell."""
        return LEFT + rank * self.pitch + (self.pitch - self.cell * self.numel) / 2 + place * self.cell

    def y(self, state: int) -> float:
        """Upper edge of the cells after so many rounds."""
        return self.head + state * (BAND + self.row)

    def busiest(self, number: int) -> Fraction:
        """Buffers that the busiest rank of a round sends, or receives."""
        parts = [parts for turn in self.turns[number] for parts in (turn.sends, turn.receives)]
        return Fraction(max(sum(part.stop - part.start for part in each) for each in parts), self.numel)

    def draw(self) -> Iterator[str]:
        """The elements of the picture."""
        formula = formula_of(self.panel.name)
        time = times(formula.rounds, "α") if self.collective == "barrier" else formula.time("M")
        yield text(0, 14, self.panel.name.replace("/", ", "), size=14, weight="bold")
        yield text(WIDTH, 14, time, anchor="end", size=12)
        yield from self._hosts()
        yield text(0, self.head - 8, "rank", fill=GREY)
        for rank in range(self.panel.ranks):
            yield text(self.x(rank, self.numel / 2), self.head - 8, str(rank), anchor="middle", weight="bold")
        for number, turns in enumerate(self.turns):
            yield from self._round(number, list(moves(turns, self.numel)))
        for number in range(len(self.states)):
            yield from self._state(number)
        if self.panel.values:
            yield from self._values()

    def _hosts(self) -> Iterator[str]:
        local, top = self.panel.ranks_per_host, HEAD - 20
        for host in range(self.panel.ranks // local if local else 0):
            left, width = LEFT + host * local * self.pitch + 2, local * self.pitch - 4
            yield box(left, top, width, self.height - top, HOST)
            yield text(left + width / 2, top + 14, f"host {host}", anchor="middle", fill=GREY)

    def _round(self, number: int, found: Sequence[Move]) -> Iterator[str]:
        top, bottom = self.y(number) + self.row, self.y(number + 1)
        middle = (top + bottom) / 2
        what = "tell" if self.collective == "barrier" else "add" if any(move.adds for move in found) else "copy"
        yield text(0, middle - 1, f"round {number + 1}")
        yield text(0, middle + 12, what, fill=GREY)
        cost = "" if self.collective == "barrier" else f" + {times(str(self.busiest(number)), 'M β')}"
        yield text(WIDTH, middle + 5, f"α{cost}", anchor="end", fill=GREY)
        leave = _places((move.giver, move.source, move.taker) for move in found)
        arrive = _places((move.taker, move.target, move.giver) for move in found)
        for move in found:
            start = self.x(move.giver, move.source + leave[move.giver, move.source, move.taker])
            end = self.x(move.taker, move.target + arrive[move.taker, move.target, move.giver])
            held = self.states[number][move.giver][move.source]
            assert held is not None, "what is sent is there"
            yield from arrow(start, top + 1.5, end, bottom - 1.5, self._colour(held))

    def _colour(self, held: Held) -> str:
        return WHOLE if self.numel == 1 else SHARDS[held.shard]

    def _state(self, number: int) -> Iterator[str]:
        top, width = self.y(number), self.cell * self.numel
        for rank, (buffer, needed) in enumerate(zip(self.states[number], self.needs[number], strict=True)):
            left = self.x(rank)
            yield box(left, top, width, CELL, "#ffffff")
            for place, held in enumerate(buffer):
                if held is not None:
                    yield from self._held(self.x(rank, place), top, held, needed[place])
            between = "".join(f"M{num(self.x(rank, place))} {num(top)}v{CELL}" for place in range(1, self.numel))
            frame = f"M{num(left)} {num(top)}h{num(width)}v{CELL}h-{num(width)}z"
            yield f'<path d="{frame}{between}" fill="none" stroke="{LINE}"/>'

    def _held(self, left: float, top: float, held: Held, needed: bool) -> Iterator[str]:
        height = CELL / self.strips
        ranks = sorted(held.ranks) if self.strips > 1 else [0]
        for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
            # Neighbouring strips as one.
            run_of_ranks = [rank for _, rank in group]
            y, tall = top + run_of_ranks[0] * height, len(run_of_ranks) * height
            yield box(left, y, self.cell, tall, self._colour(held), 1 if needed else 0.22)
        if self.collective == "all_to_all":
            (origin,) = held.ranks
            yield text(left + self.cell / 2, top + 15, str(origin), anchor="middle", fill="#ffffff", size=10)

    def _values(self) -> Iterator[str]:
        """The numbers that are added up, in tenths."""
        tenths = [[round(10 * value)] for value in self.panel.values]
        for number, state in enumerate(run(self.algorithm, tenths, int.__add__)):
            for rank, (value,) in enumerate(state):
                if self.needs[number][rank][0]:
                    y = self.y(number) + CELL + NUMBER - 2
                    yield text(self.x(rank, 0.5), y, f"{value / 10:.1f}", anchor="middle", size=10)


def _places(ends: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int, int], float]:
    """By (rank, place, peer), where in its cell an arrow stands, from 0 at the left edge to 1.

    Those that share a cell stand side by side, in the order of their peers.
    """
    places = {}
    for _, group in groupby(sorted(ends), lambda end: end[:2]):
        shared = list(group)
        places.update({end: (index + 1) / (len(shared) + 1) for index, end in enumerate(shared)})
    return places


# ---- SVG


def num(value: float) -> str:
    """One decimal is enough."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float, y: float, words: str, anchor: str = "start", size: float = 11, weight: str = "normal", fill: str = INK
) -> str:
    """A line of words on a baseline."""
    style = {"text-anchor": (anchor, "start"), "font-size": (num(size), "11"), "font-weight": (weight, "normal")}
    style["fill"] = (fill, INK)
    given = "".join(f' {key}="{value}"' for key, (value, usual) in style.items() if value != usual)
    return f'<text x="{num(x)}" y="{num(y)}"{given}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1) -> str:
    """A filled rectangle."""
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return f'<path d="M{num(x)} {num(y)}h{num(width)}v{num(height)}h-{num(width)}z" fill="{fill}"{pale}/>'


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str) -> Iterator[str]:
    """An arrow that leaves and arrives straight down."""
    neck = to_y - 5
    bends = f"{num(x)} {num((y + neck) / 2)} {num(to_x)} {num((y + neck) / 2)}"
    line = f"M{num(x)} {num(y)}C{bends} {num(to_x)} {num(neck)}"
    yield f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    yield f'<path d="M{num(to_x - 3)} {num(neck - 0.5)}h6l-3 5.5z" fill="{colour}"/>'


def picture(columns: Sequence[Sequence[Panel]]) -> str:
    """A whole file: columns of panels on a light ground."""
    drawn = [[Drawing(panel) for panel in column] for column in columns]
    width = 2 * EDGE + len(columns) * (WIDTH + GAP) - GAP
    height = 2 * EDGE + max(sum(each.height + GAP for each in column) - GAP for column in drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {num(width)} {num(height)}" width="{num(width)}" '
        f'height="{num(height)}" font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{INK}">',
        f"<title>{' and '.join(panel.name for column in columns for panel in column)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
    ]
    for index, column in enumerate(drawn):
        top: float = EDGE
        for each in column:
            lines += [f'<g transform="translate({EDGE + index * (WIDTH + GAP)} {num(top)})">', *each.draw(), "</g>"]
            top += each.height + GAP
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, columns in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(picture(columns))
