"""Findings of checks, and their report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Args:
        level: :data:`OK`, :data:`NOTE` (worth knowing; nothing breaks) or :data:`PROBLEM`.
        check: what was looked at, a word or two.
        text: what was found, with the value.
        remedy: what to do about it; every problem has one.
        ranks: for which ranks of a job it holds; empty where there is no job, or for all of it.
    """

    level: str
    check: str
    text: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.level in (OK, NOTE, PROBLEM), self.level
        assert self.level != PROBLEM or self.remedy, self


def exit_status(findings: Iterable[Finding]) -> int:
    """0, or 1 if there is a problem."""
    return int(any(finding.level == PROBLEM for finding in findings))


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for a JSON."""
    return {
        "problems": sum(finding.level == PROBLEM for finding in findings),
        "notes": sum(finding.level == NOTE for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "to_fix": remedies(findings),
    }


def remedies(findings: Iterable[Finding]) -> list[str]:
    """Remedies of the problems, each one once."""
    return list(dict.fromkeys(finding.remedy for finding in findings if finding.level == PROBLEM))


def as_text(findings: Sequence[Finding]) -> str:
    """The findings for people: a line each, then the remedies."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        whose = f" [{show_ranks(finding.ranks)}]" if finding.ranks else ""
        advice = f"; {finding.remedy}" if finding.level == NOTE and finding.remedy else ""
        lines.append(f"{finding.level:<8} {finding.check:<{width}}  {finding.text}{advice}{whose}")
    todo = remedies(findings)
    if not todo:
        return "\n".join([*lines, "", "No problem was found."])
    return "\n".join([*lines, "", "What to fix", *(f"{number}. {remedy}" for number, remedy in enumerate(todo, 1))])


def show_ranks(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
