"""What of a step's arguments is cut, and what is passed on whole."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

import autockpt
from autockpt import InputError
from autockpt.split import Batch, Split, batch_size, cut, shares

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what users have


@dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float
    more: Any = None


def forward(x: Any, mask: Any = None, **others: Any) -> None:
    """Only its signature is read."""


def parts(
    *args: Any, split: Any = None, batch_dim: int = 0, target: Any = None, k: int = 2, **kwargs: Any
) -> list[Batch]:
    batch, how = Batch(args, kwargs, target), Split(batch_dim, split)
    return list(cut(forward, batch, how, shares(batch_size(forward, batch, how), k)))


X = torch.arange(12.0).reshape(4, 3)


@given(st.integers(1, 200), st.integers(1, 50))
def test_shares_are_all_of_the_batch_and_as_equal_as_can_be(samples: int, count: int) -> None:
    sizes = shares(samples, count)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, count)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (X, lambda v: v),
        ([1, (X, "text")], lambda v: v[1][0]),
        ({"a": {"b": X}}, lambda v: v["a"]["b"]),
        (Pair(X, None), lambda v: v.left),
        (Sample(X, 2.0), lambda v: v.x),
        (Sample(None, 2.0, {"inner": X}), lambda v: v.more["inner"]),
        (OrderedDict(a=X), lambda v: v["a"]),
        (UserDict(a=X), lambda v: v["a"]),
        (MappingProxyType({"a": X}), lambda v: v["a"]),
    ],
)
def test_tensors_are_cut_wherever_they_are(value: Any, leaf: Any) -> None:
    found = parts(value)
    assert torch.equal(torch.cat([leaf(p.args[0]) for p in found]), X)
    assert [len(leaf(p.args[0])) for p in found] == [2, 2]
    for part in found:
        if not isinstance(value, MappingProxyType):
            assert type(part.args[0]) is type(value)
        # Views of the batch: cutting takes no memory.
        assert leaf(part.args[0]).untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    assert leaf(value) is X


def test_what_has_another_size_goes_whole_to_each() -> None:
    table, scalar = torch.ones(7, 3), torch.tensor(2.0)
    for part in parts(X, table, factor=scalar, names=["a", "b", "c", "d"], flag=True):
        assert part.args[1] is table
        assert part.kwargs["factor"] is scalar
        assert part.kwargs["names"] == ["a", "b", "c", "d"]
        assert part.kwargs["flag"] is True


def test_another_dimension_may_be_the_batchs() -> None:
    for batch_dim in (1, -1):
        found = parts(X, batch_dim=batch_dim, k=3)
        assert torch.equal(torch.cat([p.args[0] for p in found], dim=1), X)
        assert len(found) == 3


def test_what_the_user_says_of_an_argument_counts() -> None:
    square = torch.ones(4, 4)  # as many rows as samples, by chance
    for split in ({"mask": None}, {1: None}, ["x"], [0]):
        for part in parts(X, square, split=split):
            assert part.args[1] is square
            assert len(part.args[0]) == 2
    for part in parts(X.t(), square, split={"x": 1}):
        assert part.args[0].shape == (3, 2)
        assert part.args[1].shape == (2, 4)
    lists = [torch.ones(n) for n in range(4)]
    found = parts(X, boxes=lists, split={"boxes": "items"})
    assert [len(b) for p in found for b in p.kwargs["boxes"]] == [0, 1, 2, 3]


def test_the_target_is_cut_with_the_batch() -> None:
    found = parts(X, target={"y": X + 1, "classes": torch.ones(9)})
    assert torch.equal(torch.cat([p.target["y"] for p in found]), X + 1)
    assert all(len(p.target["classes"]) == 9 for p in found)
    flat = torch.ones(12)
    with pytest.raises(InputError, match="12 entries"):
        parts(X, target=flat)
    assert all(p.target is flat for p in parts(X, target=flat, split={"target": None}))


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, "text"), {}, "no argument is a tensor"),
        ((X[:0],), {}, "empty"),
        ((X, torch.ones(5)), {"split": {"mask": 0}}, "5 entries"),
        ((X, 3), {"split": {"mask": 0}}, "no tensor there"),
        ((X,), {"split": {"weight": 0}}, "no argument of this step"),
        ((X,), {"split": "x"}, "name arguments"),
        ((X,), {"split": {"x": "rows"}}, "'items' or None"),
        ((X,), {"split": []}, "no argument is a tensor"),
        ((X, Holder(X)), {}, "not split"),
        ((X, X.numpy()), {}, "ndarray with 4 entries"),
        ((X,), {"batch_dim": "rows"}, "number of a dimension"),
    ],
)
def test_what_cannot_be_cut_says_so(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parts(*arguments, **options)


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(4, 3), torch.ones(5, 3), torch.ones(2, 3)],  # sequences of many lengths
        [{"boxes": torch.ones(n, 4)} for n in (2, 3, 2, 7)],  # what belongs to each of 4 images
    ],
)
def test_a_list_of_samples_is_not_guessed_at(value: list[Any]) -> None:
    with pytest.raises(InputError, match=r"split=\{'y': 'items'\}"):
        parts(X, y=value)
    for part in parts(X, y=value, split={"y": None}):
        assert part.kwargs["y"] is value


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with pytest.raises(InputError, match="PackedSequence"):
        parts(packed)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested", "jagged"])
def test_what_is_not_dense_is_refused_or_goes_whole(kind: str) -> None:
    value = {
        "sparse": X.to_sparse,
        "nested": lambda: torch.nested.nested_tensor([X[0, :1], *X[1:]]),
        "jagged": lambda: torch.nested.nested_tensor([X[0, :1], *X[1:]], layout=torch.jagged),
    }[kind]()
    with pytest.raises(InputError, match=rf"{len(X)} entries.*split=\{{'y': None\}}"):
        parts(X, y=value)
    assert all(part.kwargs["y"] is value for part in parts(X, y=value, split={"y": None}))


def test_an_argument_without_a_name_is_called_by_its_position() -> None:
    def forward(*arguments: Any) -> None: ...

    batch = Batch((X, X.numpy()), {})
    with pytest.raises(InputError, match=r"argument 1 holds a ndarray.*split=\{1: None\}"):
        batch_size(forward, batch, Split())
    assert batch_size(forward, batch, Split(said={1: None})) == len(X)


def test_a_target_without_the_batchs_dimension_is_refused() -> None:
    with pytest.raises(InputError, match="no entries along dimension 1"):
        parts(X.t(), batch_dim=1, target=torch.ones(4))
    cut_along = [p.target for p in parts(X.t(), batch_dim=1, target=X[:, 0], split={"target": 0})]
    assert torch.equal(torch.cat(cut_along), X[:, 0])
    assert all(p.target.dim() == 0 for p in parts(X, target=torch.tensor(1.0)))


def test_a_step_takes_batches_of_any_shape() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, batch: dict[str, Any], table: Tensor, *, pair: Any = None) -> Tensor:
            y = self.linear(batch["x"][0]) @ table
            return (y - pair.left).square().mean()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()
    table = torch.randn(3, 3)
    arguments = ({"x": [X, "text"]}, table)
    model(*arguments, pair=Pair(X + 1, None)).backward()
    want = model.linear.weight.grad.clone()
    model.zero_grad()
    optimizer = SGD(model.parameters(), lr=0.0)
    found: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(model.linear.weight.grad.clone()))
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=3)
    model.step(*arguments, pair=Pair(X + 1, None))
    assert torch.allclose(found[0], want, rtol=1e-5)
