"""Options of ``optimize`` that belong to later releases: their defaults do, other values say so."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import autockpt


@pytest.mark.parametrize("options", [{"accumulate": "all"}, {"loss_fn": 3}])
def test_what_is_not_there_is_refused_and_leaves_the_model_alone(options: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    with pytest.raises(autockpt.InputError, match=next(iter(options))):
        autockpt.optimize(model, None, **options)
    assert vars(model) == before


def test_the_defaults_of_the_contract_are_taken() -> None:
    model = nn.Linear(2, 2)
    assert (
        autockpt.optimize(
            model, None, loss_fn=None, accumulate=1, inplace=True, arena=None, fullgraph=True
        )
        is model
    )
