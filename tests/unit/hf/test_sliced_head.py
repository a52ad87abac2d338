"""A head in slices: the sums that travel, and what of a model cannot be cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig

from paceline.hf import cross_entropy, sliced_head
from paceline.hf.anatomy import UnsupportedModelError, anatomy_of
from paceline.hf.check import require_slices
from paceline.hf.parity import ROUNDING, check_split
from paceline.hf.sliced_head import add_logits, check_head, cross_entropy_of, empty_sums
from paceline.hf.stage import Cut
from paceline.hf.weights import load_stage, skeleton
from support.jobs import model_config

BATCH, LENGTH, VOCABULARY = 3, 5, 11
EDGES = (0, 4, 5, 11)


def through_slices(logits: torch.Tensor, labels: torch.Tensor, num_items: float | None) -> torch.Tensor:
    sums = empty_sums(BATCH * LENGTH, logits.device)
    for start, stop in pairwise(EDGES):
        sums = add_logits(sums, logits[..., start:stop], labels, start)
    return cross_entropy_of(sums, labels, num_items)


@pytest.mark.parametrize("num_items", [None, 7.0])
@pytest.mark.parametrize("pieces", [1, 1 << 28], ids=["row by row", "at once"])
def test_the_sums_make_the_cross_entropy_of_all_rows(
    num_items: float | None, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "PIECE_BYTES", pieces)
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(BATCH, LENGTH, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :3] = labels[2] = -100
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = through_slices(ours, labels, num_items)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    wanted = F.cross_entropy(theirs.reshape(-1, VOCABULARY), targets, ignore_index=-100, reduction="sum")
    wanted = wanted / ((targets != -100).sum() if num_items is None else num_items)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.full((BATCH, LENGTH, VOCABULARY), 1e4).requires_grad_()
    labels = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    loss = through_slices(logits, labels, None)
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=1e-3)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi", "granite", "gpt2"])
def test_families_are_the_same_model(model_type: str, tied: bool) -> None:
    """Logits with a cap, a bias, a scale; position embeddings that are added."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": 97, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2, "tie_word_embeddings": tied}
    config = model_config("gpt2", tie_word_embeddings=tied) if model_type == "gpt2" else None
    parity = check_split(config or AutoConfig.for_model(model_type, **sizes), 4, head_slices=3)
    assert parity.worst < ROUNDING


def test_a_stage_keeps_its_rows() -> None:
    config = model_config(tie_word_embeddings=False)
    whole = load_stage(None, config, Cut.whole(4)).model.lm_head.weight
    stage = load_stage(None, config, Cut(5, 6, False, False), head_slices=4)
    assert stage.head_rows == (24, 48, 97)
    assert torch.equal(stage.model.lm_head.weight, whole[24:48])
    assert set(dict(stage.model.named_parameters())) == {"lm_head.weight"}


def test_few_rows_are_refused() -> None:
    model = skeleton(model_config(vocab_size=5))
    with pytest.raises(
        UnsupportedModelError, match=r"in 6 slices: its vocabulary has 5 rows; leave paceline\.pipeline"
    ):
        check_head(model, anatomy_of(model, head_slices=6))


def test_a_loss_of_ones_own_is_refused() -> None:
    model = skeleton(model_config())
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(UnsupportedModelError, match="its loss is another than transformers' cross entropy"):
        check_head(model, anatomy_of(model, head_slices=2))


def test_a_head_that_mixes_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small copy that every start compares shows what the source does not."""
    require_slices(model_config(num_hidden_layers=5), 4)
    monkeypatch.setattr(sliced_head, "NOTHING", 0.0)
    with pytest.raises(UnsupportedModelError, match=r"so cut, a small copy of it differs from the whole model by"):
        require_slices(model_config(num_hidden_layers=6), 4)
