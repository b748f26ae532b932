"""OpenVLA-OFT as a policy: acts, scores, learns from a teacher, saves itself.

Source: moojink/openvla-oft@213c5ff (inference), RLinf@a3816b5 (log-prob, entropy, value).
Differences: a greedy decision has log-prob 0, its probability being 1; sampling noise belongs to
the decision, not to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vlarl import noise
from vlarl.batch import Observation, PolicyEval, PolicyStep
from vlarl.models.openvla_oft import checkpoint
from vlarl.models.openvla_oft.action_tokens import ActionCodec, StateCodec
from vlarl.models.openvla_oft.config import NUM_BINS, Settings, read_json, with_settings
from vlarl.models.openvla_oft.net import SHARD_UNITS, OftNet, OftOutput
from vlarl.models.openvla_oft.processing import ImageFrontEnd, Prompts
from vlarl.specs import PolicySpec


class OftPolicy:
    """Implements `vlarl.interfaces.Policy`; made by `load`.

    trace: {"token": [n, C, A] int16}, local action ids 0..255. With action_format metaworld_7d the
    tokens, log-probs and entropies are 7 wide, the actions 4. lora_scale: alpha / rank of the
    adapters in `module`, None without adapters. source: the checkpoint folder it was made from;
    `save` reads it again. self_tests: what was proven while loading.
    """

    shard_units: tuple[type[nn.Module], ...] = SHARD_UNITS

    def __init__(
        self,
        *,
        spec: PolicySpec,
        module: OftNet,
        images: ImageFrontEnd,
        prompts: Prompts,
        codec: ActionCodec,
        state_codec: StateCodec | None,
        settings: Settings,
        lora_scale: float | None,
        source: Path,
        self_tests: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.module = module
        self.images = images
        self.prompts = prompts
        self.codec = codec
        self.state_codec = state_codec
        self.settings = settings
        self.lora_scale = lora_scale
        self.source = source
        self.self_tests = self_tests

    @property
    def is_l1(self) -> bool:
        """Whether actions come from a regression head: evaluation only."""
        return self.module.l1_head is not None

    @property
    def device(self) -> torch.device:
        """Where the network is now."""
        return next(self.module.parameters()).device

    def act(
        self, obs: Observation, *, temperature: float, keys: Tensor | None = None
    ) -> PolicyStep:
        """Decide, without gradient. Results are on the device of obs.

        keys: [n] int64 noise keys, needed unless temperature is 0. A greedy decision has log-prob
        0. With an L1 head the regressed action is returned whatever the temperature.
        """
        home = obs.state.device
        with torch.no_grad():
            out = self._forward(obs)
            value = None if out.value is None else out.value.to(home)
            if out.action is not None:
                action = self.codec.decode_normalised(out.action).to(home)
                return PolicyStep(
                    action=action,
                    logprob=torch.zeros_like(out.action).to(home),
                    value=value,
                    trace={},
                )
            logits = self._shape(out)
            if temperature == 0:
                token = logits.argmax(-1)
                logprob = torch.zeros(token.shape, device=token.device)
            else:
                assert keys is not None, "sampling needs noise keys"
                scaled = logits / temperature
                gumbel = noise.gumbel(keys.to(logits.device), tuple(logits.shape[1:]))
                token = (scaled + gumbel).argmax(-1)
                logprob = _pick(F.log_softmax(scaled, dim=-1), token)
            return PolicyStep(
                action=self.codec.decode(token).to(home),
                logprob=logprob.to(home),
                value=value,
                trace={"token": token.to(torch.int16).to(home)},
            )

    def evaluate(
        self, obs: Observation, trace: Mapping[str, Tensor], *, temperature: float
    ) -> PolicyEval:
        """Score stored tokens under the current weights, with gradient.

        temperature: the one they were sampled with, above 0. logprob and entropy: [n, C, A] float32
        of the tempered 256-way distributions.
        """
        assert temperature > 0, temperature
        assert not self.is_l1, "an L1 head has no log-probabilities; `load` refuses it for training"
        out = self._forward(obs)
        logp = F.log_softmax(self._shape(out) / temperature, dim=-1)
        token = trace["token"].to(logp.device, torch.long)
        entropy = -(logp.exp() * logp).sum(-1)
        return PolicyEval(logprob=_pick(logp, token), entropy=entropy, value=out.value)

    def value(self, obs: Observation) -> Tensor:
        """[n, V] float32 on the device of obs, without gradient. Only with a value head."""
        assert self.spec.has_value, "loaded without a value head"
        with torch.no_grad():
            out = self._forward(obs, with_actions=False)
        assert out.value is not None
        return out.value.to(obs.state.device)

    def encode(self, action: Tensor) -> Tensor:
        """[..., dims] canonical actions -> [..., A] int16 local ids."""
        return self.codec.encode(action)

    def sft_loss(self, obs: Observation, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of the tokens of teacher actions, a scalar with gradient.

        action: [n, C, dims] canonical. mask: [n, C] bool, False past the end of the episode; None =
        all count. The mean is over the tokens that count, 0 if none does.
        """
        logits = self._shape(self._forward(obs, with_value=False, dropout=True))
        token = self.encode(action.to(logits.device)).long()
        loss = -_pick(F.log_softmax(logits, dim=-1), token)
        if mask is None:
            return loss.mean()
        weight = mask.to(loss.device)[..., None].expand_as(loss).float()
        return (loss * weight).sum() / weight.sum().clamp(min=1)

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters: "actor", and "critic" when there is a value head."""
        groups: dict[str, list[nn.Parameter]] = {"actor": []}
        if self.spec.has_value:
            groups["critic"] = []
        for name, param in self.module.named_parameters():
            if param.requires_grad:
                groups["critic" if name.startswith("value_head.") else "actor"].append(param)
        return groups

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a checkpoint in the released layout: adapters merged, the value head in a file of
        its own.

        state: full CPU state dict of `module`, under sharding. folder must not exist. Raises
        RunFailed when the disk is full; then nothing is left behind.
        """
        full = self.module.state_dict() if state is None else state
        if self.lora_scale is not None:
            full = checkpoint.merge_adapters(full, self.lora_scale)

        def fill(path: Path) -> None:
            checkpoint.copy_small_files(self.source, path)
            raw = with_settings(read_json(self.source / "config.json"), self.settings)
            raw["torch_dtype"] = str(full["projector.fc1.weight"].dtype).removeprefix("torch.")
            checkpoint.write_json(path / "config.json", raw)
            first = self.module.config.first_action_id
            checkpoint.save_weights(full, first, self.source, path)
            checkpoint.save_heads(full, self.source, path)

        checkpoint.write_folder(folder, fill)

    def _forward(
        self,
        obs: Observation,
        *,
        with_actions: bool = True,
        with_value: bool = True,
        dropout: bool = False,
    ) -> OftOutput:
        # The mode stays until the next forward: activation checkpointing runs the layers again in
        # the backward pass and has to find the same mode.
        if self.module.training != dropout:
            self.module.train(dropout)
        device = self.device
        views = list(obs.images.values())[: self.spec.cameras]
        assert len(views) == self.spec.cameras, (list(obs.images), self.spec.cameras)
        pixels = self.images([view.to(device, non_blocking=True) for view in views])
        ids, keep = self.prompts.batch(obs.instruction, device)
        state = self.state_codec(obs.state.to(device)) if self.state_codec else None
        return self.module(
            pixels, ids, keep, state, with_actions=with_actions, with_value=with_value
        )

    def _shape(self, out: OftOutput) -> Tensor:
        """[n, C, A, 256] float32."""
        assert out.logits is not None
        return out.logits.view(len(out.logits), self.spec.chunk, self.codec.width, NUM_BINS)


def _pick(logp: Tensor, token: Tensor) -> Tensor:
    """[..., 256], [...] -> [...]."""
    return logp.gather(-1, token[..., None]).squeeze(-1)
