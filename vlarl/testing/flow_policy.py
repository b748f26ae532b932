"""A flow policy of a few thousand weights: an action chunk is denoised in a few steps.

Shaped like pi0 under RL: the chain starts at Gaussian noise, some of its steps (drawn per row) are
stochastic, and the log-prob of a decision is the sum over those steps; the first point of the chain
does not depend on the weights and has none. The module is a whole policy plug-in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vlarl.batch import Observation, PolicyEval, PolicyStep
from vlarl.config.schema import Int
from vlarl.noise import normal
from vlarl.specs import PolicySpec
from vlarl.testing.toy import NUM_FEATURES, ToySection, features, mlp, read, toy_spec, write


class FlowConfig(ToySection):
    """A tiny velocity network on pooled pixels."""

    name: Literal["flow_toy"] = "flow_toy"
    """Registered name of the policy."""
    steps: Annotated[Int, Field(ge=1)] = 3
    """Denoising steps."""
    noisy_steps: Annotated[Int, Field(ge=1)] = 2
    """How many of them are stochastic."""
    sigma: Annotated[float, Field(gt=0)] = 0.4
    """Standard deviation of a stochastic step before training, at temperature 1."""

    @model_validator(mode="after")
    def _steps_fit(self) -> FlowConfig:
        if self.noisy_steps > self.steps:
            raise ValueError(f"noisy_steps ({self.noisy_steps}) is above steps ({self.steps})")
        return self


class FlowPolicy:
    """Implements Policy.

    Trace: "chain" [n, steps + 1, C, A] float32, "step" [n, noisy_steps] int64, ascending.
    """

    shard_units: tuple[type[nn.Module], ...] = (nn.Sequential,)

    def __init__(
        self,
        cfg: FlowConfig,
        *,
        needs_value: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec(cfg, needs_value=needs_value)
        self._cfg = cfg
        self._device = torch.device(device)
        size, width = cfg.chunk * cfg.dims, self.spec.value_width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            parts = {"actor": mlp(NUM_FEATURES + size + 1, cfg.hidden, size)}
            if width:
                parts["critic"] = mlp(NUM_FEATURES, cfg.hidden, width)
        parts["actor"].register_parameter(
            "log_sigma", nn.Parameter(torch.tensor([math.log(cfg.sigma)]))
        )
        self._nets = nn.ModuleDict(parts).to(device)
        self.module: nn.Module = self._nets

    def _mean(self, seen: Tensor, x: Tensor, step: Tensor) -> Tensor:
        """[n, C, A]: where the flow takes x ([n, C, A]) in denoising step `step` ([n])."""
        time = step[:, None].float() / self._cfg.steps
        velocity = self._nets["actor"](torch.cat([seen, x.flatten(1), time], dim=1))
        return x + velocity.view_as(x) / self._cfg.steps

    @property
    def _log_sigma(self) -> Tensor:
        return self.module.get_parameter("actor.log_sigma")

    @torch.no_grad()
    def act(
        self, obs: Observation, *, temperature: float, keys: Tensor | None = None
    ) -> PolicyStep:
        """Denoise; temperature scales all noise, and 0 follows the flow from the origin."""
        cfg, n = self._cfg, len(obs)
        seen = features(obs, self._device)
        if temperature == 0:
            keys = torch.zeros(n, dtype=torch.int64)
        assert keys is not None, "sampling needs one noise key per row"
        size = cfg.chunk * cfg.dims
        draws = normal(keys.to(self._device), (cfg.steps + (cfg.steps + 1) * size,))
        step = draws[:, : cfg.steps].argsort(dim=1)[:, : cfg.noisy_steps].sort(dim=1).values
        noise = temperature * draws[:, cfg.steps :].view(n, cfg.steps + 1, cfg.chunk, cfg.dims)
        chain = [noise[:, 0]]
        for k in range(cfg.steps):
            is_noisy = (step == k).any(dim=1)[:, None, None]
            jump = torch.where(is_noisy, self._log_sigma.exp() * noise[:, k + 1], 0)
            chain.append(
                self._mean(seen, chain[-1], torch.full((n,), k, device=seen.device)) + jump
            )
        trace = {"chain": torch.stack(chain, dim=1), "step": step}
        logprob = torch.zeros_like(chain[-1])
        if temperature > 0:
            logprob = self._logprob(seen, trace, temperature)
        return PolicyStep(
            action=chain[-1],
            logprob=logprob,
            value=self.value(obs) if self.spec.has_value else None,
            trace=trace,
        )

    def _logprob(self, seen: Tensor, trace: Mapping[str, Tensor], temperature: float) -> Tensor:
        chain, step = trace["chain"].to(seen.device), trace["step"].to(seen.device)
        rows = torch.arange(len(chain), device=seen.device)
        log_std = self._log_sigma + math.log(temperature)
        total = torch.zeros_like(chain[:, 0])
        for k in step.unbind(dim=1):
            error = chain[rows, k + 1] - self._mean(seen, chain[rows, k], k)
            total = (
                total - 0.5 * (error / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
            )
        return total

    def evaluate(
        self, obs: Observation, trace: Mapping[str, Tensor], *, temperature: float
    ) -> PolicyEval:
        """Log-probs of the stored stochastic steps; the entropy is that of their Gaussians."""
        logprob = self._logprob(features(obs, self._device), trace, temperature)
        per_step = self._log_sigma + math.log(temperature) + 0.5 * math.log(2 * math.pi * math.e)
        return PolicyEval(
            logprob=logprob,
            entropy=(self._cfg.noisy_steps * per_step).expand_as(logprob),
            value=self._value(obs) if self.spec.has_value else None,
        )

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """[n, V]."""
        return self._value(obs)

    def _value(self, obs: Observation) -> Tensor:
        return self._nets["critic"](features(obs, self._device))

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """The two networks."""
        return {name: list(part.parameters()) for name, part in self._nets.items()}

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write FOLDER/model.safetensors, which `load` reads with the same config."""
        write(folder, state if state is not None else self.module.state_dict())


def spec(cfg: FlowConfig, *, needs_value: bool = False) -> PolicySpec:
    """What the policy needs and emits."""
    return toy_spec(cfg, needs_value)


def load(
    cfg: FlowConfig, *, device: torch.device | str, needs_value: bool, train: bool = True
) -> FlowPolicy:
    """The policy with the weights of cfg.checkpoint; `train` makes no difference to a toy."""
    policy = FlowPolicy(cfg, needs_value=needs_value, device=device)
    read(policy.module, cfg)
    return policy


def check(cfg: FlowConfig, *, needs_value: bool, train: bool = True) -> None:
    """Raise what `load` would; a toy is so small that it is simply loaded."""
    load(cfg, device="cpu", needs_value=needs_value, train=train)


def recognises(folder: Path) -> bool:
    """Never: the toys are for tests, and their files carry no mark."""
    return False


Config = FlowConfig
