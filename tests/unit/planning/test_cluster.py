"""Clusters: which members of a group share a node, how long collectives take, the JSON."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from paceline.planning.cluster import GIB, Cluster, Fabric


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_no_node_has_more_of_a_group_than_it_is_said_to(per_node: int, size: int, stride: int) -> None:
    cluster = Cluster(64, per_node)
    members = cluster.members_in_node(size, stride)
    assert 1 <= members <= size
    assert size % members == 0
    span = size * stride
    if members > 1:  # every run of so many neighbours of every group is on one node
        for start in range(0, 64 - span + 1, span):
            for lane in range(stride):
                ranks = [start + lane + index * stride for index in range(size)]
                runs = [ranks[first : first + members] for first in range(0, size, members)]
                assert all(run[0] // per_node == run[-1] // per_node for run in runs)
    if size * stride <= per_node and per_node % span == 0:
        assert members == size


def test_collectives_inside_and_across() -> None:
    cluster = Cluster(16, 8, inside=Fabric(100.0, 0.5), across=Fabric(10.0, 2.0))
    assert cluster.all_reduce_s(1000.0, 1, 1) == 0
    assert cluster.all_reduce_s(0.0, 8, 1) == 0
    assert cluster.all_reduce_s(1000.0, 8, 1) == pytest.approx(2 * 7 / 8 * 1000 / 100 + 2 * 3 * 0.5)
    assert cluster.all_reduce_s(1000.0, 2, 8) == pytest.approx(2 * 1 / 2 * 1000 / 10 + 2 * 2.0)
    both = 2 * 7 / 8 * 1000 / 100 + 2 * 1 / 2 * 125 / 10 + 2 * (3 * 0.5 + 2.0)
    assert cluster.all_reduce_s(1000.0, 16, 1) == pytest.approx(both)
    assert cluster.all_to_all_s(1000.0, 8, 1) == pytest.approx(7 / 8 * 1000 / 100 + 3 * 0.5)
    mixed = 7 / 16 * 1000 / 100 + 8 / 16 * 1000 / 10 + 3 * 0.5 + 2.0
    assert cluster.all_to_all_s(1000.0, 16, 1) == pytest.approx(mixed)


def test_measured_collectives_go_before_the_links() -> None:
    fabric = Fabric(100.0, all_reduce_bytes_per_s=50.0, all_to_all_bytes_per_s=25.0)
    cluster = Cluster(2, 2, inside=fabric)
    assert cluster.all_reduce_s(1000.0, 2, 1) == pytest.approx(20.0)
    assert cluster.all_to_all_s(1000.0, 2, 1) == pytest.approx(20.0)
    assert cluster.link(0, 1) is fabric


def test_what_zero_1_sends_goes_by_its_own_rate_where_it_is_known() -> None:
    """Otherwise by that of an all-reduce, of which it is a half each way."""
    for known, rate in ({}, 50.0), ({"zero1_bytes_per_s": 20.0}, 20.0):
        fabric = Fabric(100.0, 0.5, all_reduce_bytes_per_s=50.0, **known)
        assert Cluster(2, 2, inside=fabric).to_owners_s(1000.0, 2, 1) == pytest.approx(1 / 2 * 1000 / rate + 0.5)
        assert Cluster(2, 1, across=fabric).to_owners_s(1000.0, 2, 1) == pytest.approx(1 / 2 * 1000 / rate + 0.5)
        assert Cluster(2, 2, inside=fabric).all_reduce_s(1000.0, 2, 1) == pytest.approx(1000 / 50 + 1.0)
    assert Cluster(2, 2).to_owners_s(0.0, 2, 1) == Cluster(2, 2).to_owners_s(1.0, 1, 1) == 0


def test_a_link_is_across_unless_one_node_has_both_ends() -> None:
    cluster = Cluster(8, 4)
    assert cluster.link(0, 3) is cluster.inside
    assert cluster.link(4, 7) is cluster.inside
    assert cluster.link(3, 4) is cluster.across


def test_the_json() -> None:
    values: dict[str, Any] = {
        "devices": 16,
        "devices_per_node": 8,
        "memory_gib": 80,
        "flops_per_s": 4e14,
        "intra_node": {"bytes_per_s": 3e11, "latency_s": 5e-6, "all_reduce_bytes_per_s": 2e11},
        "inter_node": {"zero1_bytes_per_s": 1e10},
    }
    cluster = Cluster.from_dict(values)
    assert (cluster.num_devices, cluster.devices_per_node, cluster.memory_bytes) == (16, 8, 80 * GIB)
    assert cluster.inside == Fabric(3e11, 5e-6, 2e11)
    assert cluster.across == Fabric(zero1_bytes_per_s=1e10)
    assert cluster.state_bytes_per_s == inf
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert Cluster.from_dict({"devices": 4}).devices_per_node == 4
    nulls = dict.fromkeys(values) | {"devices": 4}
    assert Cluster.from_dict(nulls) == Cluster.from_dict({"devices": 4}), "null is as left out"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "the cluster is a list: give an object with devices, devices_per_node"),
        ({}, 'the cluster has no "devices": give the number of them.'),
        ({"devices": 2.5}, "devices is 2.5: give a whole number."),
        ({"devices": 0}, "devices is 0: give a whole number from 1 upwards."),
        ({"devices": 2, "nodes": 1}, '"nodes" is not a key of the cluster; choose from devices, '),
        ({"devices": 2, "memory_gib": "80"}, 'memory_gib is "80": give a number.'),
        ({"devices": 2, "memory_gib": -1}, "memory_gib is -1.0: give a number above 0."),
        ({"devices": 2, "memory_gib": 10**400}, "memory_gib is too large to be computed with: leave it out"),
        ({"devices": 2, "flops_per_s": 0}, "flops_per_s is 0.0: give a number above 0."),
        ({"devices": 2, "intra_node": 5}, "intra_node is 5: give an object with bytes_per_s, "),
        ({"devices": 2, "intra_node": {"bytes_per_s": 0}}, "intra_node.bytes_per_s is 0.0: give bytes a second"),
        ({"devices": 2, "inter_node": {"latency_s": -1}}, "inter_node.latency_s is -1.0: give seconds, from 0"),
    ],
)
def test_what_cannot_be(values: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Cluster.from_dict(values)
    assert str(error.value).startswith(message)
