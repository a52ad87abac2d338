"""FlashAttention 2 on a CPU: transformers' own code around a kernel that is written out in torch.

The package ``flash-attn`` runs on GPUs only. Here its two functions compute the same slowly, so that tests see what a
model gets there: no masks, samples that are packed told by where they begin, windows and soft caps as arguments.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    """Of one sample, ``[S, heads, D]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) & causal
    for size, towards in zip(window, (distance, -distance), strict=True):
        if size >= 0:
            hidden |= towards > size
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Samples behind one another, ``[tokens, heads, D]``."""
    assert dropout_p == 0.0
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) <= max_seqlen_q == max_seqlen_k
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attended(*part, softmax_scale, causal, window_size, softcap) for part in parts])


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
    """Rows of one length, ``[B, S, heads, D]``."""
    batch, length = q.shape[:2]
    ends = torch.arange(batch + 1) * length
    flat = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, length, length, **options)
    return flat.unflatten(0, (batch, length))


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """``attn_implementation="flash_attention_2"`` works on this process's CPU until the test ends."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    vars(package).update(flash_attn_with_kvcache=None)
    vars(padding).update(pad_input=flash._pad_input, unpad_input=flash._unpad_input)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    known = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(known, "general_availability_check", lambda: True)
    monkeypatch.setitem(known, "supported_devices", ((lambda: True, "cpu"),))
    monkeypatch.setattr(flash, "_loaded_implementation", None)  # the functions are looked up now, and after the test
