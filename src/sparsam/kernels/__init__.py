"""The only place that knows about instruction sets: block-sparse, attention and norm kernels behind torch operators."""

from sparsam.kernels.attention import attention, self_attention
from sparsam.kernels.cpu import scratch_bytes
from sparsam.kernels.index import BlockIndex, blocks_from_dense, build_index, dense_from_blocks
from sparsam.kernels.norm import add_layer_norm
from sparsam.kernels.ops import backend, block_linear
from sparsam.kernels.packed import pack

__all__ = [
    "BlockIndex",
    "add_layer_norm",
    "attention",
    "backend",
    "block_linear",
    "blocks_from_dense",
    "build_index",
    "dense_from_blocks",
    "pack",
    "scratch_bytes",
    "self_attention",
]
