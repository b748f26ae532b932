"""The contract of an algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from vlarl.batch import Credit, LossBatch, PolicyEval, Rollout
from vlarl.config.schema import AlgoSection
from vlarl.interfaces import Algorithm, AllSum
from vlarl.testing.learn import learning_curve
from vlarl.testing.require import require
from vlarl.testing.rollouts import alone, loss_batch, made_up_rollout, on_ranks, part_of

_CHUNK = 4  # of the made-up rollouts
_TOLERANCE = 1e-5  # sums of some hundred float32 numbers of order 1, in another order


def check_algorithm(algorithm: Algorithm, cfg: AlgoSection, *, learn: bool = True) -> None:
    """Raise ContractBroken unless credit and loss keep what the trainer relies on.

    Shapes and dtypes; 0 < sum(weight) <= 1 and nothing off `valid`; what was not executed changes
    nothing; nothing to compare gives no policy gradient; the same loss, gradient and metrics for
    any cut into micro-batches, any order of episodes and any number of ranks; every config field
    has an effect on credit or loss; and, with `learn`, it solves the toy task (a few seconds).
    """
    rollout = _rollout(cfg)
    credit = algorithm.credit(rollout, cfg, alone)
    _check_credit(algorithm, rollout, credit)
    _check_mask(algorithm, cfg, rollout, credit)
    _check_no_signal(algorithm, cfg, rollout)
    _check_micro_batches(algorithm, cfg, rollout, credit)
    _check_ranks(algorithm, cfg, rollout)
    _check_fields(algorithm, cfg)
    if learn:
        rates = learning_curve(algorithm, cfg)
        first, last = sum(rates[:3]) / 3, sum(rates[-3:]) / 3
        require(
            last >= 0.9 and last >= first + 0.3,
            f"algorithm '{algorithm.name}' does not learn the toy task: success {first:.2f} "
            f"in the first three iterations, {last:.2f} in the last three, expected 0.9",
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """Loss, gradients by decision, and metric values of one pass over a rollout."""

    loss: Tensor
    grads: dict[str, Tensor]
    metrics: dict[str, float]

    def differs(self, other: _Result) -> bool:
        pairs = [
            (self.loss, other.loss),
            *((g, other.grads[name]) for name, g in self.grads.items()),
        ]
        return any(
            a.shape != b.shape or not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE**2)
            for a, b in pairs
        )


def _rollout(cfg: AlgoSection) -> Rollout:
    multiple = cfg.episodes_multiple
    return made_up_rollout(
        episodes=-(-64 // multiple) * multiple,
        group_size=multiple,
        chunk=_CHUNK,
        value_width=cfg.value_width(_CHUNK),
    )


def _evaluation(rollout: Rollout) -> PolicyEval:
    """Random current log-probs around the stored ones, so far that every clip binds somewhere."""
    gen = torch.Generator().manual_seed(1)
    logprob = rollout.logprob + 0.6 * torch.randn(rollout.logprob.shape, generator=gen)
    value = None
    if rollout.value is not None:
        stored = rollout.value[rollout.t, rollout.b]
        value = (stored + 0.5 * torch.randn(stored.shape, generator=gen)).requires_grad_()
    return PolicyEval(
        logprob=logprob.requires_grad_(),
        entropy=torch.rand(logprob.shape, generator=gen).requires_grad_(),
        value=value,
    )


def _take(evaluation: PolicyEval, rows: Tensor) -> PolicyEval:
    return PolicyEval(
        logprob=evaluation.logprob[rows],
        entropy=evaluation.entropy[rows],
        value=None if evaluation.value is None else evaluation.value[rows],
    )


def _run(
    algorithm: Algorithm,
    cfg: AlgoSection,
    rollout: Rollout,
    credit: Credit,
    *,
    evaluation: PolicyEval | None = None,
    cut: int | None = None,
) -> _Result:
    """Accumulate loss and gradients over micro-batches of `cut` decisions (all at once if None)."""
    evaluation = evaluation or _evaluation(rollout)
    total = torch.zeros(())
    sums: dict[str, list[Tensor]] = {}
    for rows in torch.arange(rollout.num_decisions).split(cut or rollout.num_decisions):
        batch: LossBatch = loss_batch(rollout, credit, rows)
        out = algorithm.loss(_take(evaluation, rows), batch, cfg)
        require(out.loss.shape == (), f"loss has shape {tuple(out.loss.shape)}, expected a scalar")
        out.loss.backward()
        total = total + out.loss.detach()
        for name, (num, den) in out.metrics.items():
            require(not num.requires_grad, f"metric {name} carries gradient; detach it")
            pair = torch.stack([num.double(), den.double()])
            sums.setdefault(name, []).append(pair)
    leaves = {name: getattr(evaluation, name) for name in ("logprob", "entropy", "value")}
    metrics = {name: torch.stack(pairs).sum(dim=0) for name, pairs in sums.items()}
    return _Result(
        loss=total,
        grads={
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in leaves.items()
            if leaf is not None
        },
        metrics={name: float(pair[0] / pair[1]) for name, pair in metrics.items() if pair[1] != 0},
    )


def _require_equal(a: _Result, b: _Result, what: str) -> None:
    require(bool(torch.isfinite(a.loss)), f"{what}: the loss is {float(a.loss)}")
    gap = abs(float(a.loss - b.loss))
    require(gap <= _TOLERANCE, f"{what} changes the loss by {gap:.2g}")
    for name, grad in a.grads.items():
        gap = float((grad - b.grads[name]).abs().max())
        require(gap <= _TOLERANCE, f"{what} changes the gradient of {name} by {gap:.2g}")
    require(a.metrics.keys() == b.metrics.keys(), f"{what} changes which metrics exist")
    for name, number in a.metrics.items():
        gap = abs(number - b.metrics[name])
        bound = 10 * _TOLERANCE * max(1.0, abs(number))
        require(gap <= bound, f"{what} changes metric {name} by {gap:.2g}")


def _check_credit(algorithm: Algorithm, rollout: Rollout, credit: Credit) -> None:
    num_t, num_b, chunk = rollout.reward.shape
    for name in ("advantage", "weight"):
        tensor = getattr(credit, name)
        require(tensor.dtype == torch.float32, f"credit.{name} is {tensor.dtype}, not float32")
        require(bool(tensor.isfinite().all()), f"credit.{name} is not finite")
    shape = tuple(credit.advantage.shape)
    good = {(num_t, num_b, 1), (num_t, num_b, chunk)}
    require(shape in good, f"credit.advantage has shape {shape}, expected one of {good}")
    shape = tuple(credit.weight.shape)
    require(shape == (num_t, num_b, chunk), f"credit.weight has shape {shape}")
    require(bool((credit.weight >= 0).all()), "credit.weight is negative somewhere")
    require(
        not bool(credit.weight[~rollout.valid].any()),
        "credit.weight is not zero where no action was executed",
    )
    require(
        not bool(credit.weight[:, ~credit.kept].any()), "credit.weight is not zero where not kept"
    )
    total = float(credit.weight.sum())
    require(0 < total <= 1 + _TOLERANCE, f"credit.weight sums to {total}, expected 0 < sum <= 1")
    require(
        (credit.returns is not None) == algorithm.needs_value,
        "credit.returns exists if and only if the algorithm needs a value head",
    )
    if credit.returns is not None and rollout.value is not None:
        shape, want = tuple(credit.returns.shape), tuple(rollout.value[:-1].shape)
        require(shape == want, f"credit.returns has shape {shape}, expected {want}")


def _check_mask(algorithm: Algorithm, cfg: AlgoSection, rollout: Rollout, credit: Credit) -> None:
    """Garbage in what was sampled but never executed."""
    clean = _run(algorithm, cfg, rollout, credit)
    skipped = ~rollout.valid[rollout.t, rollout.b]
    require(bool(skipped.any()), "the made-up rollout has no skipped action")
    evaluation = _evaluation(rollout)
    junk = torch.where(skipped[:, :, None], 50.0, 0.0)
    dirty = PolicyEval(
        logprob=(evaluation.logprob.detach() + junk).requires_grad_(),
        entropy=(evaluation.entropy.detach() + junk).requires_grad_(),
        value=evaluation.value,
    )
    got = _run(algorithm, cfg, rollout, credit, evaluation=dirty)
    _require_equal(clean, got, "a log-prob of an action that was never executed")
    noisy = replace(rollout, reward=rollout.reward + (~rollout.valid) * 7.0)
    again = _run(algorithm, cfg, noisy, algorithm.credit(noisy, cfg, alone))
    _require_equal(clean, again, "a reward after the end of an episode")


def _check_no_signal(algorithm: Algorithm, cfg: AlgoSection, rollout: Rollout) -> None:
    """All rewards 0 and all predicted values 0: nothing was better or worse than expected."""
    zeros = None if rollout.value is None else torch.zeros_like(rollout.value)
    cases = {"all rewards are 0": torch.zeros_like(rollout.reward)}
    if algorithm.needs_groups:
        done = (rollout.terminated | rollout.truncated).float()
        cases["all episodes earn the same"] = 0.1 * done
    for what, reward in cases.items():
        flat = replace(rollout, reward=reward, value=zeros)
        credit = algorithm.credit(flat, cfg, alone)
        grad = _run(algorithm, cfg, flat, credit).grads["logprob"]
        require(
            not bool(grad.any()), f"{what}, yet the policy gradient is {float(grad.abs().max())}"
        )


def _check_micro_batches(
    algorithm: Algorithm, cfg: AlgoSection, rollout: Rollout, credit: Credit
) -> None:
    whole = _run(algorithm, cfg, rollout, credit)
    for cut in (1, 7, 64):
        _require_equal(
            whole, _run(algorithm, cfg, rollout, credit, cut=cut), f"a micro-batch of {cut}"
        )


def _check_ranks(algorithm: Algorithm, cfg: AlgoSection, rollout: Rollout) -> None:
    """Episodes reordered by whole groups, and dealt to two ranks of different size."""
    multiple = cfg.episodes_multiple
    groups = torch.arange(len(rollout.episodes)).view(-1, multiple).flip(0)
    share = max(1, len(groups) // 3)
    parts = [part_of(rollout, g.flatten().tolist()) for g in (groups[:share], groups[share:])]
    evaluation = _evaluation(rollout)
    rows_of = [
        torch.cat([(rollout.b == b).nonzero()[:, 0] for b in g.flatten().tolist()])
        for g in (groups[:share], groups[share:])
    ]

    def work(rank: int, all_sum: AllSum) -> tuple[Tensor, Tensor]:
        credit = algorithm.credit(parts[rank], cfg, all_sum)
        mine = _take(evaluation, rows_of[rank])
        mine = replace(mine, logprob=mine.logprob.detach().requires_grad_())
        batch = loss_batch(parts[rank], credit, torch.arange(len(rows_of[rank])))
        loss = algorithm.loss(mine, batch, cfg).loss
        (grad,) = torch.autograd.grad(loss, mine.logprob)
        return loss.detach(), grad

    whole = _run(algorithm, cfg, rollout, algorithm.credit(rollout, cfg, alone))
    split = on_ranks(len(parts), work)
    gap = abs(float(whole.loss - split[0][0] - split[1][0]))
    require(gap <= _TOLERANCE, f"two ranks instead of one change the loss by {gap:.2g}")
    grad = torch.cat([g for _, g in split])
    gap = float((whole.grads["logprob"][torch.cat(rows_of)] - grad).abs().max())
    require(gap <= _TOLERANCE, f"two ranks instead of one change the gradient by {gap:.2g}")


def _check_fields(algorithm: Algorithm, cfg: AlgoSection) -> None:
    """Every field changes credit or loss, at least beside some other setting of one other field."""

    def result(settings: AlgoSection) -> _Result:
        rollout = _rollout(settings)
        return _run(algorithm, settings, rollout, algorithm.credit(rollout, settings, alone))

    def has_effect(field: str) -> bool:
        for context in (cfg, *(other for f in fields if f != field for other in _changed(cfg, f))):
            base = result(context)
            if any(base.differs(result(other)) for other in _changed(context, field)):
                return True
        return False

    fields = [name for name in type(cfg).model_fields if name != "name"]
    dead = [name for name in fields if not has_effect(name)]
    require(not dead, f"config fields without effect on credit or loss: {', '.join(dead)}")


def _changed(cfg: AlgoSection, field: str) -> Iterator[AlgoSection]:
    """The section with other valid values in one field."""
    values = cfg.model_dump()
    for candidate in _candidates(type(cfg).model_fields[field].annotation, values[field]):
        if candidate == values[field]:
            continue
        try:
            yield type(cfg).model_validate({**values, field: candidate})
        except ValidationError:
            continue  # outside the field's bounds, or at odds with another field


def _candidates(annotation: Any, value: Any) -> list[Any]:
    options = [x for x in get_args(annotation) if isinstance(x, str)]
    if options:
        return options
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1]
    scale = [value / 2, value * 1.5, value / 100] if value is not None else []
    optional = [None] if type(None) in get_args(annotation) else []
    return [*scale, 0.5, 0.05, 1.5, 3.0, *optional]
