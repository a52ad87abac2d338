"""Damage: values that no one expects, and mutations of documents, texts, bytes and command lines."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

NAN, INF = float("nan"), float("inf")
NUMBERS = (0, -1, 1, 2, 3, 7, 0.5, -0.0, 5e-324, 1e-300, 1e308, -1e308, INF, -INF, NAN, 2**31, 2**53 + 1, 2**63, 2**64)
HUGE = (10**9, 10**15, 10**18, 10**309, -(10**309), 10**5000)
TEXTS = (
    "",
    " ",
    "auto",
    "1",
    "true",
    "null",
    "é",
    "日本語",
    "\u202e",
    "\x00",
    "\ud800",
    "\n\n",
    "x" * 5000,
    "%s{}[",
    "0x10",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], [None], {"a": 1}, {"": None}, [1, "a", {}])
WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1",
        "2",
        "1.5",
        "1e3",
        "1_000",
        "+4",
        " 4",
        "٣",
        "²",
        "0x10",
        "nan",
        "inf",
        "-inf",
    ),
    *("1e400", "1e-400", "1e15", "99999999", "99999999999999999999", "9" * 400, "9" * 5000, "true", "None", "auto"),
    *(",", "1,2", "1,,2", "1,nan", "0.1,-1", "[1]", "{}", "é", "日本語", "\udcff", "\u202e", "a b", "a\nb", "x" * 4000),
    *("no/such/file", "nowhere", ".", "../x", "/dev/null/x", "/proc/nothing/x", "--json", "--help", "*", "%", "$HOME"),
)
"""On a command line. No path in it can be written to outside of a case's folder."""

_SAFE_PATHS = ("/dev/null/x", "/proc/nothing/x")


def noise(seed: int, count: int) -> list[Any]:
    """JSON values that hypothesis makes up, the same for one seed."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    numbers = st.integers() | st.floats()
    leaves = st.none() | st.booleans() | numbers | st.text(st.characters(codec=None))
    trees = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    )
    found: list[Any] = []

    @seeded(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(trees)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


class Damage:
    """Mutations, all decided by one random number generator."""

    def __init__(self, rng: random.Random, pool: Sequence[Any]) -> None:
        self.rng = rng
        self.pool = pool
        """Further values: noise."""

    def value(self, old: Any = None) -> Any:
        """Instead of ``old``, often of its kind."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.25 and isinstance(old, (int, float)) and not isinstance(old, bool) and len(dump(old)) < 2000:
            return rng.choice((old * 10, -old, old + 1, old - 1, old * 1000, old // 3, str(old), [old], old * 10**9))
        if kind < 0.25 and isinstance(old, str) and old:
            return rng.choice((old[:-1], old.upper(), f" {old}", old * 2, near(rng, old), [old], {old: old}))
        if kind < 0.5:
            return rng.choice(NUMBERS)
        if kind < 0.56:
            return rng.choice(HUGE)
        if kind < 0.7:
            return rng.choice(TEXTS)
        if kind < 0.84 or not self.pool:
            return copy.deepcopy(rng.choice(OTHERS))
        if kind < 0.86:
            return nested(rng.choice((5, 60, 400)), rng.random() < 0.5)
        return copy.deepcopy(rng.choice(self.pool))

    def document(self, document: Any, strength: int = 1) -> Any:
        """A copy with ``strength`` changes at places of its tree."""
        document = copy.deepcopy(document)
        for _ in range(strength):
            document = self._change(document)
        return document

    def _change(self, document: Any) -> Any:
        rng = self.rng
        places = list(_places(document))
        if not places or rng.random() < 0.02:
            return self.value(document)
        holder, key = rng.choice(places)
        what = rng.random()
        if what < 0.62:
            holder[key] = self.value(holder[key])
        elif what < 0.72:
            del holder[key]
        elif what < 0.82 and isinstance(holder, dict):
            value = holder.pop(key)
            holder[near(rng, key) if rng.random() < 0.7 else str(rng.choice(TEXTS))] = value
        elif what < 0.88 and isinstance(holder, dict):
            holder[str(self.rng.choice((*TEXTS, "stage", "pipelin", "comment", "_")))] = self.value()
        elif what < 0.92 and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key])] * rng.choice((1, 2, 50))
        elif what < 0.96:
            other, other_key = rng.choice(places)
            if other is holder:
                holder[key], holder[other_key] = holder[other_key], holder[key]
            else:
                holder[key] = copy.deepcopy(other[other_key])
        else:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"value": holder[key]}
        return document

    def text(self, text: str) -> bytes:
        """Of a document: what is no JSON any more, or only just."""
        rng = self.rng
        at = rng.randrange(len(text) + 1)
        choice = rng.randrange(16)
        data = text.encode("utf-8", "surrogatepass")
        if choice == 0:
            return data[: rng.randrange(len(data) + 1)]
        if choice == 1:
            return b"\xef\xbb\xbf" + data
        if choice == 2:
            return text.encode(rng.choice(("utf-16", "utf-32", "latin-1")), "replace")
        if choice == 3:
            return b""
        if choice == 4:
            return data.replace(b",", b",,", 1) if rng.random() < 0.5 else re.sub(rb"\}\s*$", b",}", data)
        if choice == 5:
            return b"// a comment\n" + data
        if choice == 6:
            return data.replace(b'"', b"'")
        if choice == 7:  # a duplicate key
            keys = list(re.finditer(r'"[^"\n]+"\s*:\s*("[^"\n]*"|[\w.+-]+)', text))
            return text.replace(m[0], f"{m[0]}, {m[0]}", 1).encode() if keys and (m := rng.choice(keys)) else data
        if choice == 8:
            return rng.choice((b"[", b'{"a":')) * rng.choice((100, 3000, 100_000))
        if choice == 9:
            numbers = list(re.finditer(r"\d+(\.\d+)?", text))
            new = rng.choice(
                ("9" * 5000, "1e999", "-0", "01", "0x10", "1e-400", "NaN", "-Infinity", "1E400", "9" * 310)
            )
            return (
                (text[: m.start()] + new + text[m.end() :]).encode() if numbers and (m := rng.choice(numbers)) else data
            )
        if choice == 10:
            return data + rng.choice((b"x", b"{}", b"\x00", b"\n" * 3, data))
        if choice == 11:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60)))
        if choice == 12:
            return data.replace(b"\n", b"\r\n")
        if choice == 13:
            return data.replace(b'"', b'"\\ud800', 1)
        cut = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randrange(3) :]
        return cut if choice < 15 else b"\n" + cut

    def words(self, argv: Sequence[str], flags: Sequence[str]) -> list[str]:
        """A command line, changed in one place or two; ``flags`` are those that the program knows."""
        rng = self.rng
        argv = list(argv)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(argv) + 1)
            what = rng.random()
            values = [index for index, word in enumerate(argv) if not word.startswith("--")]
            if what < 0.5 and values:
                argv[rng.choice(values)] = self.word()
            elif what < 0.58 and argv:
                del argv[rng.randrange(len(argv))]
            elif what < 0.64 and argv:
                argv.insert(at, rng.choice(argv))
            elif what < 0.72 and flags:
                flag = rng.choice(flags)
                argv.insert(at, near(rng, flag) if rng.random() < 0.5 else f"{flag}={self.word()}")
            elif what < 0.92 and flags:
                argv[at:at] = [rng.choice(flags), self.word()]
            elif what < 0.97:
                argv.insert(at, self.word())
            else:
                rng.shuffle(argv)
        return [harmless(word) for word in argv]

    def word(self) -> str:
        rng = self.rng
        if self.pool and rng.random() < 0.15:
            value = rng.choice(self.pool)
            return harmless(value if isinstance(value, str) else repr(value)[:200])
        return rng.choice(WORDS) if rng.random() < 0.8 else str(rng.choice((rng.randrange(-3, 40), rng.random() * 9)))

    def edit(self, size: int) -> list[Any]:
        """Contents of a binary file: see :func:`benchmarks.fuzzing.worker.prepare`."""
        rng = self.rng
        at = rng.choice((0, 1, 7, 8, rng.randrange(size + 1), max(0, size - 1)))
        if rng.random() < 0.3:
            return ["truncate", min(at, size)]
        data = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8, 40))))
        return ["put", min(at, size), data.hex()]


def harmless(word: str) -> str:
    """A word that the system would pass on and that, taken for a path, leads to nowhere but a case's own folder."""
    word = re.sub("[\ud800-\udfff]", "\udcff", word.replace("\x00", "0"))
    if word.startswith("--"):
        flag, equals, value = word.partition("=")
        return f"{flag}={harmless(value)}" if equals else word
    if word in (*_SAFE_PATHS, "../x") or not ({"/", "."} & set(word[:1]) or ".." in word or "~" in word):
        return word
    return word if word == "." else "x" + word.replace("..", "_").replace("~", "_")


def near(rng: random.Random, word: str) -> str:
    """A typo of a key or a flag."""
    if not word:
        return "x"
    at = rng.randrange(len(word))
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] * 2 + word[at + 1 :],
            word[:at] + rng.choice("abcxyz_-") + word[at + 1 :],
            word.upper() if rng.random() < 0.5 else word.replace("_", "-"),
            f"{word} ",
            f"{word}s",
        )
    )


def nested(depth: int, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"pipeline": value}
    return value


def dump(document: Any) -> str:
    """As text, with the constants that JSON has not and numbers of any length."""
    try:
        return json.dumps(document)
    except ValueError:  # Python's limit on the digits of a number
        return json.dumps(_shorter(document))


def _shorter(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorter(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shorter(inner) for inner in value]
    return 10**4000 if isinstance(value, int) and abs(value) > 10**4000 else value


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield document, key
            yield from _places(value)
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield document, index
            yield from _places(value)
