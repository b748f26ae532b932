"""What a decision of the tiny OpenVLA-OFT policy costs: `python tests/benchmarks/bench_policy.py`.

Times are medians of CPU time on one thread, so a busy machine shows less than it would on the wall.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from vlarl.batch import Observation
from vlarl.models.openvla_oft.tiny import init_tiny
from vlarl.noise import stream
from vlarl.policies.oft_policy import OftPolicy
from vlarl.policies.openvla_oft import OftConfig, load

PROMPTS = (
    "press the button from the top",
    "open the drawer",
    "reach the goal position",
    "push the puck to the goal",
)
STATISTICS = {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}
FRAME = 64


def cpu_ms(run, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def observation(n: int) -> Observation:
    g = torch.Generator().manual_seed(n)
    frames = torch.randint(0, 256, (n, FRAME, FRAME, 3), generator=g).to(torch.uint8)
    text = tuple(PROMPTS[i % len(PROMPTS)] for i in range(n))
    return Observation(images={"camera": frames}, state=torch.zeros(n, 4), instruction=text)


def keys_of(n: int) -> torch.Tensor:
    return torch.tensor([stream("bench", i) for i in range(n)])


def speed(policy: OftPolicy) -> None:
    for n, repeats in ((1, 40), (8, 20), (32, 10), (96, 5)):
        obs, keys = observation(n), keys_of(n)
        ms = cpu_ms(lambda o=obs, k=keys: policy.act(o, temperature=1.6, keys=k), repeats)
        print(f"act, batch {n:<3} {ms:8.1f} ms {1e3 * n / ms:8.0f} decisions/s")
    n = 64
    obs = observation(n)
    trace = policy.act(obs, temperature=1.6, keys=keys_of(n)).trace

    def update() -> None:
        policy.module.zero_grad()
        policy.evaluate(obs, trace, temperature=1.6).logprob.sum().backward()

    ms = cpu_ms(update, 5)
    print(f"evaluate and backward, batch {n} {ms:8.1f} ms {1e3 * n / ms:8.0f} decisions/s")


def head() -> None:
    """The 256 action rows at the 56 slots against the full vocabulary at all positions."""
    width, vocabulary, slots, positions = 512, 32064, 56, 349
    hidden = torch.randn(positions, width)
    full = torch.nn.Linear(width, vocabulary, bias=False)
    rows = torch.nn.Linear(width, 256, bias=False)
    with torch.no_grad():
        slow = cpu_ms(lambda: full(hidden).float(), 3)
        fast = cpu_ms(lambda: rows(hidden[:slots]).float(), 50)
    print(
        f"head: full vocabulary {slow:.0f} ms, action rows {fast:.2f} ms, ratio {slow / fast:.0f}"
    )
    many, few = 4 * positions * vocabulary, 4 * slots * 256
    print(f"head: float32 logits {many / 1e6:.1f} MB and {few / 1e3:.1f} kB per decision")


def memory(policy: OftPolicy) -> None:
    obs = observation(1)
    step = policy.act(obs, temperature=1.6, keys=keys_of(1))
    kept = [*obs.images.values(), *step.trace.values(), step.logprob, obs.state]
    ours = sum(t.nbytes for t in kept)
    size = policy.images.image_size
    print(f"memory per stored decision, tiny: {ours} B; bf16 pixel_values alone {12 * size**2} B")
    published = 256 * 256 * 3 + 56 * (2 + 4)
    print(f"memory per stored decision, 7B in LIBERO: {published} B; {12 * 224**2} B")
    print(f"ratios: {12 * size**2 / ours:.1f} and {12 * 224**2 / published:.1f}")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        init_tiny(path, prompts=PROMPTS, statistics=STATISTICS, key="bench", action_dims=4)
        policy = load(
            OftConfig(checkpoint=str(path)), device=torch.device("cpu"), needs_value=False
        )
        count = sum(p.numel() for p in policy.module.parameters())
        print(f"tiny: {count / 1e6:.2f} M parameters, {policy.images.image_size} px")
        speed(policy)
        memory(policy)
        head()


if __name__ == "__main__":
    main()
