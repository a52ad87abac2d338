"""Ranks of one host, among those that share experts."""

from __future__ import annotations

import pytest

from paceline.measure.host_names import host_name, machine_name, num_nodes


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("aabb", 2),
        ("aabbcc", 3),
        ("aaaa", 1),
        ("abcd", 1),  # a device each: nothing is nearer than anything else
        ("abab", 1),
        ("aaab", 1),
        ("aabbaa", 1),
        ("a", 1),
    ],
)
def test_nodes_are_equal_groups_of_neighbours(hosts: str, nodes: int) -> None:
    assert num_nodes(hosts) == nodes


def test_a_host_is_on_its_machine() -> None:
    assert host_name().startswith(machine_name())
