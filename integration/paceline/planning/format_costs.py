"""Costs of sending activations and gradients in a format: fewer bytes, time to encode and to decode."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..schedules.costs import Costs


class FormatCosts(NamedTuple):
    """Costs of a format.

    Args:
        share: bytes that travel, as a part of those of the tensor.
        encode_s_per_byte: seconds for each byte of the tensor.
        decode_s_per_byte: the same of decoding.
    """

    share: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0


AS_IT_IS = FormatCosts()


def with_format(costs: Costs, now: FormatCosts, then: FormatCosts) -> Costs:
    """``costs`` that were measured with one format, as they would be with another, used in both directions.

    A stage encodes what it sends and decodes what it receives as a part of its forward and its backward.
    """
    if now == then:
        return costs
    forward_s, backward_s = list(costs.forward_s), list(costs.backward_s)
    whole = [num_bytes / now.share for num_bytes in costs.message_bytes]
    for boundary, num_bytes in enumerate(whole):
        encode_s = num_bytes * (then.encode_s_per_byte - now.encode_s_per_byte)
        decode_s = num_bytes * (then.decode_s_per_byte - now.decode_s_per_byte)
        forward_s[boundary] += encode_s
        forward_s[boundary + 1] += decode_s
        backward_s[boundary + 1] += encode_s
        backward_s[boundary] += decode_s
    nothing = (0.0,) * len(backward_s)
    weights_s, ahead_s = costs.weight_s or nothing, costs.ahead_s or nothing
    return replace(
        costs,
        forward_s=tuple(max(seconds, 0.0) for seconds in forward_s),
        backward_s=tuple(max(*each) for each in zip(backward_s, weights_s, ahead_s, strict=True)),
        message_bytes=tuple(num_bytes * then.share for num_bytes in whole),
    )
