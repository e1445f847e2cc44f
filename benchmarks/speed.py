"""Updates of f per second at the paper's network sizes, one thread, beside a PyTorch loop in the same run.

    python benchmarks/speed.py            # prints and appends a record; PyTorch is measured if it is
    installed

Sizes of the released two-moons experiment: 1,000 training points, all of them centres; noise and hidden ReLU
layers of width 128; 4 linear layers in the sampler and 3 in nu; batches of 100; 5 sampler updates per f
update, 3 nu updates per sampler update; clipping at 5; base = box. The conditional case has the rows of
geyser's training half (149, one input), 3 linear layers in both networks, noise of width 64, and a normal
base. The paper does not say how wide its layers are there, so that widths of 128, as without a condition, and
of 64 are both measured.
"""

import os
import statistics
import time

os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax.random as jr  # noqa: E402
import numpy as np  # noqa: E402
from ledger import append  # noqa: E402

from kexpfam import datasets  # noqa: E402
from kexpfam.data.sample import Sample  # noqa: E402
from kexpfam.fit.loop import run  # noqa: E402
from kexpfam.fit.saddle import DoublyDual, SaddleProblem  # noqa: E402
from kexpfam.model.kernels import Gaussian as GaussianKernel  # noqa: E402
from kexpfam.model.kernels import lengthscale_from_ratio, median_distance  # noqa: E402
from kexpfam.model.measures import Box, Gaussian, StandardNormal  # noqa: E402
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan  # noqa: E402

__all__ = ["conditional_rounds", "jax_rounds", "main", "torch_rounds"]

POINTS, WIDTH, NOISE, BATCH = 1000, 128, 128, 100
HIDDEN = {"transport": 3, "nu": 2}
ROUNDS, REPEATS = 150, 5


def single(span: KernelSpan) -> KernelSpan:
    """Return a span in the precision that the paper's networks have."""
    return jax.tree.map(jnp.float32, span)


def rounds(problem: SaddleProblem, features: int, solver: DoublyDual):
    """Return a function that runs ROUNDS updates of f with the library's own loop, in single precision."""
    state = solver.init(problem, jnp.zeros(features, jnp.float32), key=jr.key(0))
    once = lambda: run(problem, solver, state, steps=ROUNDS, key=jr.key(1), stage="speed", chunk=50)
    return lambda: jax.block_until_ready(once().state.step)


def jax_rounds():
    """Return the updates of the released two-moons experiment."""
    points = datasets.two_moons().sample(POINTS, random_state=0).astype(np.float32)
    lengthscale = lengthscale_from_ratio(0.1, median_distance(points))
    # All training points are centres.
    space = FeatureSpace(Constant(), single(KernelSpan.build(GaussianKernel(lengthscale), points)))
    base = Box(points.min(0) - 1.0, points.max(0) + 1.0)
    fixed = {"rkhs_penalty": jnp.float32(0.0), "inverse_temperature": jnp.float32(1.0), "anchored": False}
    problem = SaddleProblem(Sample.unconditional(points), base, space, StandardNormal(NOISE), **fixed)
    sizes = {"width": WIDTH, "batch_size": BATCH} | {
        f"{player}_depth": hidden for player, hidden in HIDDEN.items()
    }
    return rounds(
        problem, space.size, DoublyDual.plain(nu_rate=1e-4, transport_rate=1e-4, activation="relu", **sizes)
    )


def conditional_rounds(width: int):
    """Return updates of a conditional density, with hidden layers of this width."""
    rng = np.random.default_rng(0)
    condition = rng.normal(size=(149, 1)).astype(np.float32)
    target = (np.sin(condition) + 0.3 * rng.normal(size=(149, 1))).astype(np.float32)
    span = lambda rows: single(KernelSpan.build(GaussianKernel(0.5), rows, rank=20))
    base = Gaussian(np.zeros(1, np.float32), np.eye(1, dtype=np.float32))
    fixed = {"rkhs_penalty": jnp.float32(1e-3), "inverse_temperature": jnp.float32(1.0), "anchored": False}
    space = FeatureSpace(span(condition), span(target))
    problem = SaddleProblem(Sample(target, condition), base, space, StandardNormal(64), **fixed)
    solver = DoublyDual.plain(width=width, batch_size=BATCH, activation="relu", transport_depth=2, nu_depth=2)
    return rounds(problem, space.size, solver)


def torch_network(inputs: int, outputs: int, hidden: int):
    """Return a plain ReLU network."""
    from torch import nn

    widths = [inputs, *[WIDTH] * hidden]
    layers = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def torch_rounds():
    """Return the same updates as a plain PyTorch loop."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    points = torch.tensor(datasets.two_moons().sample(POINTS, random_state=0), dtype=torch.float32)
    gamma = 0.5 / lengthscale_from_ratio(0.1, median_distance(points.numpy())) ** 2
    low, high = points.min(0).values - 1.0, points.max(0).values + 1.0

    g, nu = torch_network(NOISE, 2, HIDDEN["transport"]), torch_network(2, 1, HIDDEN["nu"])
    weights = torch.zeros(POINTS, requires_grad=True)
    players = {"f": [weights], "g": list(g.parameters()), "nu": list(nu.parameters())}
    optimisers = {
        name: torch.optim.Adam(parameters, 1e-4, betas=(0.5, 0.99)) for name, parameters in players.items()
    }

    def saddle():
        data = points[torch.randint(POINTS, (BATCH,))]
        moved, base = g(torch.randn(BATCH, NOISE)), low + (high - low) * torch.rand(BATCH, 2)
        f = lambda x: torch.exp(-gamma * torch.cdist(x, points) ** 2) @ weights
        return f(data).mean() - f(moved).mean() + nu(moved).mean() - nu(base).exp().mean() + 1.0

    def move(name, sign):
        optimisers[name].zero_grad()
        gradients = torch.autograd.grad(sign * saddle(), players[name])
        for parameter, gradient in zip(players[name], gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(players[name], 5.0)
        optimisers[name].step()

    def rounds():
        for _ in range(ROUNDS):
            for _ in range(5):
                for _ in range(3):
                    move("nu", -1.0)
                move("g", 1.0)
            move("f", -1.0)

    return rounds


def main() -> None:
    contestants = {"kexpfam": jax_rounds()} | {
        f"conditional, width {width}": conditional_rounds(width) for width in (128, 64)
    }
    try:
        contestants["pytorch"] = torch_rounds()
    except ImportError:
        print("PyTorch is not installed; measuring kexpfam alone")
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for once in contestants.values():
        once()
    for _ in range(REPEATS):  # interleaved, so that a busy moment of the machine hits both
        for name, once in contestants.items():
            start = time.perf_counter()
            once()
            rates[name].append(ROUNDS / (time.perf_counter() - start))
    record = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    if "pytorch" in record:
        record["ratio"] = round(record["kexpfam"] / record["pytorch"], 2)
    print(record)
    append("speed", record)


if __name__ == "__main__":
    main()
