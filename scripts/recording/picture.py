"""Two casts side by side as one SVG that moves by itself: CSS alone, so that it plays inside an <img>.

Times are those of the casts. Where animation is off or unknown, the picture shows the end: both answers and both times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from recording.cast import ASKED, Cast
from recording.screen import Piece, pieces

PANE = 470
GAP = 20
WIDTH = 2 * PANE + GAP
MARGIN = 14
CHAR = 9.6
LINE = 22
TITLE = 36
FOOT = 62
CAPTION = 30
CLOCK = 34  # height of one time in the stopwatch
PAUSE_S = 5.0  # at the end, before it begins anew
CLOCK_STEPS = 10  # a second

_STYLE = """
svg{--back:#fff;--bar:#eef1f5;--line:#c9d1da;--ink:#1b2229;--soft:#57606b;--slow:#8a94a0;--fast:#0a7d4f;--base:#d9dfe6}
@media(prefers-color-scheme:dark){
svg{--back:#10151c;--bar:#1b222c;--line:#384350;--ink:#e8edf2;--soft:#a5b0bc;--slow:#8994a1;--fast:#3ecf8e;--base:#2c3540}}
text{fill:var(--ink);font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace}
.dim{fill:var(--soft)}.bold{font-weight:700}
.name{font-weight:700}
.sans{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
.soft{fill:var(--soft);font-size:15px}
.caption{fill:#7d8590;font-size:15px}
.clock{font-size:28px;font-weight:700}
.slow{fill:var(--slow)}.fast{fill:var(--fast)}
text.slow{fill:var(--ink)}
.back{fill:var(--back)}.bar{fill:var(--bar)}.base{fill:var(--base)}
.edge{fill:none;stroke:var(--line)}
.rule{stroke:var(--line)}
"""


@dataclass(frozen=True)
class Pane:
    """One of the two recordings. name: above it; command: what runs there; is_fast: drawn in the colour of gain."""

    cast: Cast
    name: str
    command: str
    is_fast: bool


class Animation:
    """The keyframes of one loop of `seconds`; equal ones are shared."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.rules: dict[str, str] = {}

    def percent(self, seconds: float) -> str:
        """A time as a place in the loop."""
        return f"{100 * seconds / self.seconds:.2f}%"

    def shown(self, start: float, end: float | None = None) -> str:
        """The class of what is to be seen from `start` to `end` alone."""
        frames = f"0%{{opacity:0}}{self.percent(start)}{{opacity:1}}"
        if end is not None:
            frames += f"{self.percent(end)}{{opacity:0}}"
        return self._class(frames, "step-end")

    def clock(self, start: float, steps: int) -> str:
        """The class of a column of times that moves up by one at a time."""
        end = start + steps / CLOCK_STEPS
        top = "transform:translateY(0)"
        low = f"transform:translateY(-{steps * CLOCK}px)"
        timing = f"animation-timing-function:steps({steps},end)"
        frames = f"0%{{{top}}}{self.percent(start)}{{{top};{timing}}}{self.percent(end)},to{{{low}}}"
        return self._class(frames, "linear", low)

    def growing(self, start: float, end: float) -> str:
        """The class of a bar that reaches its width at `end`."""
        frames = f"0%,{self.percent(start)}{{transform:scaleX(0)}}{self.percent(end)},to{{transform:scaleX(1)}}"
        return self._class(frames, "linear")

    def _class(self, frames: str, timing: str, still: str = "") -> str:
        rule = f"{{animation:@ {self.seconds:.2f}s {timing} infinite;{still}}}@keyframes @{{{frames}}}"
        return self.rules.setdefault(rule, f"k{len(self.rules)}")

    @property
    def style(self) -> str:
        """The rules, and none of them where the reader wants no motion."""
        rules = "".join(
            f".{name}{rule.replace('@ ', f'{name} ').replace('@{', f'{name}{{')}\n" for rule, name in self.rules.items()
        )
        return rules + "@media(prefers-reduced-motion:reduce){*{animation:none!important}}\n"


def draw_both(full: Cast, blend: Cast) -> str:
    """The SVG of full prefill on the left and blended prefill on the right."""
    about = full.about.get("kvblend", {})
    facts = [about.get("model"), about.get("dtype"), about.get("processor")]
    caption = ", ".join([*filter(None, facts), "real terminals in real time"])
    left = Pane(full, "Full prefill", "blend serve --full", is_fast=False)
    right = Pane(blend, "kvblend", "blend serve --store my-store", is_fast=True)
    return draw(left, right, caption)


def draw(left: Pane, right: Pane, caption: str) -> str:
    """The SVG of two recordings that begin with the same question at the same moment."""
    asked = max(pane.cast.marked(ASKED) for pane in (left, right))
    slowest = max(pane.cast.first_token_s for pane in (left, right))
    ends = [asked - pane.cast.marked(ASKED) + pane.cast.events[-1].seconds for pane in (left, right)]
    animation = Animation(max(ends) + PAUSE_S)
    screens = [pieces(pane.cast) for pane in (left, right)]
    lines = 1 + max(piece.line for screen in screens for piece in screen)
    height = TITLE + lines * LINE + 12 + FOOT
    body: list[str] = []
    for place, (pane, screen) in enumerate(zip((left, right), screens, strict=True)):
        drawing = _Drawing(animation, pane, asked, height)
        body.append(f'<g transform="translate({place * (PANE + GAP)} 0)">{drawing.whole(screen, slowest)}</g>')
    ratio = left.cast.first_token_s / right.cast.first_token_s
    sooner = animation.shown(asked + slowest)
    body.append(
        f'<text class="sans name fast {sooner}" text-anchor="end" x="{WIDTH - MARGIN}" y="{height - 20}" '
        f'font-size="20">{ratio:.1f} times sooner</text>'
    )
    body.append(
        f'<text class="sans caption" x="{WIDTH / 2}" y="{height + 24}" text-anchor="middle">{escape(caption)}</text>'
    )
    label = f"{left.name}: first token after {left.cast.first_token_s:.1f} s; {right.name}: {right.cast.first_token_s:.1f} s"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + CAPTION}" width="{WIDTH}" '
        f'height="{height + CAPTION}" role="img" aria-label="{escape(label)}">\n<title>{escape(label)}</title>\n'
        f"<style>{_STYLE}{animation.style}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


class _Drawing:
    """One pane at its own origin."""

    def __init__(self, animation: Animation, pane: Pane, asked: float, height: int) -> None:
        self.animation = animation
        self.pane = pane
        self.asked = asked
        self.shift = asked - pane.cast.marked(ASKED)
        self.height = height
        self.color = "fast" if pane.is_fast else "slow"

    def whole(self, screen: Sequence[Piece], slowest: float) -> str:
        """Frame, title, text and foot."""
        frame = f'<rect class="back" width="{PANE}" height="{self.height}" rx="8"/>'
        head = (
            f'<path class="bar" d="M0 {TITLE}V8a8 8 0 0 1 8-8H{PANE - 8}a8 8 0 0 1 8 8V{TITLE}z"/>'
            f'<text class="sans name" x="{MARGIN}" y="24">{escape(self.pane.name)}</text>'
            f'<text class="soft" x="{PANE - MARGIN}" y="24" text-anchor="end">{escape(self.pane.command)}</text>'
        )
        edge = f'<rect class="edge" x=".5" y=".5" width="{PANE - 1}" height="{self.height - 1}" rx="8"/>'
        return "\n".join([frame, head, edge, *self._text(screen), self._foot(slowest)])

    def _text(self, screen: Sequence[Piece]) -> Iterator[str]:
        for piece in screen:
            text = piece.text.strip()
            column = piece.column + len(piece.text) - len(piece.text.lstrip())
            end = None if piece.end is None else piece.end + self.shift
            shown = self.animation.shown(piece.start + self.shift, end)
            gone = "" if end is None else ' opacity="0"'
            x, y = MARGIN + column * CHAR, TITLE + 8 + (piece.line + 0.7) * LINE
            yield (
                f'<text class="{f"{piece.style} {shown}".strip()}"{gone} x="{x:.1f}" y="{y:.1f}" '
                f'textLength="{len(text) * CHAR:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text, quote=False)}</text>'
            )

    def _foot(self, slowest: float) -> str:
        """The stopwatch and a bar on the scale of the slower recording."""
        seconds = self.pane.cast.first_token_s
        steps = round(seconds * CLOCK_STEPS)
        top = self.height - FOOT
        times = "".join(
            f'<text class="clock {self.color}" x="110" y="{(step + 0.76) * CLOCK:.0f}" text-anchor="end">'
            f"{step / CLOCK_STEPS:.1f} s</text>"
            for step in range(steps + 1)
        )
        grown = self.animation.growing(self.asked, self.asked + seconds)
        width = (PANE - 2) * seconds / slowest
        return (
            f'<path class="rule" d="M1 {top}H{PANE - 1}"/>'
            f'<rect class="base" x="1" y="{top}" width="{PANE - 2}" height="6"/>'
            f'<rect class="{self.color} {grown}" x="1" y="{top}" width="{width:.1f}" height="6" '
            f'style="transform-origin:1px 0"/>'
            f'<svg x="{MARGIN}" y="{top + 16}" width="112" height="{CLOCK}" viewBox="0 0 112 {CLOCK}">'
            f'<g class="{self.animation.clock(self.asked, steps)}">{times}</g></svg>'
            f'<text class="sans soft" x="{MARGIN + 124}" y="{top + 42}">to the first token</text>'
        )
