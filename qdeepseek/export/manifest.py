"""`qdeepseek_manifest.json`: what an export is, enough to load and to prove it without the training run.

    schemes   id -> weight and input scheme            tensors  parameter -> id of its scheme, null if kept
    files     name -> SHA-256 and bytes, every file of the folder but this one
    kv_cache  formats of the cache it was trained with, null for 16 bits; config.json can say few of them
    coverage, versions, commit, data_hash, source_model, recipe, dtype

Parameters are the model's names (fused experts are one parameter), as in the coverage report and in the quantiser
state. No time stamp: the same model exports to the same bytes.
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qdeepseek.export.names import LAYOUTS, Layout, layout_of
from qdeepseek.export.quantization_config import ModuleFormat
from qdeepseek.export.writer import MANIFEST, WrittenFile
from qdeepseek.quant import QuantScheme
from qdeepseek.quant.kv_cache import KVCacheScheme

FORMAT_VERSION = 1
PACKAGES = ("qdeepseek", "torch", "transformers", "compressed-tensors", "safetensors")


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest."""

    formats: Mapping[str, ModuleFormat | None]  # parameter -> format, None where it is kept
    layout: Layout
    dtype: str
    files: Mapping[str, WrittenFile]
    kv_cache: KVCacheScheme | None
    raw: Mapping[str, Any]


def build(
    *,
    model_type: str,
    dtype: str,
    formats: Mapping[str, ModuleFormat | None],
    files: Mapping[str, WrittenFile],
    coverage: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    source_model: str | None,
    data_hash: str | None,
    copied: list[str],
    kv_cache: KVCacheScheme | None = None,
    latent: bool = False,
) -> dict[str, Any]:
    """The manifest as JSON. `copied` lists tensors of the source checkpoint that the model does not have.

    kv_cache, latent  trained formats of the cache, and whether the model caches a latent (MLA)
    """
    distinct = list(dict.fromkeys(f for f in formats.values() if f is not None))
    ids = {module_format: f"scheme_{number}" for number, module_format in enumerate(distinct)}
    return {
        "format": "compressed-tensors pack-quantized",
        "format_version": FORMAT_VERSION,
        "model_type": model_type,
        "dtype": dtype,
        "source_model": source_model,
        "data_hash": data_hash,
        "commit": git_commit(),
        "versions": versions(),
        "coverage": dict(coverage),
        "recipe": recipe,
        "schemes": {ids[f]: _scheme(f) for f in distinct},
        "tensors": {name: None if f is None else ids[f] for name, f in formats.items()},
        "kv_cache": None if kv_cache is None else {**kv_cache.to_dict(), "latent": latent},
        "copied_from_source": copied,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }


def read(folder: Path) -> Manifest:
    """Parses the manifest of an export; raises FileNotFoundError or ValueError that says what is wrong with it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: it is no export of this project; load it with transformers instead"
        )
    try:
        raw = json.loads(path.read_text())
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {raw['format_version']}, this code reads {FORMAT_VERSION}")
        schemes = {key: _module_format(entry) for key, entry in raw["schemes"].items()}
        return Manifest(
            formats={name: None if key is None else schemes[key] for name, key in raw["tensors"].items()},
            layout=layout_of(raw["model_type"], fused=raw["model_type"] in LAYOUTS),
            dtype=raw["dtype"],
            files={name: WrittenFile(**entry) for name, entry in raw["files"].items()},
            kv_cache=_kv_cache(raw.get("kv_cache")),
            raw=raw,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error


def _kv_cache(entry: Mapping[str, Any] | None) -> KVCacheScheme | None:
    if entry is None:
        return None
    return KVCacheScheme.from_dict({key: value for key, value in entry.items() if key != "latent"})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what an export is."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, with `+changes` if files differ; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        tracked = _git(folder, "ls-files", "--", Path(__file__).name)
        if not tracked:  # the package lies in an environment inside somebody else's checkout
            return None
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _scheme(module_format: ModuleFormat) -> dict[str, Any]:
    return {
        "weight": module_format.weight.to_dict(),
        "input": module_format.input.to_dict() if module_format.input else None,
        "is_linear": module_format.is_linear,
    }


def _module_format(entry: Mapping[str, Any]) -> ModuleFormat:
    activation = entry["input"]
    return ModuleFormat(
        QuantScheme.from_dict(entry["weight"]),
        QuantScheme.from_dict(activation) if activation else None,
        entry["is_linear"],
    )
