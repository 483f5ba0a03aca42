"""Training loops of others train an optimised model, unchanged otherwise, to equal losses."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(64, (24,), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


def under_a_budget(percent: int) -> nn.Module:
    """The model, under a part of the activations of a step on four rows."""
    batch = stacked(rows(4))
    plan = autockpt.plan(gpt2(), (), None, example_kwargs=batch)
    resident = plan.problem.resident_bytes
    budget = resident + (plan.baseline_peak_bytes - resident) * percent // 100
    return autockpt.optimize(gpt2(), budget, time_limit=1)


def by_trainer(model: nn.Module, folder: Path) -> list[Any]:
    """Losses of each step, an evaluation's loss, and generated tokens."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,  # 4, 4 and 2 rows
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(10), eval_dataset=rows(4), data_collator=stacked
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    trainer.save_model(str(folder / "saved"))
    again = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved")
    prompt = rows(1)[0]["input_ids"][None, :4]
    mask = torch.ones_like(prompt)
    tokens = [
        one.eval().generate(
            prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        for one in (model, again)
    ]
    model.train()
    return [*losses, *(one.tolist() for one in tokens)]


def by_fabric(model: nn.Module, folder: Path) -> list[Any]:
    fabric_of = pytest.importorskip("lightning_fabric").Fabric
    fabric = fabric_of(accelerator="cpu", devices=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = fabric.setup(model, optimizer)
    samples = rows(10)
    torch.manual_seed(0)
    losses = []
    for _ in range(2):
        for first in (0, 4, 8):
            loss = wrapped(**stacked(samples[first : first + 4])).loss
            fabric.backward(loss)
            fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    fabric.save(folder / "state.ckpt", {"model": wrapped, "optimizer": optimizer})
    fabric.load(folder / "state.ckpt", {"model": wrapped, "optimizer": optimizer})
    with torch.no_grad():
        losses.append(wrapped(**stacked(samples[:2])).loss.item())
    return losses


@pytest.mark.parametrize("train", [by_trainer, by_fabric], ids=["transformers", "fabric"])
def test_an_optimised_model_trains_as_before(train: Any, tmp_path: Path) -> None:
    if train is by_trainer:
        pytest.importorskip("accelerate")
    expected = train(gpt2(), tmp_path / "plain")
    model = under_a_budget(70)
    found = train(model, tmp_path / "optimised")
    assert found == expected
    assert len(set(map(str, expected))) > 6
    assert model.plan.origin["captures"] == "2 of at most 64"  # four rows, and the last two
    assert autockpt.restore(model) is model
    gc.collect()
