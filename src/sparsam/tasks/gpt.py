"""A small GPT: pre-LayerNorm, learned positions, every linear layer one that can be made sparse and fused."""

from __future__ import annotations

from torch import Tensor, nn

from sparsam.kernels.attention import self_attention
from sparsam.kernels.norm import add_layer_norm
from sparsam.sparse.layers import ActivatedLinear

__all__ = ["GPT"]


class GPT(nn.Module):
    """A decoder over `vocabulary` tokens.

    Args:
        layers: transformer blocks.
        width: features of the residual stream.
        heads: attention heads; divides width.
        context: the longest sequence.
        vocabulary: number of tokens; 256 is bytes.
        activation: of the MLP, by the names that `ActivatedLinear` knows.

    Shape letters: B sequences, T tokens, D width, H heads.

    Raises:
        ValueError: heads does not divide width.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 512,
        heads: int = 8,
        context: int = 256,
        vocabulary: int = 256,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"expected heads that divide width, got {heads} heads for width {width}. Change one of them."
            )
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, activation) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, T) -> logits (B, T, vocabulary).

        Raises:
            ValueError: T is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"expected at most {self.context} tokens in a sequence, got {length}. Build the model for a longer one."
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        branch = None
        for block in self.blocks:
            x, branch = block(x, branch)
        _, normed = _add_norm(x, branch, self.norm)
        return self.head(normed)  # type: ignore[no-any-return]

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What writes to the residual stream starts smaller, so that its size does not grow with depth (GPT-2).
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), all (B, T, D).

    What a branch gives is added where the stream is next normalised, in one pass: in the next block, or after it.
    """

    def __init__(self, width: int, heads: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = ActivatedLinear(width, 4 * width, activation=activation)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream and the branch not yet added to it (None: there is none) -> the same after this block."""
        batch, length, width = x.shape
        x, normed = _add_norm(x, branch, self.attention_norm)
        qkv = self.qkv(normed).view(batch, length, 3, self.heads, width // self.heads)
        x, normed = _add_norm(x, self.out(self_attention(qkv).reshape(batch, length, width)), self.mlp_norm)
        return x, self.down(self.up(normed))


def _add_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return add_layer_norm(x, branch, norm.weight, norm.bias, norm.eps)
