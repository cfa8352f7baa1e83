"""What a row of a family's table says about one tensor of the trainer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from moebius.models.shape import ModelShape


class Cut(Enum):
    """How tensor parallelism divides a weight."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Weight:
    """One trainer tensor and its names elsewhere.

    Attributes:
        trainer: name in the mcore GPTModel, with the layer's global number.
        hf: names of the parts in the Hugging Face checkpoint, in fusing order.
        engine: name in vLLM's model.
        cut: how tensor parallelism divides it: all parts alike, by rows (column-parallel layers, embedding, head), by
            columns (row-parallel layers), or not at all.
        rows: rows of each Hugging Face part (unpadded, uncut).
        columns: columns of each part; None for vectors.
        padded: rows are padded to a multiple of 64 at the end (embedding and head).
        heads: parts are q, k, v heads.
        layer: global layer number, None outside the layers.
    """

    trainer: str
    hf: tuple[str, ...]
    engine: str
    cut: Cut
    rows: tuple[int, ...]
    columns: int | None = None
    padded: bool = False
    heads: bool = False
    layer: int | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the Hugging Face parts together."""
        return sum(self.rows) * (self.columns or 1)

    def bias(self) -> "Weight":
        """The bias beside this `.weight`: cut as its rows are; whole where the weight is cut by columns."""
        trainer, *rest = (name.removesuffix("weight") + "bias" for name in (self.trainer, self.engine, *self.hf))
        cut = Cut.ROWS if self.cut is Cut.ROWS else Cut.WHOLE
        return replace(self, trainer=trainer, engine=rest[0], hf=tuple(rest[1:]), cut=cut, columns=None)


class Family(NamedTuple):
    """How models of one `model_type` are read.

    Attributes:
        architecture: the only class in config.json's `architectures`.
        sizes: fields that config.json must have.
        fields: further fields that `shape` understands.
        fixed: fields with the values for which the arithmetic is the trainer's.
        shape: from config.json, completed with the family's defaults, to a ModelShape.
        weights: the family's table.
    """

    architecture: str
    sizes: frozenset[str]
    fields: frozenset[str]
    fixed: dict[str, tuple[object, ...]]
    shape: Callable[[dict[str, Any]], ModelShape]
    weights: Callable[[ModelShape], list[Weight]]


def in_layers(
    shape: ModelShape, layer: Iterable[Weight], trainer: str, hf: str, engine: str | None = None
) -> list[Weight]:
    """The rows of one layer, named without their prefixes, for every layer.

    Args:
        trainer, hf, engine: prefixes with `{}` in the layer number's place; engine None is the same as hf.
    """
    rows: Sequence[Weight] = list(layer)
    found = []
    for number in range(shape.num_layers):
        for row in rows:
            found.append(
                replace(
                    row,
                    trainer=trainer.format(number) + row.trainer,
                    hf=tuple(hf.format(number) + part for part in row.hf),
                    engine=(engine or hf).format(number) + row.engine,
                    layer=number,
                )
            )
    return found
