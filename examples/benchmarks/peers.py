"""What else a user could do to fit a step: the peers the frontier is measured against.

``eager`` runs the model as it is, ``checkpoint`` puts torch.utils.checkpoint around every block,
``selective`` does the same and keeps what its policy names (all results of matrix products,
convolutions and attention, or every second of them, as torchtitan does), and ``budget 0.5`` is
torch's own activation_memory_budget partitioner at that ratio, run without inductor so that all
contenders execute the same kernels. Each peer is built on a model of its own: it changes the model
it is given.

The partitioner redraws dropout when it recomputes it, which makes its gradients wrong (see
pytorch/pytorch#190758); compare it on models without dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

__all__ = ["RATIOS", "blocks_of", "checkpoint_blocks", "checkpoint_selectively", "torch_budget"]

RATIOS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)

# The class names of the units a user would put torch.utils.checkpoint around, per model.
_BLOCK_CLASSES = {
    "GPTBlock",
    "Bottleneck",
    "DoubleConv",
    "DenseLayer",
    "MixerBlock",
    "LlamaBlock",
    "GPT2Block",
    "LlamaDecoderLayer",
    "BertLayer",
    "ViTLayer",
    "T5Block",
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated units, outermost only; ValueError where none is known."""
    blocks = [m for m in model.modules() if type(m).__name__ in _BLOCK_CLASSES]
    if not blocks:
        raise ValueError(f"no known block in {type(model).__name__}: add it to _BLOCK_CLASSES")
    return blocks


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """The same model with torch.utils.checkpoint (non-reentrant) around each of its blocks."""
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def checkpoint_selectively(model: nn.Module, every: int = 1) -> nn.Module:
    """Blocks under selective checkpoints that keep every ``every``-th result of costly operators.

    Operators are counted within a block, in the forward and again in its recomputation, so that
    both decide alike.
    """

    def contexts() -> Any:
        seen = {False: 0, True: 0}  # in the forward, in its recomputation

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator not in _COSTLY:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % every == 0
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for block in blocks_of(model):
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )
    return model


def torch_budget(model: nn.Module, ratio: float) -> Callable[..., Any]:
    """``model`` compiled with torch's budget partitioner at ``ratio`` of the saved bytes, 0 to 1.

    The no-op compiler is boxed, so that the graphs drop their inputs as they die. A model with
    BatchNorm needs the updates of its statistics kept in the graph: below ratio 1 the partitioner
    fails on the copies that otherwise follow it.
    """

    def partition(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=ratio):
            return min_cut_rematerialization_partition(*args, **kwargs)

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
        ),
    )
    return torch.compile(model, backend=backend, fullgraph=True)
