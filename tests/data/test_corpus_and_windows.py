"""The embedded corpus, the byte tokenizer, windows and the resumable order."""

import json

import pytest
import torch

from qdeepseek.data.corpus import corpus_hash, part_of, stdlib_documents
from qdeepseek.data.order import ResumableBatches
from qdeepseek.data.tokenizer import SPECIAL_TOKENS, byte_tokenizer
from qdeepseek.data.windows import TokenWindows, join_documents


def test_parts_follow_from_the_path_alone(tmp_path):
    for i in range(150):
        (tmp_path / f"m{i}.py").write_text(f"x = {i}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("x = 1\n")
    first = stdlib_documents(tmp_path)
    (tmp_path / "m0.py").write_text("another content\n")
    second = stdlib_documents(tmp_path)
    assert [(d.path, d.part) for d in first] == [(d.path, d.part) for d in second]
    assert len(first) == 150 and corpus_hash(first) != corpus_hash(second)
    assert part_of("heapq.py") == part_of("heapq.py") and {d.part for d in first} == {"train", "select", "report"}


def test_a_python_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="0 standard-library sources found, at least 100 are needed"):
        stdlib_documents(tmp_path)


def test_byte_tokenizer_round_trips_and_knows_the_special_tokens():
    tokenizer, text = byte_tokenizer(), "héllo\n\t  wörld <｜User｜>hi \u200b🙂"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(256 + SPECIAL_TOKENS.index("<｜User｜>")) == 1
    assert tokenizer.encode(bytes(range(128)).decode(), add_special_tokens=False).ids == list(range(128))


def test_windows_cover_every_token_once_without_overlap():
    tokens = join_documents(["abc", "de"], lambda t: t.encode(), 256, 257)
    assert tokens.tolist() == [256, 97, 98, 99, 257, 256, 100, 101, 257]
    windows = TokenWindows(tokens, 3)
    assert [windows[i]["input_ids"].tolist() for i in range(len(windows))] == tokens.view(3, 3).tolist()
    assert len(TokenWindows(tokens, 3, 2)) == 4
    with pytest.raises(ValueError, match="9 tokens, fewer than one window of 10"):
        TokenWindows(tokens, 10)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_order_shows_everything_once_an_epoch_and_resumes_anywhere(world):
    ranks = [ResumableBatches(10, 2, seed=3, rank=r, world=world) for r in range(world)]
    seen = [i for n in range(5 * 6) for rank in ranks for i in rank.batch(n)]
    epochs = [seen[i : i + 10] for i in range(0, len(seen) - 9, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    whole = iter(ranks[0])
    first = [next(whole) for _ in range(9)]
    resumed = iter(ResumableBatches(10, 2, seed=3, rank=0, world=world, start=4))
    assert [next(resumed) for _ in range(5)] == first[4:]


def test_shipped_model_states_where_it_comes_from():
    from qdeepseek.train.models import TINY

    facts = json.loads((TINY / "pretraining.json").read_text())
    assert {"tokens", "tokens_per_parameter", "select_loss", "seed", "commit", "corpus"} <= set(facts)
    assert (TINY / "README.md").is_file()
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 10_000_000
    assert torch.isfinite(torch.tensor(facts["select_loss"]))
