"""A token policy of a few thousand weights: every action number is one of a few bins.

The module is a whole policy plug-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vlarl.batch import Observation, PolicyEval, PolicyStep
from vlarl.config.schema import Int
from vlarl.noise import gumbel
from vlarl.specs import PolicySpec
from vlarl.testing.toy import NUM_FEATURES, ToySection, features, mlp, read, toy_spec, write


class TokenConfig(ToySection):
    """A tiny network on pooled pixels with a categorical head per action number."""

    name: Literal["token_toy"] = "token_toy"
    """Registered name of the policy."""
    bins: Annotated[Int, Field(ge=2)] = 3
    """Values an action number can take, evenly from -1 to 1."""


class TokenPolicy:
    """Implements Policy with trace {"token": [n, C, A] int64}."""

    shard_units: tuple[type[nn.Module], ...] = (nn.Sequential,)

    def __init__(
        self,
        cfg: TokenConfig,
        *,
        needs_value: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec(cfg, needs_value=needs_value)
        self._shape = (cfg.chunk, cfg.dims, cfg.bins)
        self._bins = torch.linspace(-1, 1, cfg.bins, device=device)
        width = self.spec.value_width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            parts = {"actor": mlp(NUM_FEATURES, cfg.hidden, cfg.chunk * cfg.dims * cfg.bins)}
            if width:
                parts["critic"] = mlp(NUM_FEATURES, cfg.hidden, width)
        self._nets = nn.ModuleDict(parts).to(device)
        self.module: nn.Module = self._nets

    def _logits(self, obs: Observation) -> Tensor:
        flat = self._nets["actor"](features(obs, self._bins.device))
        return flat.view(-1, *self._shape)

    @torch.no_grad()
    def act(
        self, obs: Observation, *, temperature: float, keys: Tensor | None = None
    ) -> PolicyStep:
        """Sample a bin per action number by adding Gumbel noise; temperature 0 takes the best."""
        logits = self._logits(obs)
        if temperature == 0:
            token = logits.argmax(dim=-1)
            logprob = torch.zeros(token.shape, device=token.device)
        else:
            assert keys is not None, "sampling needs one noise key per row"
            scaled = logits / temperature
            token = (scaled + gumbel(keys.to(scaled.device), self._shape)).argmax(dim=-1)
            logprob = scaled.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0]
        return PolicyStep(
            action=self._bins[token],
            logprob=logprob,
            value=self.value(obs) if self.spec.has_value else None,
            trace={"token": token},
        )

    def evaluate(
        self, obs: Observation, trace: Mapping[str, Tensor], *, temperature: float
    ) -> PolicyEval:
        """Log-probs of the stored tokens and the entropy of their distributions."""
        logprobs = (self._logits(obs) / temperature).log_softmax(dim=-1)
        token = trace["token"].to(logprobs.device)
        return PolicyEval(
            logprob=logprobs.gather(-1, token[..., None])[..., 0],
            entropy=-(logprobs.exp() * logprobs).sum(dim=-1),
            value=self._value(obs) if self.spec.has_value else None,
        )

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """[n, V]."""
        return self._value(obs)

    def _value(self, obs: Observation) -> Tensor:
        return self._nets["critic"](features(obs, self._bins.device))

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """The two networks."""
        return {name: list(part.parameters()) for name, part in self._nets.items()}

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write FOLDER/model.safetensors, which `load` reads with the same config."""
        write(folder, state if state is not None else self.module.state_dict())


def spec(cfg: TokenConfig, *, needs_value: bool = False) -> PolicySpec:
    """What the policy needs and emits."""
    return toy_spec(cfg, needs_value)


def load(
    cfg: TokenConfig, *, device: torch.device | str, needs_value: bool, train: bool = True
) -> TokenPolicy:
    """The policy with the weights of cfg.checkpoint; `train` makes no difference to a toy."""
    policy = TokenPolicy(cfg, needs_value=needs_value, device=device)
    read(policy.module, cfg)
    return policy


def check(cfg: TokenConfig, *, needs_value: bool, train: bool = True) -> None:
    """Raise what `load` would; a toy is so small that it is simply loaded."""
    load(cfg, device="cpu", needs_value=needs_value, train=train)


def recognises(folder: Path) -> bool:
    """Never: the toys are for tests, and their files carry no mark."""
    return False


Config = TokenConfig
