"""The text form of a schedule: a head and one line a rank. Strict: each schedule has one text, and no text has two.

    schedule ranks=2 micro_batches=2 chunks=1 name="1f1b"
    rank 0: F0 F1 B0 B1
    rank 1: F0 B0 F1 B1

``F`` is a forward and ``B`` a whole backward. A backward that is split has ``I``, the gradient of the inputs, and later
``W``, the gradients of the weights. An action of another chunk than 0 names it after a dot: ``F0.1``. A schedule with
routes has them before its name, the rank of each stage: ``routes=0,1/1,0``.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    backward,
    backward_input,
    backward_weight,
    forward,
)

_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_NUMBER = re.compile(rf"0|{_COUNT.pattern}")
_ACTION = re.compile(rf"([FBIW])({_NUMBER.pattern})(?:\.({_COUNT.pattern}))?")
_MAKE = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: backward_input, BACKWARD_WEIGHT: backward_weight}


_ROUTES = " routes="


def to_text(schedule: Schedule) -> str:
    """The text of a schedule; :func:`from_text` gives an equal schedule back."""
    routes = "/".join(",".join(map(str, route)) for route in schedule.routes)
    head = (
        f"schedule ranks={schedule.num_ranks} micro_batches={schedule.num_micro_batches} chunks={schedule.num_chunks}"
        f"{_ROUTES + routes if schedule.routes else ''} name={json.dumps(schedule.name)}\n"
    )
    rows = (f"rank {rank}:{''.join(f' {action}' for action in order)}\n" for rank, order in enumerate(schedule.orders))
    return head + "".join(rows)


def from_text(text: str) -> Schedule:
    """The schedule that a text describes, which need not be one that can be executed: :func:`verify` tells.

    Raises:
        ValueError: with row and column (from 1), and a marker under the fault.
    """
    *rows, rest = text.split("\n")
    if rest:
        _fail([*rows, rest], len(rows), len(rest), "the last line does not end: end it with a newline")
    num_ranks, num_micro_batches, num_chunks, routes, name = _head(rows or [""])
    actions: dict[str, Action] = {}
    orders: list[tuple[Action, ...]] = []
    for row, line in enumerate(rows[1:], 1):
        label = f"rank {row - 1}:"
        if row > num_ranks:
            _fail(rows, row, 0, f"there are more lines than ranks={num_ranks}: remove this one")
        if not line.startswith(label):
            _fail(rows, row, 0, f"expected {label!r}, one line for each rank in order")
        order: list[Action] = []
        column = len(label)
        nothing, *words = line[column:].split(" ")
        if nothing:
            _fail(rows, row, column, "expected one space before an action, or the end of the line")
        for word in words:
            column += 1
            action = actions.get(word)
            if action is None:
                action = actions[word] = _action(rows, row, column, word, num_micro_batches, num_chunks)
            order.append(action)
            column += len(word)
        orders.append(tuple(order))
    if len(orders) < num_ranks:
        _fail([*rows, ""], len(rows), 0, f"expected 'rank {len(orders)}:', there are {num_ranks} ranks")
    return Schedule(tuple(orders), num_micro_batches, num_chunks, name, routes)


def marked(schedule: Schedule, rank: int, position: int, around: int = 8) -> str:
    """The order of ``rank`` near ``position``, and a line with a marker under the action there; for error messages."""
    order = schedule.orders[rank]
    first, last = max(0, position - around), min(len(order), position + around + 1)
    head = f"rank {rank}: " + ("… " if first else "")
    before = "".join(f"{action} " for action in order[first:position])
    after = " ".join(str(action) for action in order[position:last]) + (" …" if last < len(order) else "")
    return f"{head}{before}{after}\n{' ' * len(head + before)}^ position {position}"


def _head(rows: list[str]) -> tuple[int, int, int, tuple[tuple[int, ...], ...], str]:
    line, column, counts = rows[0], 0, []
    for label in ("schedule ranks=", " micro_batches=", " chunks="):
        column = _label(rows, column, label)
        count = _COUNT.match(line, column)
        if count is None:
            _fail(rows, 0, column, "expected a number from 1 upwards")
        counts.append(int(count.group()))
        column = count.end()
    routes: tuple[tuple[int, ...], ...] = ()
    if line.startswith(_ROUTES, column):
        routes, column = _routes(rows, column + len(_ROUTES), counts[0])
    column = _label(rows, column, " name=")
    try:
        name = json.loads(line[column:])
    except ValueError:
        name = None
    if not isinstance(name, str) or json.dumps(name) != line[column:]:
        _fail(rows, 0, column, "expected the name as a JSON string in double quotes, and nothing after it")
    return counts[0], counts[1], counts[2], routes, name


def _routes(rows: list[str], column: int, num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The routes that begin at a column of the head, and the column after them."""
    line = rows[0]
    routes: list[list[int]] = [[]]
    while True:
        number = _NUMBER.match(line, column)
        if number is None:
            _fail(rows, 0, column, "expected the rank of a stage")
        rank = int(number.group())
        if rank >= num_ranks:
            _fail(rows, 0, column, f"{rank} is not one of {num_ranks} ranks: they count from 0")
        routes[-1].append(rank)
        column = number.end()
        if line.startswith("/", column):
            routes.append([])
        elif not line.startswith(",", column):
            return tuple(map(tuple, routes)), column
        column += 1


def _label(rows: list[str], column: int, label: str) -> int:
    if not rows[0].startswith(label, column):
        _fail(rows, 0, column, f"expected {label!r}")
    return column + len(label)


def _action(rows: list[str], row: int, column: int, word: str, num_micro_batches: int, num_chunks: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        _fail(rows, row, column, f"{word!r} is no action: write F, B, I or W, micro-batch, and .chunk unless that is 0")
    micro_batch, chunk = int(match[2]), int(match[3] or 0)
    if micro_batch >= num_micro_batches:
        _fail(rows, row, column, f"{word!r} is not one of {num_micro_batches} micro-batches: they count from 0")
    if chunk >= num_chunks:
        _fail(rows, row, column, f"{word!r} is not in one of {num_chunks} chunks: they count from 0")
    return _MAKE[match[1]](micro_batch, chunk)


def _fail(rows: list[str], row: int, column: int, what: str) -> NoReturn:
    """Raises, with the line (what is near the fault, if it is long) and a marker under the column, both from 0."""
    first = max(0, column - 60)
    head = "…" if first else ""
    line = head + rows[row][first : column + 40] + ("…" if len(rows[row]) > column + 40 else "")
    marker = " " * (len(head) + column - first) + "^"
    raise ValueError(f"row {row + 1}, column {column + 1}: {what}.\n{line}\n{marker}")
