"""What may be written in place on a CUDA device gives the same bits there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autockpt.arena import OUT
from autockpt.inplace import FORMS
from test_inplace import arguments

pytestmark = pytest.mark.gpu


def on_the_device(target: Any, dtype: torch.dtype) -> list[Any]:
    args = arguments(target, dtype, turned=False)
    return [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", FORMS, ids=str)
def test_an_operator_gives_the_same_bits_over_its_argument(target: Any, dtype: torch.dtype) -> None:
    form = FORMS[target]
    for position in form.over:
        expected = target(*on_the_device(target, dtype))
        args = on_the_device(target, dtype)
        kwargs = {form.keyword: args[position]} if form.keyword else {}
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = form.target(*args, **kwargs)
        assert torch.cuda.max_memory_allocated() - before <= 512, "it allocates"
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("target", [t for t in OUT if t in FORMS], ids=str)
def test_an_operator_gives_the_same_bits_in_its_place(target: Any) -> None:
    args = on_the_device(target, torch.float32)
    expected = target(*args)
    form, keyword = OUT[target]
    place = torch.empty_like(expected)
    form(*args, **{keyword: place})
    assert torch.equal(place, expected)
