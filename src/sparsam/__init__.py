"""Sparsam trains PyTorch models on less: public names and nothing else."""

from sparsam import formats
from sparsam.comm import codecs
from sparsam.comm.balance import Balance, batch_shares
from sparsam.comm.federated import LocalSteps
from sparsam.comm.part import Compression
from sparsam.comm.pipeline import Pipeline
from sparsam.compress.aware import QuantisationAware
from sparsam.compress.calibration import calibrate
from sparsam.compress.distil import Distillation
from sparsam.compress.layers import GroupQuantisedLinear, QuantisedLinear, QuantisedSparseLinear
from sparsam.compress.prune import prune, prune_in_rounds
from sparsam.compress.quantise import quantise
from sparsam.compress.recalibrate import recalibrate_norms
from sparsam.compress.second_order import SecondOrder
from sparsam.compress.structure import NeuronRow, remove_neurons
from sparsam.compress.teaching import soft_target_loss
from sparsam.deploy.storage import load, save
from sparsam.memory.meter import MemoryMeter
from sparsam.memory.offload import Offload
from sparsam.memory.recompute import Recompute
from sparsam.precision.adaptive import Adaptive
from sparsam.precision.part import Precision
from sparsam.precision.policies import Policy
from sparsam.precision.progressive import Progressive
from sparsam.precision.rules import Rules
from sparsam.precision.scaler import LossScaler
from sparsam.precision.weights import BF16Weights
from sparsam.rate import LearningRate
from sparsam.schedules import constant, cosine, cubic, limit_rate, linear, stages, warm_up
from sparsam.select import select
from sparsam.session import Part, Rewire, Session
from sparsam.shard_checkpoint import load_shards, match_slots, save_shards
from sparsam.sparse.adapter import apply_topology, merge_adapter
from sparsam.sparse.allocation import by_sensitivity, erdos_renyi, global_, uniform
from sparsam.sparse.average import MovingAverage
from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.methods import DropGrow, Method, Resize, Then
from sparsam.sparse.part import SparseTraining
from sparsam.sparse.patterns import NM, Block, Neuron, Pattern, Unstructured
from sparsam.sparse.penalty import L1, L2
from sparsam.sparse.published import ac_dc, gmp, granet, rigl, set_, sr_ste, static, taylor_pruning
from sparsam.sparse.recovery import recovery, recovery_rate
from sparsam.sparse.scores import (
    Accumulator,
    accumulates,
    fisher,
    gradient,
    magnitude,
    mest,
    momentum,
    movement,
    needs_gradient,
    random,
    taylor,
)
from sparsam.sparse.sparsify import compact, densify, freeze, inspect, sparsify, unfreeze
from sparsam.sparse.table import LayerRow, SparsityTable
from sparsam.sparse.views import LayerView

__version__ = "0.1.0"

__all__ = [
    "L1",
    "L2",
    "NM",
    "Accumulator",
    "ActivatedLinear",
    "Adaptive",
    "BF16Weights",
    "Balance",
    "Block",
    "Compression",
    "Distillation",
    "DropGrow",
    "GroupQuantisedLinear",
    "LayerRow",
    "LayerView",
    "LearningRate",
    "LocalSteps",
    "LossScaler",
    "MemoryMeter",
    "Method",
    "MovingAverage",
    "Neuron",
    "NeuronRow",
    "Offload",
    "Part",
    "Pattern",
    "Pipeline",
    "Policy",
    "Precision",
    "Progressive",
    "QuantisationAware",
    "QuantisedLinear",
    "QuantisedSparseLinear",
    "Recompute",
    "Resize",
    "Rewire",
    "Rules",
    "SecondOrder",
    "Session",
    "SparseLinear",
    "SparseTraining",
    "SparsityTable",
    "Then",
    "Unstructured",
    "__version__",
    "ac_dc",
    "accumulates",
    "apply_topology",
    "batch_shares",
    "by_sensitivity",
    "calibrate",
    "codecs",
    "compact",
    "constant",
    "cosine",
    "cubic",
    "densify",
    "erdos_renyi",
    "fisher",
    "formats",
    "freeze",
    "global_",
    "gmp",
    "gradient",
    "granet",
    "inspect",
    "limit_rate",
    "linear",
    "load",
    "load_shards",
    "magnitude",
    "match_slots",
    "merge_adapter",
    "mest",
    "momentum",
    "movement",
    "needs_gradient",
    "prune",
    "prune_in_rounds",
    "quantise",
    "random",
    "recalibrate_norms",
    "recovery",
    "recovery_rate",
    "remove_neurons",
    "rigl",
    "save",
    "save_shards",
    "select",
    "set_",
    "soft_target_loss",
    "sparsify",
    "sr_ste",
    "stages",
    "static",
    "taylor",
    "taylor_pruning",
    "unfreeze",
    "uniform",
    "warm_up",
]
