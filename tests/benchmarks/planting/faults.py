"""Small mistakes to plant in the package, one at a time: each changes numbers or behaviour that a user would see.

They were chosen by reading the code, before it was known which tests find them.
"""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "integration/paceline"


class Fault(NamedTuple):
    """One change of one file.

    Args:
        file: below the package.
        old: text that is in the file once.
        new: what comes in its place.
        breaks: consequence for a user.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str

    @property
    def path(self) -> str:
        """The file, from the repository's root."""
        return f"{PACKAGE}/{self.file}"

    def plant(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text that it replaces is not there once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: {self.path} has {self.old!r} {count} times: choose text that is there once."
            )
        return text.replace(self.old, self.new)


FAULTS = (
    # The engine.
    Fault(
        "no detach between stages of a rank",
        "runtime/executor.py",
        "detached(held.runner.leaving(live))",
        "held.runner.leaving(live)",
        "where a rank holds two neighbouring stages, one backward runs through both",
    ),
    Fault(
        "label tokens of every rank",
        "runtime/causal_lm_steps.py",
        "torch.tensor(totals) * self.readers.speaks",
        "torch.tensor(totals)",
        "with replicas the label tokens of a step are counted once for each stage, and losses are too small",
    ),
    Fault(
        "data compared by their number only",
        "runtime/causal_lm_steps.py",
        "(tables != tables[:1]).any()",
        "(tables[:, 0] != tables[:1, 0]).any()",
        "a first and a last stage that read different samples train on inputs with the labels of others",
    ),
    Fault(
        "router loss of one replica",
        "runtime/causal_lm_runner.py",
        "router_share = 1 / book.num_filled if",
        "router_share = self._num_replicas / book.num_filled if",
        "the experts' balancing loss counts once for each replica",
    ),
    Fault(
        "migration without the optimizer's memory",
        "runtime/migration_memory.py",
        "return int(come + beside)",
        "return int(come)",
        "layers move to a device that has no room for their masters and moments",
    ),
    Fault(
        "random states not restored",
        "runtime/checkpointer.py",
        "self._control.rank if is_same else None,",
        "None,",
        "a resumed run has other dropout than the one that was not interrupted",
    ),
    Fault(
        "as fast as the fastest replica",
        "runtime/hetero.py",
        "slowest = max(own, key=lambda look: look.seconds or 0.0)",
        "slowest = min(own, key=lambda look: look.seconds or 0.0)",
        "a stage with one slow replica gets as many layers as if all were fast",
    ),
    Fault(
        "intervals forgotten at resume",
        "runtime/controller.py",
        "            interval.go_on(done)",
        "            interval.last = done",
        "a resumed run plans in its first step, before anything was measured",
    ),
    # Between ranks.
    Fault(
        "a tuple of one tensor",
        "comm/transport.py",
        "message.meta = read_announcement(header)",
        "message.meta = Meta(tensors := read_announcement(header).tensors, len(tensors) > 1)",
        "with dynamic shapes a layer that is given (x,) gets x on the next stage",
    ),
    Fault(
        "the first report of a failure",
        "comm/control.py",
        'next((r for r in told if r[1] != "StopIteration"), told[0])',
        "told[0]",
        "where one rank fails and another runs out of data, the job ends as if its data had",
    ),
    Fault(
        "shapes learned once",
        "comm/shapes.py",
        "self._known[key] = meta",
        "self._known.setdefault(key, meta)",
        "in the paired order, messages of other shapes than the first are received into memory of the wrong size",
    ),
    Fault(
        "a sum that nobody waits for",
        "comm/loss_sums.py",
        "    work.wait()\n    return total",
        "    return total",
        "the loss that is reported may be that of one rank",
    ),
    # The optimizer.
    Fault(
        "masters made anew",
        "optim/sharded.py",
        "self._make_parts(kept)",
        "self._make_parts(None)",
        "when layers move under bf16, masters of those that stay are rounded",
    ),
    Fault(
        "sums in a dtype of their own not brought back",
        "optim/buckets.py",
        "group_dst=owner, async_op=True), part, place)",
        "group_dst=owner, async_op=True), part, part)",
        "with communication_data_type and ZeRO 1, owners step with the gradients of their own samples",
    ),
    Fault(
        "tied weights counted twice",
        "optim/step_sums.py",
        "if layout.counts[rows.index] and gradient is not None and",
        "if gradient is not None and",
        "the gradient norm is too large where two stages have one weight, and clipping too strong",
    ),
    Fault(
        "a warm-in from zero",
        "optim/corrections.py",
        "min(1.0, (number + 1) / self.warm_in_steps)",
        "min(1.0, number / self.warm_in_steps)",
        "the first update of an asynchronous run changes nothing, and all of its warm-in are too small",
    ),
    Fault(
        "the unit of rows not squared",
        "optim/natural_gradient.py",
        "share = eta / x.shape[-2] * unit * unit",
        "share = eta / x.shape[-2] * unit",
        "the estimate of the second moment has another scale than its rows",
    ),
    Fault(
        "the total limit before the layers' own",
        "optim/max_change.py",
        "torch.where(norms.isfinite(), factors * norms, norms)",
        "norms",
        "updates are made smaller than the limits ask for",
    ),
    Fault(
        "a bias learns from the mean of its rows",
        "optim/linear_layers.py",
        "db = outputs.sum(0)",
        "db = outputs.mean(0)",
        "with natural gradients or split backwards, biases hardly learn",
    ),
    # Schedules.
    Fault(
        "deferred bytes with the wrong sign",
        "schedules/costs.py",
        "tuple(after - before for before, after in zip(live, deferred, strict=True))",
        "tuple(before - after for before, after in zip(live, deferred, strict=True))",
        "the memory of schedules with split backwards is predicted wrong",
    ),
    Fault(
        "rounding up what is whole",
        "schedules/families.py",
        "num_micro_batches) - 1e-9) for later",
        "num_micro_batches)) for later",
        "some slacks of eager keep one activation more than they say",
    ),
    Fault(
        "an update one backward late",
        "schedules/asynchronous.py",
        "(*window[:first_own], StreamAction(UPDATE, -1, -1, 1), *window[first_own:])",
        "(*window[: first_own + 1], StreamAction(UPDATE, -1, -1, 1), *window[first_own + 1 :])",
        "the first backward of each step has weights that are one update older than declared",
    ),
    Fault(
        "messages within a host leave it",
        "schedules/events.py",
        "if host != costs.hosts[visits.rank[visit + 1]] and isfinite(costs.egress_bytes_per_s[host]):",
        "if isfinite(costs.egress_bytes_per_s[host]):",
        "steps are predicted too long where several ranks share a host",
    ),
    # Planning.
    Fault(
        "no gradient on its way back",
        "planning/partition.py",
        "[0.0, *(2 * each for each in sent)]",
        "[0.0, *sent]",
        "cuts go where links are too slow for them",
    ),
    Fault(
        "the input of a stage off by one",
        "planning/memory.py",
        "items[start - 1].output_bytes if start else 0.0",
        "items[start].output_bytes if start else 0.0",
        "the memory of a stage is predicted with what its first layer gives, not with what it gets",
    ),
    Fault(
        "loss suffered before there was a better option",
        "planning/switching.py",
        "        if self._was_better:\n            self.suffered_s += gain * steps",
        "        self.suffered_s += gain * steps",
        "layers and experts move too early, for gains that have just appeared",
    ),
    # Experts.
    Fault(
        "one of several copies",
        "moe/replica_sync.py",
        "            for slot, rows in zip(places, learned, strict=True):"
        "  # one after another: an expert may have several copies\n"
        "                total[slot] += rows",
        "            total[places] += learned",
        "an expert with several copies learns from the tokens of one of them",
    ),
    Fault(
        "loads of all replicas together",
        "moe/rebalancer.py",
        "tuple(load / replicas for load in window.loads[number])",
        "tuple(load for load in window.loads[number])",
        "what moving experts gains is taken for as many times as much as there are replicas",
    ),
    # Islands.
    Fault(
        "a mean that ignores weights",
        "averaging/weighted_sums.py",
        "total = sum(weight / largest for weight in weights)",
        "total = float(len(weights))",
        "where islands have unequal weights, averaging makes parameters smaller",
    ),
    # Checkpoints.
    Fault(
        "damaged checkpoints count among those kept",
        "checkpoint/publish.py",
        '[manifest["sequence"] for path, manifest in own if problem_of(path, manifest) is None]',
        '[manifest["sequence"] for path, manifest in own]',
        "an older checkpoint that is complete is deleted in favour of one that cannot be loaded",
    ),
)
