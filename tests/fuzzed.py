"""Random models: short programs over values of one shape, with everything a recompute can spoil."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Fuzzed", "Program", "inputs", "programs"]

DIM = 16
WEIGHTS = 3

# ------------------------------------------------------------------ instructions

# Each takes the module, a value and a second one, and returns a new value of the same shape. ``n``
# is a number that the instruction may use as it likes: which weight, which activation.
Instruction = Callable[["Fuzzed", Tensor, Tensor, int], Tensor]


def linear(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return m.linears[n % WEIGHTS](x)


def tied(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return functional.linear(x, m.linears[n % WEIGHTS].weight.t())


def activation(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    choices = (torch.relu, functional.gelu, torch.tanh, torch.sigmoid, functional.silu)
    return choices[n % len(choices)](x)


def saves_its_output(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return (torch.exp(-x.abs()), x.softmax(-1), x.abs().add(1).sqrt())[n % 3]


def residual(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return x + y


def gate(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return x * torch.sigmoid(y)


def added_in_place(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x * 0.5
    z += y
    return z.relu_() if n % 2 else z


def view_written(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x.clone()
    if n % 3 == 0:
        z[:, : DIM // 2].mul_(0.5)
    elif n % 3 == 1:
        z.view(-1, 2, DIM // 2)[:, 1] = y[:, : DIM // 2]
    else:
        z.t()[n % DIM].add_(1.0)
    return z


def layer_norm(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return m.layer_norms[n % 2](x)


def batch_norm(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return m.batch_norms[n % 2](x)


def group_norm(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return m.group_norm(x)


def dropout(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return functional.dropout(x, 0.1 + 0.1 * (n % 3), m.training)


def noise(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    if n % 3 == 0:
        return x + 0.1 * torch.randn_like(x)
    if n % 3 == 1:
        return x * torch.bernoulli(torch.full_like(x[:, :1], 0.7))
    return x[torch.randperm(x.shape[0])]


def turned(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    if n % 3 == 0:
        return x.view(-1, 4, DIM // 4).transpose(1, 2).reshape(x.shape)
    if n % 3 == 1:
        return torch.cat([x[:, DIM // 2 :], y[:, : DIM // 2]], -1)
    return x.flip(0)


def several_outputs(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    if n % 4 == 0:
        a, b = x.chunk(2, -1)
        return torch.cat([b, a * torch.tanh(b)], -1)
    if n % 4 == 1:
        return x - x.max(dim=-1, keepdim=True).values
    if n % 4 == 2:
        return x.sort(dim=-1).values
    return torch.stack(x.unbind(0)[::-1])


def attention(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    q, k = x.view(-1, 4, DIM), y.view(-1, 4, DIM)
    if n % 2:
        return functional.scaled_dot_product_attention(q, k, k).reshape(x.shape)
    return (torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ k).reshape(x.shape)


def convolution(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return m.convolution(x.view(-1, 4, DIM // 4)).reshape(x.shape)


def running_mean(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    """Reads the buffer and then overwrites it."""
    z = x - m.mean
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        m.calls.add_(1)
    return z


def stopped(m: Fuzzed, x: Tensor, y: Tensor, n: int) -> Tensor:
    return x + y.detach() if n % 2 else x * y.detach().abs().mean()


INSTRUCTIONS: dict[str, Instruction] = {
    f.__name__: f
    for f in (
        linear,
        tied,
        activation,
        saves_its_output,
        residual,
        gate,
        added_in_place,
        view_written,
        layer_norm,
        batch_norm,
        group_norm,
        dropout,
        noise,
        turned,
        several_outputs,
        attention,
        convolution,
        running_mean,
        stopped,
    )
}
OUTPUTS = ("loss", "tensor", "dict", "twice")


# ------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Program:
    """What a random model does.

    Attributes:
        lines: instruction, how far back its two values lie, its number.
        output: ``"loss"`` (the model's own), or what the user's loss is made of.
        frozen: which of the shared weights do not train.
        batch: rows of the input.
    """

    lines: tuple[tuple[str, int, int, int], ...]
    output: str
    frozen: frozenset[int]
    batch: int


def programs(longest: int = 14) -> st.SearchStrategy[Program]:
    """Every program of up to ``longest`` instructions behind a first linear layer."""
    line = st.tuples(
        st.sampled_from(sorted(INSTRUCTIONS)),
        st.integers(1, 3),
        st.integers(1, 6),
        st.integers(0, 11),
    )
    return st.builds(
        Program,
        st.lists(line, min_size=2, max_size=longest).map(tuple),
        st.sampled_from(OUTPUTS),
        st.frozensets(st.integers(0, WEIGHTS - 1), max_size=1),
        st.sampled_from([16, 64]),
    )


class Fuzzed(nn.Module):
    """A program with its weights, the same at every construction."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(DIM, DIM)
            self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(WEIGHTS))
            self.layer_norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
            self.batch_norms = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(2))
            self.group_norm = nn.GroupNorm(2, DIM)
            self.convolution = nn.Conv1d(4, 4, 3, padding=1)
            self.register_buffer("mean", torch.zeros(DIM))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        for index in program.frozen:
            self.linears[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        values = [x, self.first(x)]
        for name, back, further, number in self.program.lines:
            first = values[-min(back, len(values))]
            second = values[-min(further, len(values))]
            values.append(INSTRUCTIONS[name](self, first, second, number))
        last, other = values[-1], values[len(values) // 2]
        if self.program.output == "loss":
            return (last.square() + 0.1 * values[1]).mean()
        if self.program.output == "tensor":
            return last + 0.1 * values[1]
        if self.program.output == "twice":
            return last, other, last + 0.1 * values[1]
        return {"logits": last + 0.1 * values[1], "hidden": other, "best": last.argmax(-1)}

    def loss(self, output: Any) -> Tensor:
        """The user's loss outside the model, where the program leaves it to him."""
        if self.program.output == "loss":
            return output
        if self.program.output == "tensor":
            return output.square().mean()
        if self.program.output == "twice":
            return output[2].square().mean() + output[0].mean() + output[1].sum() * 0.01
        return functional.log_softmax(output["logits"], -1)[:, 0].neg().mean()


def inputs(program: Program) -> Tensor:
    """The model's input, the same at every call."""
    return torch.randn(program.batch, DIM, generator=torch.Generator().manual_seed(1))
