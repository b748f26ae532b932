"""The contract of a policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vlarl.batch import Observation, PolicyEval, PolicyStep
from vlarl.interfaces import Policy
from vlarl.noise import stream
from vlarl.specs import PolicySpec
from vlarl.testing.require import require


def made_up_observation(
    spec: PolicySpec, *, n: int = 5, frame_size: tuple[int, int] = (32, 32), seed: int = 0
) -> Observation:
    """Random pixels and state for a policy of this spec, with instructions of different length."""
    gen = torch.Generator().manual_seed(seed)
    words = ("push", "the", "red", "button", "from", "above", "slowly")
    return Observation(
        images={
            f"camera_{k}": torch.randint(0, 256, (n, *frame_size, 3), generator=gen).byte()
            for k in range(spec.cameras)
        },
        state=torch.randn(n, spec.state_dims, generator=gen),
        instruction=tuple(" ".join(words[: 2 + i % 6]) for i in range(n)),
    )


def check_policy(
    policy: Policy,
    obs: Observation,
    *,
    folder: Path,
    reload: Callable[[Path], Policy],
    atol: float = 1e-4,
) -> None:
    """Raise ContractBroken unless the policy keeps what collector and trainer rely on.

    obs: at least 4 rows that differ, with instructions of different length. folder: an empty one to
    save to. reload: folder -> a policy with the weights saved there. atol: of log-probs and values.

    Shapes and dtypes; the log-prob of `evaluate` is that of `act` at any temperature; a row's
    decision depends on its own observation and key alone, in any batch and order; temperature 0 is
    the limit of small ones; parameter groups that cover every trainable parameter once, each with a
    gradient; a save that reloads to the same policy; inputs left alone.
    """
    require(len(obs) >= 4, f"check_policy needs at least 4 rows, got {len(obs)}")
    keys = torch.tensor([stream("check", i) for i in range(len(obs))])
    pixels = {name: image.clone() for name, image in obs.images.items()}
    step = policy.act(obs, temperature=1.3, keys=keys)
    _check_shapes(policy, step, len(obs))
    _check_parity(policy, obs, step, atol)
    _check_rows(policy, obs, keys, step, atol)
    _check_keys(policy, obs, keys, step)
    _check_greedy(policy, obs, keys)
    _check_gradients(policy, obs, step)
    for name, image in obs.images.items():
        require(torch.equal(image, pixels[name]), f"the policy changed the pixels of {name}")
    policy.save(folder)
    _require_close(
        policy.evaluate(obs, step.trace, temperature=1.3),
        reload(folder).evaluate(obs, step.trace, temperature=1.3),
        "saving and loading again",
        atol,
    )


def _check_shapes(policy: Policy, step: PolicyStep, n: int) -> None:
    spec = policy.spec
    want = (n, spec.chunk, spec.action.dims)
    for name in ("action", "logprob"):
        tensor = getattr(step, name)
        require(tuple(tensor.shape) == want, f"{name}: shape {tuple(tensor.shape)}, {want}")
        require(tensor.dtype == torch.float32, f"{name}: {tensor.dtype}, expected float32")
        require(bool(tensor.isfinite().all()), f"{name} is not finite")
        require(not tensor.requires_grad, f"{name} of act carries gradient")
    require((step.value is not None) == spec.has_value, "a value exists iff the spec has one")
    if step.value is not None:
        want_value = (n, spec.value_width)
        require(tuple(step.value.shape) == want_value, f"value: shape {tuple(step.value.shape)}")
        require(step.value.dtype == torch.float32, f"value: {step.value.dtype}")
    for name, tensor in step.trace.items():
        require(len(tensor) == n, f"trace '{name}' has {len(tensor)} rows, expected {n}")


def _check_parity(policy: Policy, obs: Observation, step: PolicyStep, atol: float) -> None:
    scored = policy.evaluate(obs, step.trace, temperature=1.3)
    gap = _gap(scored.logprob, step.logprob)
    require(gap <= atol, f"evaluate and act disagree about the log-prob by {gap:.2g}")
    require(scored.logprob.dtype == torch.float32, "logprob of evaluate is not float32")
    require(scored.entropy.shape == scored.logprob.shape, "entropy has another shape than logprob")
    require(scored.entropy.dtype == torch.float32, "entropy is not float32")
    require((scored.value is not None) == policy.spec.has_value, "value of evaluate")
    if scored.value is not None and step.value is not None:
        gap = max(_gap(scored.value, step.value), _gap(policy.value(obs), step.value))
        require(gap <= atol, f"act, evaluate and value disagree about the value by {gap:.2g}")
    other = policy.evaluate(obs, step.trace, temperature=0.7)
    require(_gap(other.logprob, step.logprob) > atol, "evaluate ignores the temperature")


def _check_rows(
    policy: Policy, obs: Observation, keys: Tensor, step: PolicyStep, atol: float
) -> None:
    """Each row alone, all rows reversed: the padding of a batch must not reach the others."""
    scored = policy.evaluate(obs, step.trace, temperature=1.3)
    n = len(obs)
    for rows in ([0], [n - 1], list(range(n - 1, -1, -1))):
        alone = policy.act(obs.select(rows), temperature=1.3, keys=keys[rows])
        gap = _gap(alone.action, step.action[rows])
        require(gap <= atol, f"rows {rows} act differently in another batch, by {gap:.2g}")
        trace = {name: tensor[rows] for name, tensor in step.trace.items()}
        again = policy.evaluate(obs.select(rows), trace, temperature=1.3)
        want = PolicyEval(
            logprob=scored.logprob[rows],
            entropy=scored.entropy[rows],
            value=None if scored.value is None else scored.value[rows],
        )
        _require_close(want, again, f"taking rows {rows} of a batch", atol)


def _check_keys(policy: Policy, obs: Observation, keys: Tensor, step: PolicyStep) -> None:
    again = policy.act(obs, temperature=1.3, keys=keys)
    require(torch.equal(again.action, step.action), "the same keys give another action")
    other = policy.act(obs, temperature=1.3, keys=keys + 1)
    require(not torch.equal(other.action, step.action), "other keys give the same actions")
    twice = policy.act(obs.select([0, 0]), temperature=1.3, keys=keys[:2])
    require(not torch.equal(twice.action[0], twice.action[1]), "two keys of a batch act alike")


def _check_greedy(policy: Policy, obs: Observation, keys: Tensor) -> None:
    greedy = policy.act(obs, temperature=0)
    again = policy.act(obs, temperature=0, keys=keys)
    require(torch.equal(greedy.action, again.action), "temperature 0 depends on the keys")
    cold = policy.act(obs, temperature=1e-8, keys=keys)
    gap = _gap(cold.action, greedy.action)
    require(gap <= 1e-4, f"temperature 0 is not the limit of small ones: off by {gap:.2g}")


def _check_gradients(policy: Policy, obs: Observation, step: PolicyStep) -> None:
    groups = policy.param_groups()
    want = {"actor", "critic"} if policy.spec.has_value else {"actor"}
    require(set(groups) == want, f"parameter groups {sorted(groups)}, expected {sorted(want)}")
    flat = [p for group in groups.values() for p in group]
    require(len({id(p) for p in flat}) == len(flat), "a parameter is in two groups")
    trainable = {id(p): name for name, p in policy.module.named_parameters() if p.requires_grad}
    missing = [name for i, name in trainable.items() if i not in {id(p) for p in flat}]
    require(not missing, f"trainable parameters in no group: {', '.join(missing)}")
    require(len(flat) == len(trainable), "a parameter group holds what is not trainable")

    require(all(p.grad is None for p in flat), "the policy came with gradients, or act left some")
    scored = policy.evaluate(obs, step.trace, temperature=1.3)
    gen = torch.Generator().manual_seed(0)
    pull = torch.rand(scored.logprob.shape, generator=gen).to(scored.logprob.device)
    total = (pull * scored.logprob).sum() + scored.entropy.sum()
    if scored.value is not None:
        total = total + scored.value.sum()
    total.backward()
    cut_off = [trainable[id(p)] for p in flat if p.grad is None]
    require(not cut_off, f"no gradient reaches {', '.join(cut_off)}")
    for name, group in groups.items():
        size = sum(float(p.grad.abs().sum()) for p in group if p.grad is not None)
        require(0 < size < float("inf"), f"the gradient of group '{name}' sums to {size}")
    policy.module.zero_grad(set_to_none=True)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


def _require_close(a: PolicyEval, b: PolicyEval, how: str, atol: float) -> None:
    for name in ("logprob", "entropy", "value"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and y is not None:
            require(_gap(x, y) <= atol, f"{how} changes the {name} by {_gap(x, y):.2g}")
