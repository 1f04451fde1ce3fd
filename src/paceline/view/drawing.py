"""Drawings as SVG: a few shapes in the page's colours; words are escaped, so nobody's text becomes markup."""

from dataclasses import dataclass

from markupsafe import Markup

RANK_COLOURS = ("blue", "orange", "green", "pink", "sky", "red", "yellow", "grey")
WIDTH, LABEL = 880.0, 74.0  # of a drawing, and of the words at its left


@dataclass(frozen=True)
class Drawing:
    """A drawing with its title and what is seen in it."""

    title: str
    words: str
    svg: Markup


def colour_of_rank(rank: int) -> str:
    """The colour that a rank has in all drawings."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


class Canvas:
    """Where shapes are put; units are CSS pixels at full width."""

    def __init__(self, width: float, height: float) -> None:
        self._width, self._height, self._parts = width, height, list[Markup]()

    def _add(self, shape: str, told: str = "", **words: object) -> None:
        title = Markup("<title>{}</title>").format(told) if told else Markup("")
        numbers = {name: f"{one:.1f}" if isinstance(one, int | float) else one for name, one in words.items()}
        self._parts.append(Markup(shape).format(title=title, **numbers))

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, *, told: str = "", outlined: bool = False
    ) -> None:
        """A filled rectangle; `told` is shown where the pointer rests."""
        edge = " edge-on" if outlined else ""
        self._add('<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" class="f-{colour}{edge}">{title}</rect>',
                  told, x=x, y=y, w=width, h=height, colour=colour, edge=edge)  # fmt: skip

    def disc(self, x: float, y: float, radius: float, colour: str, *, told: str = "") -> None:
        """A filled circle."""
        self._add('<circle cx="{x}" cy="{y}" r="{r}" class="f-{colour} edge-on">{title}</circle>',
                  told, x=x, y=y, r=radius, colour=colour)  # fmt: skip

    def text(self, x: float, y: float, words: str, *, on: bool = False, soft: bool = False) -> None:
        """One line; `on` a coloured shape, or `soft`, of less weight."""
        kind = "on" if on else "soft" if soft else "plain"
        self._add('<text x="{x}" y="{y}" class="{kind}">{words}</text>', x=x, y=y, kind=kind, words=words)

    def edge(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line."""
        self._add('<path d="M{x} {y}L{u} {v}" class="edge"/>', x=x, y=y, u=to_x, v=to_y)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head at its end."""
        self._add('<path d="M{x} {y}L{u} {v}m-4 -6l4 6l4 -6" class="ink"/>', x=x, y=y, u=to_x, v=to_y)

    def legend(self, x: float, y: float, keys: list[tuple[str, str]]) -> None:
        """What the colours mean, in one line."""
        for words, colour in keys:
            self.box(x, y - 10, 12, 12, colour)
            self.text(x + 17, y, words)
            x += 36 + 6.6 * len(words)

    def svg(self) -> Markup:
        """All of it."""
        size = f"{self._width:.0f} {self._height:.0f}"
        head = Markup(
            '<svg viewBox="0 0 {}" width="{}" height="{}" xmlns="http://www.w3.org/2000/svg" aria-hidden="true">'
        )
        return head.format(size, *size.split()) + Markup("").join(self._parts) + Markup("</svg>")
