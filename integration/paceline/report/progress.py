"""Progress on the terminal: a bar where there is one to draw on, a line per report where output goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm


class Progress:
    """Shown by one rank; made with ``shown=False`` on the others, where every call does nothing."""

    def __init__(self, total_steps: int, shown: bool, bar: bool = True, first_step: int = 0) -> None:
        self.total, self.shown = total_steps, shown
        drawn = shown and bar and sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True) if drawn else None
        self._running = self._numbers = ""

    def step(self, running: object = "") -> None:
        """A step is over; ``running`` says how it ran, and shows at once where that has changed."""
        changed, self._running = str(running) != self._running, str(running)
        if self.bar is not None:
            if changed:
                self._show()
            self.bar.update()

    def report(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the latest numbers, on the bar or as a line of their own."""
        self._numbers = _text(values)
        if self.bar is not None:
            self._show()
        elif self.shown:
            self.say(f"step {step}/{self.total}: {' · '.join(filter(None, (self._numbers, self._running)))}")

    def _show(self) -> None:
        """Put the schedule first: on a narrow terminal the end is cut off."""
        assert self.bar is not None
        self.bar.set_postfix_str(" · ".join(filter(None, (self._running, self._numbers))))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.shown:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items() if value is not None)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
