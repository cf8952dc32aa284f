"""Sparsam trains PyTorch models on less: public names and nothing else."""

from sparsam.precision.part import Precision
from sparsam.rate import LearningRate
from sparsam.schedules import constant, cosine, cubic, limit_rate, linear, stages, warm_up
from sparsam.select import select
from sparsam.session import Part, Rewire, Session
from sparsam.sparse.adapter import apply_topology, merge_adapter
from sparsam.sparse.allocation import erdos_renyi, uniform
from sparsam.sparse.average import MovingAverage
from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.methods import DropGrow, Method, rigl, set_, static
from sparsam.sparse.part import SparseTraining
from sparsam.sparse.patterns import Block, Pattern, Unstructured
from sparsam.sparse.scores import gradient, magnitude, needs_gradient, random
from sparsam.sparse.sparsify import compact, densify, freeze, inspect, sparsify, unfreeze
from sparsam.sparse.table import LayerRow, SparsityTable
from sparsam.sparse.views import LayerView

__version__ = "0.1.0"

__all__ = [
    "ActivatedLinear",
    "Block",
    "DropGrow",
    "LayerRow",
    "LayerView",
    "LearningRate",
    "Method",
    "MovingAverage",
    "Part",
    "Pattern",
    "Precision",
    "Rewire",
    "Session",
    "SparseLinear",
    "SparseTraining",
    "SparsityTable",
    "Unstructured",
    "__version__",
    "apply_topology",
    "compact",
    "constant",
    "cosine",
    "cubic",
    "densify",
    "erdos_renyi",
    "freeze",
    "gradient",
    "inspect",
    "limit_rate",
    "linear",
    "magnitude",
    "merge_adapter",
    "needs_gradient",
    "random",
    "rigl",
    "select",
    "set_",
    "sparsify",
    "stages",
    "static",
    "uniform",
    "unfreeze",
    "warm_up",
]
