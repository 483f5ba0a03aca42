"""Windows on two ranks: the same gradient on both, and it is that of all their samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import autockpt

WINDOWS = 3


class TokenModel(nn.Module):
    """The mean loss over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(x)))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )


def built() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TokenModel().double()


def data(rank: int, window: int, micro: int) -> tuple[Tensor, Tensor]:
    """Two samples of six tokens, of which another number counts on each rank at each time."""
    seed = 100 * rank + 10 * window + micro
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (2, 6), generator=generator)
    labels[:, (seed * 7) % 6 :] = -100  # none at all, now and then
    return x, labels


def count(x: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def expected(micro_batches: Callable[[int], int]) -> list[list[Tensor]]:
    """Gradients of the mean over all tokens of both ranks, window for window."""
    found = []
    for window in range(WINDOWS):
        parts = [data(r, window, m) for r in range(2) for m in range(micro_batches(window))]
        model = built()
        model(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def work(rank: int, folder: str, kind: str, named: bool) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    try:
        model = built()
        optimizer = SGD(model.parameters(), lr=0.0)
        seen: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(
            lambda *_: seen.append([p.grad.clone() for p in model.parameters()])
        )
        autockpt.optimize(model, None, optimizer=optimizer, accumulate=3)
        wrapper = DistributedDataParallel(model)
        options: dict[str, Any] = {"through": wrapper} if named else {}
        for window in range(WINDOWS):
            parts = [data(rank, window, micro) for micro in range(3)]
            if kind == "step":
                x, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                model.step(x, labels, weight=count, **options)
                continue
            for x, labels in parts[: 2 if kind == "flush" else 3]:
                model.micro_step(x, labels, weight=count, **options)
            if kind == "flush":
                model.flush()
        torch.save(seen, Path(folder) / f"{rank}.pt")
        distributed.barrier()  # neither leaves while the other still talks to it
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["micro_step", "flush", "step"])
def test_ranks_agree_on_the_gradient_of_all_their_tokens(
    kind: str, named: bool, tmp_path: Path
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(work, (str(tmp_path), kind, named), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    want = expected(lambda window: 2 if kind == "flush" else 3)
    assert len(first) == len(second) == WINDOWS
    for mine, theirs, wanted in zip(first, second, want, strict=True):
        for a, b, c in zip(mine, theirs, wanted, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(a, c, rtol=1e-10, atol=1e-14)


def test_a_window_calls_the_wrapper_and_syncs_once(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        model = built()
        optimizer = SGD(model.parameters(), lr=0.0)
        autockpt.optimize(model, None, optimizer=optimizer, accumulate=3)
        wrapper = DistributedDataParallel(model)
        syncs: list[bool] = []
        wrapper.register_forward_pre_hook(
            lambda module, _: syncs.append(module.require_backward_grad_sync)
        )
        model.step(torch.randn(6, 6, 4).double(), torch.zeros(6, 6, dtype=torch.int64))
        assert syncs == [False, False, True]
    finally:
        distributed.destroy_process_group()
