"""Pieces of a page. Whatever comes from a run is text, and stays text: it is escaped here and nowhere else. Pure."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: What a link to it ends with.
        title: Its heading.
        sentence: What the picture shows, in words, from the data.
        body: What follows.
    """

    name: str
    title: str
    sentence: str
    body: Html

    def html(self) -> Html:
        """The section as markup."""
        heading = tag("h2", self.title, id=f"{self.name}-heading")
        told = tag("p", self.sentence, class_="sentence")
        return tag("section", heading, told, self.body, id=self.name, aria_labelledby=f"{self.name}-heading")


def tag(name: str, *children: str, **attributes: str | float | bool) -> Html:
    """An element. Text among its children, and attributes' values, are escaped; `class_` is class, other _ become -."""
    listed = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not False
    )
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{listed}>{inner}</{name}>")


def escape(text: str) -> Html:
    """Text as markup; of characters that no page may hold, those in their place that say so."""
    plain = "".join(character if _may_be_shown(character) else "\ufffd" for character in text)
    return Html(html.escape(plain, quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    """Pieces of markup one after another; text among them is escaped."""
    return Html(between.join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table, whose first column names its rows."""
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads)))
    body = [tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in cells)) for first, *cells in rows]
    whole = tag("table", tag("caption", caption), head, tag("tbody", *body))
    return tag("div", whole, class_="wide", tabindex=0, role="region", aria_label=caption)


def figures(items: Iterable[tuple[str, str, str, float | None]]) -> Html:
    """Single numbers: of each its name, what it is called, how it is said, and its value for programs."""
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", label),
                tag("dd", said, data_figure=name, **({} if value is None else {"data_value": repr(float(value))})),
            )
            for name, label, said, value in items
        ),
        class_="figures",
    )


def bar(parts: Sequence[tuple[str, float]], label: str) -> Html:
    """A bar of parts, each a class and a share of the whole width."""
    drawn, left = [], 0.0
    for name, part in parts:
        drawn.append(tag("rect", x=f"{left:.2f}", y=0, width=f"{100 * part:.2f}", height=10, class_=name))
        left += 100 * part
    return tag(
        "svg", *drawn, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", role="img", aria_label=label
    )


def data(name: str, value: Mapping[str, Any]) -> Html:
    """Values for the page's scripts: JSON that cannot end the element that it is in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def _may_be_shown(character: str) -> bool:
    code = ord(character)
    # Of a name that turns the direction of writing around, what follows would be read backwards.
    if 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return False
    return (code >= 0x20 or character in "\t\n") and not 0x7F <= code < 0xA0 and not 0xD800 <= code < 0xE000
