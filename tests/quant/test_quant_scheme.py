"""QuantScheme and RangeMethod: what they accept, what they refuse and how they say it."""

import dataclasses

import pytest

from qdeepseek.quant import QuantScheme, RangeMethod


@pytest.mark.parametrize(
    "bits, grid, symmetric, expected",
    [
        (4, "full", True, (-8, 7, 7.5, 8)),
        (4, "narrow", True, (-7, 7, 7.0, 7)),
        (4, "full", False, (-8, 7, 15.0, 15)),
        (2, "full", True, (-2, 1, 1.5, 2)),
        (3, "narrow", True, (-3, 3, 3.0, 3)),
        (8, "full", True, (-128, 127, 127.5, 128)),
    ],
)
def test_grid_constants(bits, grid, symmetric, expected):
    s = QuantScheme(bits=bits, grid=grid, symmetric=symmetric)
    assert (s.qmin, s.qmax, s.divisor, s.span) == expected


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bits": 5}, "bits: 5"),
        ({"granularity": "group"}, "granularity: 'group'"),
        ({"group_size": None}, "group_size: None"),
        ({"group_size": 0}, "group_size: 0"),
        ({"grid": "half"}, "grid: 'half'"),
        ({"symmetric": False, "grid": "narrow"}, "asymmetric"),
        ({"scale_dtype": "float8"}, "scale_dtype"),
        ({"serve_dtype": "int8"}, "serve_dtype"),
    ],
)
def test_scheme_refuses(change, words):
    with pytest.raises(ValueError, match=words):
        QuantScheme(**change)


@pytest.mark.parametrize(
    "change",
    [{"kind": "max"}, {"percentile": 40}, {"iqr_factor": -1}, {"mse_grid": 0}, {"mse_min_ratio": 0},
     {"mse_norm": 0}, {"gradient": "none"}],
)  # fmt: skip
def test_method_refuses(change):
    with pytest.raises(ValueError, match=f"RangeMethod.{next(iter(change))}"):
        RangeMethod(**change)


def test_dict_round_trip_is_strict():
    scheme = QuantScheme(bits=3, granularity="per_channel", symmetric=False, serve_dtype="bfloat16")
    method = RangeMethod(kind="mse", learned=True, gradient="clipped")
    assert QuantScheme.from_dict(scheme.to_dict()) == scheme
    assert RangeMethod.from_dict(method.to_dict()) == method
    with pytest.raises(ValueError, match=r"unknown keys \['group'\]"):
        QuantScheme.from_dict({"group": 32})
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.bits = 4  # type: ignore[misc]


def test_scale_shapes():
    assert QuantScheme(group_size=32).scale_shape((8, 64)) == (8, 2)
    assert QuantScheme(group_size=32).scale_shape((3, 8, 64)) == (3, 8, 2)
    assert QuantScheme(granularity="per_channel").scale_shape((3, 8, 64)) == (3, 8, 1)
    assert QuantScheme(granularity="per_tensor").scale_shape((8, 64)) == (1, 1)
    assert QuantScheme(granularity="per_tensor").scale_shape((3, 8, 64), row_blocks=2) == (3, 2, 1)
    assert QuantScheme(granularity="per_token").scale_shape((2, 5, 64)) == (2, 5, 1)


def test_bits_per_weight():
    assert QuantScheme(group_size=32).bits_per_weight((8, 64)) == 4 + 16 / 32
    assert QuantScheme(group_size=32, symmetric=False).bits_per_weight((8, 64)) == 4 + 20 / 32
    assert QuantScheme(bits=8, granularity="per_channel", scale_dtype="float32").bits_per_weight((8, 64)) == 8.5


def test_check_shape_names_module_value_and_remedy():
    scheme = QuantScheme(group_size=128)
    scheme.check_shape((64, 256), "m")
    words = r"10944 is not a multiple of group_size 128 \(layers\.0\.down\); use group_size 64 or 32"
    with pytest.raises(ValueError, match=words):
        scheme.check_shape((2048, 10944), "layers.0.down")
    with pytest.raises(ValueError, match="use per_channel"):
        scheme.check_shape((64, 1407), "experts")
    with pytest.raises(ValueError, match="conv: shape"):
        scheme.check_shape((4,), "conv")
    with pytest.raises(ValueError, match="for activations"):
        QuantScheme(granularity="per_token").check_shape((4, 4))
