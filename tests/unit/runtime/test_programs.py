"""Which schedules pipelines can be set to run."""

from __future__ import annotations

import pytest

from paceline.config.schedules import ScheduleChoice
from paceline.runtime.programs import Programs
from paceline.schedules import from_text


def test_split_backwards_are_refused():
    programs = Programs(ScheduleChoice("1f1b"), ((0,),), 0, "free")
    whole = 'schedule ranks=1 micro_batches=1 chunks=1 name="by hand"\nrank 0: F0 B0\n'
    programs.set(from_text(whole), 1)
    with pytest.raises(
        ValueError, match=r"'by hand' splits backwards \(into I and W\): pipelines run whole ones \(B\)"
    ):
        programs.set(from_text(whole.replace("B0", "I0 W0")), 1)
