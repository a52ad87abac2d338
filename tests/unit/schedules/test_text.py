"""The text form round-trips exactly, has one text for each schedule, and shows where a text is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import Schedule, families, from_text, to_text
from paceline.schedules.schedule import forward
from support.schedule_cases import executed, shuffled

TEXT = 'schedule ranks=2 micro_batches=2 chunks=1 name="1f1b"\nrank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n'

EDITS = st.tuples(
    st.integers(0, len(TEXT)), st.integers(0, 3), st.sampled_from(["", " ", "\n", "0", "F", ".1", '"', "é"])
)


def test_by_hand():
    assert to_text(families.one_f_one_b(2, 2)) == TEXT
    assert from_text(TEXT) == families.one_f_one_b(2, 2)
    interleaved = to_text(families.interleaved(1, 1, 2))
    assert (
        interleaved
        == 'schedule ranks=1 micro_batches=1 chunks=2 name="interleaved chunks=2"\nrank 0: F0 F0.1 B0.1 B0\n'
    )


@given(st.one_of(shuffled(), executed()), st.text())
@settings(max_examples=60, deadline=None)
def test_round_trip(schedule, name):
    named = Schedule(schedule.orders, schedule.num_micro_batches, schedule.num_chunks, name)
    assert from_text(to_text(named)) == named


def test_a_split_backward_by_hand():
    text = 'schedule ranks=1 micro_batches=1 chunks=2 name=""\nrank 0: F0 F0.1 I0.1 B0 W0.1\n'
    assert to_text(from_text(text)) == text
    assert [action.kind for action in from_text(text).orders[0]] == ["F", "F", "I", "B", "W"]


def test_ranks_that_compute_nothing():
    schedule = Schedule(((forward(0),), ()), 1)
    assert to_text(schedule).endswith("rank 0: F0\nrank 1:\n")
    assert from_text(to_text(schedule)) == schedule


def test_actions_are_the_shared_objects():
    """A text of millions of actions becomes no more objects than it has different ones."""
    first, second = from_text(TEXT).orders
    assert first[3] is second[3]


@given(EDITS)
@settings(max_examples=300, deadline=None)
def test_what_is_accepted_is_the_only_text_of_its_schedule(edit):
    at, removed, inserted = edit
    text = TEXT[:at] + inserted + TEXT[at + removed :]
    try:
        schedule = from_text(text)
    except ValueError as error:
        assert str(error).startswith("row ")  # noqa: PT017 (either outcome is right)
    else:
        assert to_text(schedule) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("B0 F1", "B0 X1", "row 3, column 15: 'X1' is no action: write F, B, I or W, micro-batch, and .chunk"
         " unless that is 0.\nrank 1: F0 B0 X1 B1\n              ^"),
        ("B0 F1", "B0  F1", "row 3, column 15: '' is no action"),
        ("B0 F1", "B0 F01", "row 3, column 15: 'F01' is no action"),
        ("B0 F1", "B0 F1.0", "row 3, column 15: 'F1.0' is no action"),
        ("B0 F1", "B0 F٣", "row 3, column 15: 'F٣' is no action"),
        ("B0 F1", "B0 F2", "row 3, column 15: 'F2' is not one of 2 micro-batches: they count from 0"),
        ("B0 F1", "B0 F1.1", "row 3, column 15: 'F1.1' is not in one of 1 chunks: they count from 0"),
        ("rank 1: F0", "rank 1:F0", "row 3, column 8: expected one space before an action, or the end of the line"),
        ("rank 1", "rank 2", "row 3, column 1: expected 'rank 1:', one line for each rank in order"),
        ("F1 B1\n", "F1 B1 \n", "row 3, column 21: '' is no action"),
        ("F1 B1\n", "F1 B1", "row 3, column 20: the last line does not end: end it with a newline"),
        ("F1 B1\n", "F1 B1\n\n", "row 4, column 1: there are more lines than ranks=2: remove this one"),
        ("ranks=2", "ranks=3", "row 4, column 1: expected 'rank 2:', there are 3 ranks"),
        ("ranks=2", "ranks=0", "row 1, column 16: expected a number from 1 upwards.\nschedule ranks=0 "),
        (" micro_batches", "  micro_batches", "row 1, column 17: expected ' micro_batches='"),
        ("schedule", "Schedule", "row 1, column 1: expected 'schedule ranks='"),
        ('"1f1b"', "1f1b", "row 1, column 48: expected the name as a JSON string in double quotes, and nothing"),
        ('"1f1b"', '"1f1b" ', "row 1, column 48: expected the name as a JSON string"),
        ('"1f1b"', "7", "row 1, column 48: expected the name as a JSON string"),
        (TEXT, "", "row 1, column 1: expected 'schedule ranks='.\n\n^"),
    ],
)  # fmt: skip
def test_faults_are_shown(old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=r"row") as caught:
        from_text(TEXT.replace(old, new))
    assert str(caught.value).startswith(message)


def test_a_long_line_is_shown_near_its_fault():
    text = to_text(families.gpipe(1, 400)).replace("F300", "F3OO")
    with pytest.raises(ValueError, match=r"'F3OO' is no action") as caught:
        from_text(text)
    _, line, marker = str(caught.value).split("\n")
    assert len(line) < 110
    assert line[marker.index("^") :].startswith("F3OO F301 ")
