"""Decoder layers under few names: one a layer, or a block of neighbours where there are more than `MOST`.

    61 layers   layer_0 … layer_60          80 layers   layers_0-1, layers_2-3, … layers_78-79

What lies in no layer (embedding, last norm, head) is `rest`.
"""

from qdeepseek.routing.routers import layer_number

MOST = 64
REST = "rest"


def layer_of(name: str) -> int | None:
    """Index of the decoder layer of a parameter or module; None outside of the layers."""
    try:
        return layer_number(name)
    except ValueError:
        return None


def block_names(layers: int, most: int = MOST) -> list[str]:
    """Name of every layer's block, `layers` of them; at most `most` different ones."""
    size = max(1, -(-layers // most))
    if size == 1:
        return [f"layer_{i}" for i in range(layers)]
    firsts = [i // size * size for i in range(layers)]
    return [f"layers_{first}-{min(layers, first + size) - 1}" for first in firsts]
