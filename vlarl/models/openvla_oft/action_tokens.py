"""Action tokens: 256 ids <-> numbers in [-1, 1] <-> actions of the data set <-> canonical actions
of the env.

Source: moojink/openvla-oft@213c5ff prismatic/vla/action_tokenizer.py and modeling_prismatic.py.
Differences: tokens are counted from the first action id (local id j = 0..255), and decoding is one
table look-up.

There are 256 edges, hence 255 centres c_k = -1 + (2k + 1) / 255, and local id j decodes to c_k with
k = min(255 - j, 254): ids 0 and 1 mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlarl.errors import ConfigError
from vlarl.models.openvla_oft.config import NUM_BINS, ActionFormat, Normalisation
from vlarl.models.openvla_oft.statistics import bounds
from vlarl.specs import ActionSpec

_EPS = 1e-8

FORMATS: Mapping[ActionFormat, ActionSpec] = {
    "delta_xyz": ActionSpec(dims=4, format="delta_xyz", gripper="effort_close_positive"),
    "delta_xyz_axisangle": ActionSpec(
        dims=7, format="delta_xyz_axisangle", gripper="close_positive"
    ),
    "metaworld_7d": ActionSpec(dims=4, format="delta_xyz", gripper="effort_close_positive"),
}
_BY_WIDTH: Mapping[int, ActionFormat] = {4: "delta_xyz", 7: "delta_xyz_axisangle"}
_MODEL_WIDTH: Mapping[ActionFormat, int] = {
    "delta_xyz": 4,
    "delta_xyz_axisangle": 7,
    "metaworld_7d": 7,
}


def model_width(action_format: ActionFormat) -> int:
    """Numbers, hence tokens, per action of a model with that format."""
    return _MODEL_WIDTH[action_format]


def choose_format(width: int, wanted: ActionFormat | None) -> ActionFormat:
    """The action format of a checkpoint that emits `width` numbers; None chooses by width."""
    if wanted is None:
        if width not in _BY_WIDTH:
            raise ConfigError(
                f"policy.action_format: actions of {width} numbers have no default format; "
                f"known widths: {', '.join(map(str, _BY_WIDTH))}"
            )
        return _BY_WIDTH[width]
    if _MODEL_WIDTH[wanted] != width:
        raise ConfigError(
            f"policy.action_format: '{wanted}' needs {_MODEL_WIDTH[wanted]} numbers per action, "
            f"the checkpoint's statistics have {width}"
        )
    return wanted


def bin_centres() -> Tensor:
    """[256] float64: what each local id decodes to."""
    k = (NUM_BINS - 1 - torch.arange(NUM_BINS)).clamp(max=NUM_BINS - 2).to(torch.float64)
    return -1 + (2 * k + 1) / (NUM_BINS - 1)


def digitise(x: Tensor) -> Tensor:
    """Local id (int64) of each number, clipped to [-1, 1] first: 256 minus the number of edges <=
    x.
    """
    edges = torch.linspace(-1, 1, NUM_BINS, dtype=torch.float64, device=x.device)
    return NUM_BINS - torch.searchsorted(edges, x.double().clamp(-1, 1), right=True)


class ActionCodec:
    """Tokens of one data set's actions.

    statistics: its "action" entry: q01, q99, min, max [A], mask [A] (False = stored as is; missing
    = all True). Raises as `bounds`, and ConfigError for a width without a format.
    """

    def __init__(
        self,
        statistics: Mapping[str, Any],
        *,
        normalisation: Normalisation,
        action_format: ActionFormat | None,
    ) -> None:
        low, high, mask = bounds(statistics, normalisation, "action")
        self.low = torch.tensor(low, dtype=torch.float64)
        self.high = torch.tensor(high, dtype=torch.float64)
        self.mask = torch.tensor(mask, dtype=torch.bool)
        self.action_format = choose_format(len(self.low), action_format)
        self.spec = FORMATS[self.action_format]
        self._table: Tensor = self._canonical_table()

    @property
    def width(self) -> int:
        """Numbers, hence tokens, per action of the model; may exceed the env's width
        (metaworld_7d).
        """
        return len(self.low)

    def unnormalise(self, x: Tensor) -> Tensor:
        """[..., A] in [-1, 1] -> actions of the data set, float64."""
        low, high, mask = (t.to(x.device) for t in (self.low, self.high, self.mask))
        x = x.double()
        return torch.where(mask, 0.5 * (x + 1) * (high - low + _EPS) + low, x)

    def normalise(self, action: Tensor) -> Tensor:
        """[..., A] actions of the data set -> [-1, 1] where masked, float64."""
        low, high, mask = (t.to(action.device) for t in (self.low, self.high, self.mask))
        action = action.double()
        return torch.where(
            mask, (2 * (action - low) / (high - low + _EPS) - 1).clamp(-1, 1), action
        )

    def to_canonical(self, action: Tensor) -> Tensor:
        """[..., A] actions of the data set -> [..., dims] canonical, float32."""
        if self.action_format == "metaworld_7d":
            action = action[..., [0, 1, 2, 6]]
        elif self.action_format == "delta_xyz_axisangle":
            # The data set says 1 = open, 0 = closed; canonical is -1 open, +1 closed, nothing
            # between.
            grip = -torch.sign(2 * action[..., 6:] - 1)
            action = torch.cat([action[..., :6], grip], dim=-1)
        return action.float()

    def from_canonical(self, action: Tensor) -> Tensor:
        """[..., dims] canonical -> [..., A] actions of the data set, float64."""
        action = action.double()
        if self.action_format == "metaworld_7d":
            unused = action.new_zeros(*action.shape[:-1], 3)
            action = torch.cat([action[..., :3], unused, action[..., 3:]], dim=-1)
        elif self.action_format == "delta_xyz_axisangle":
            grip = (1 - torch.sign(action[..., 6:])) / 2
            action = torch.cat([action[..., :6], grip], dim=-1)
        return action

    def decode(self, token: Tensor) -> Tensor:
        """[..., A] local ids -> [..., dims] canonical actions, float32."""
        if self._table.device != token.device:
            self._table = self._table.to(token.device)
        dims = torch.arange(self.width, device=token.device)
        picked = self._table[dims, token.long()]
        return picked[..., [0, 1, 2, 6]] if self.action_format == "metaworld_7d" else picked

    def encode(self, action: Tensor) -> Tensor:
        """[..., dims] canonical actions -> [..., A] local ids, int16."""
        return digitise(self.normalise(self.from_canonical(action))).to(torch.int16)

    def decode_normalised(self, x: Tensor) -> Tensor:
        """[..., A] continuous numbers in [-1, 1] (L1 head) -> [..., dims] canonical actions,
        float32.
        """
        return self.to_canonical(self.unnormalise(x))

    def _canonical_table(self) -> Tensor:
        """[A, 256] float32: canonical value of every token of every model dimension."""
        values = self.unnormalise(bin_centres()[:, None].expand(-1, self.width))
        if self.action_format != "metaworld_7d":
            values = self.to_canonical(values)
        return values.T.float().contiguous()


class StateCodec:
    """Proprioception -> [-1, 1]. statistics: the "proprio" entry of a data set. Raises as
    `bounds`.
    """

    def __init__(self, statistics: Mapping[str, Any], *, normalisation: Normalisation) -> None:
        low, high, _ = bounds(statistics, normalisation, "proprio")
        self.low = torch.tensor(low, dtype=torch.float32)
        self.high = torch.tensor(high, dtype=torch.float32)

    @property
    def width(self) -> int:
        """S."""
        return len(self.low)

    def __call__(self, state: Tensor) -> Tensor:
        """[n, S] float32 -> [n, S] float32, clipped."""
        low, high = self.low.to(state.device), self.high.to(state.device)
        return (2 * (state - low) / (high - low + _EPS) - 1).clamp(-1, 1)
