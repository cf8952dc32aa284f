"""Gradients on the wire between ranks: the codec, and whether it is used where it does not pay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from sparsam.comm.codecs import BF16, Codec, Identity, Int8Rows, TopK
from sparsam.comm.part import Compression
from sparsam.recipe.section import Strict, Typed, typed

__all__ = ["AnyCodec", "CompressionSection"]


class IdentityCodec(Typed):
    """float32 as it is."""

    type: Literal["identity"] = "identity"

    def build(self) -> Codec:
        return Identity()


class BF16Codec(Typed):
    """Half of the bytes."""

    type: Literal["bf16"] = "bf16"

    def build(self) -> Codec:
        return BF16()


class Int8Codec(Typed):
    """A quarter of the bytes, in two steps."""

    type: Literal["int8"] = "int8"
    row: int = Field(512, ge=1)

    def build(self) -> Codec:
        return Int8Rows(self.row)


class TopKCodec(Typed):
    """The most important values, or runs of them."""

    type: Literal["topk"] = "topk"
    share: float = Field(0.01, gt=0, le=1)
    importance: Literal["gradient", "taylor"] = "gradient"
    block: int = Field(1, ge=1)
    values: Literal["identity", "bf16", "int8"] = "identity"
    agreed: bool = False

    def build(self) -> Codec:
        values = {"identity": Identity(), "bf16": BF16(), "int8": Int8Rows()}[self.values]
        return TopK(self.share, self.importance, self.block, values, self.agreed)


AnyCodec = Annotated[
    Annotated[IdentityCodec, Tag("identity")]
    | Annotated[BF16Codec, Tag("bf16")]
    | Annotated[Int8Codec, Tag("int8")]
    | Annotated[TopKCodec, Tag("topk")],
    typed("int8"),
    BeforeValidator(lambda given: {"type": given} if isinstance(given, str) else given),
]


class CompressionSection(Strict):
    """Compressed gradients with error feedback; on one rank nothing is sent, and it does nothing."""

    codec: AnyCodec = Int8Codec()
    when: Literal["measured", "always"] = "measured"
    ranks_per_node: int | Literal["torchrun"] | None = None

    def build(self) -> Compression:
        return Compression(self.codec.build(), self.when, ranks_per_node=self.ranks_per_node)
