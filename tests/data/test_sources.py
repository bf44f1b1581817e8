"""Files and `datasets` names to records, and every message about what cannot be read."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qdeepseek.data.sources import DataError, find_files, read_dataset, read_files

ROWS = [{"text": "one"}, {"text": "zwei ü"}, {"text": "three"}]


def records(path):
    return list(read_files(find_files(str(path))))


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def test_jsonl_places_are_lines_and_blank_lines_count(tmp_path):
    file = write(tmp_path / "a.jsonl", "\ufeff" + jsonl(ROWS[:1]) + "\r\n \n" + jsonl(ROWS[1:]).rstrip("\n"))
    assert records(file) == [(f"{file}:1", ROWS[0]), (f"{file}:4", ROWS[1]), (f"{file}:5", ROWS[2])]


def test_gzipped_jsonl_reads_the_same(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write(jsonl(ROWS))
    assert [row for _, row in records(file)] == ROWS


@pytest.mark.parametrize(
    "content, lines",
    [
        (json.dumps(ROWS, ensure_ascii=False), [1, 1, 1]),
        (json.dumps(ROWS, indent=1, ensure_ascii=False), [2, 5, 8]),
        (jsonl(ROWS), [1, 2, 3]),
        ("\n".join(json.dumps(r, indent=1) for r in ROWS), [1, 4, 7]),
    ],
    ids=["array", "pretty array", "lines", "pretty objects"],
)
def test_json_places_are_the_line_of_the_row(tmp_path, content, lines):
    file = write(tmp_path / "a.json", content)
    assert records(file) == [(f"{file}:{line}", row) for line, row in zip(lines, ROWS)]


def test_parquet_rows_are_counted_from_one(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    assert records(file) == [(f"{file}: row {n}", row) for n, row in enumerate(ROWS, 1)]


def test_parquet_keeps_chat_messages(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    assert records(tmp_path / "a.parquet")[0][1] == {"messages": messages}


def test_folder_glob_and_list_read_each_file_once_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    a, b = write(tmp_path / "a.jsonl", jsonl(ROWS)), write(tmp_path / "sub" / "b.json", jsonl(ROWS))
    write(tmp_path / "README.md", "not data")
    write(tmp_path / ".hidden.jsonl", "not data")
    assert find_files(str(tmp_path)) == [a, b]
    assert find_files(f"{tmp_path}/**/*.json*") == [a, b]
    assert find_files([str(b), str(tmp_path)]) == [b, a]


@pytest.mark.parametrize("name", ["none.jsonl", "none/", "*.jsonl"])
def test_missing_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="no such file, folder or glob match") as error:
        find_files(f"{tmp_path}/{name}")
    assert name.rstrip("/") in str(error.value)


def test_unknown_kind_and_folder_without_data(tmp_path):
    write(tmp_path / "a.csv", "text\n")
    with pytest.raises(DataError, match=r"a\.csv: unknown kind of file.*\.parquet"):
        find_files(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"no \.jsonl.* file in this folder"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    "name, content, place, detail",
    [
        ("a.jsonl", '{"text": "x"}\n{"text": "y"\n', ":2: invalid JSON", "delimiter"),
        ("a.jsonl", '{"text": "x"}\n["y"]\n', ":2: a row must be a JSON object", "found list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ":2: invalid JSON", "utf-8"),
        ("a.json", '[\n{"text": "x"},\n{"text": y}\n]', ":3: invalid JSON", "Expecting value"),
        ("a.json", '[\n{"text": "x"}\n{"text": "y"}]', ":3: invalid JSON", "',' or ']' expected"),
        ("a.json", '[{"text": "x"},\n{"text": "y"},\n', ":3: invalid JSON", "not closed"),
        ("a.json", '[{"text": "x"},\n{"text": "y"}\n', ":3: invalid JSON", "',' or ']' expected"),
        ("a.json", '[{"text": "x"}]\n, 3', ":1: invalid JSON", "after the array"),
        ("a.json", '[{"text": "x"},\n3]', ":2: a row must be a JSON object", "found int"),
        ("a.json", b'[{"text": "x"},\n{"text": "\xff"}]', ":2: invalid JSON", "utf-8"),
    ],
)
def test_broken_json_names_file_and_line(tmp_path, name, content, place, detail):
    file = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        records(file)
    assert str(error.value).startswith(f"{file}{place}") and detail in str(error.value)


def test_broken_parquet_is_named(tmp_path):
    file = write(tmp_path / "a.parquet", b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        records(file)


def test_dataset_by_name_with_split(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    write(tmp_path / "train.jsonl", jsonl(ROWS))
    write(tmp_path / "test.jsonl", jsonl(ROWS[:1]))
    assert [r for _, r in read_dataset(str(tmp_path), split="train")] == ROWS
    assert list(read_dataset(str(tmp_path), split="test")) == [(f"{tmp_path}[test] row 1", ROWS[0])]
    with pytest.raises(DataError, match=r"split 'validation' cannot be loaded.*data\.split"):
        list(read_dataset(str(tmp_path), split="validation"))
    with pytest.raises(DataError, match=r"nonesuch\), split 'train' cannot be loaded.*data\.config_name"):
        list(read_dataset(str(tmp_path), config="nonesuch"))


def test_dataset_saved_to_disk(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "both")
    assert [r for _, r in read_dataset(str(tmp_path / "one"))] == ROWS
    assert [r for _, r in read_dataset(str(tmp_path / "both"), split="test")] == ROWS[:1]


def test_dataset_that_cannot_be_reached_says_so():
    with pytest.raises(DataError) as error:
        list(read_dataset("someone/no-such-dataset"))
    message = str(error.value)
    assert message.startswith("dataset someone/no-such-dataset cannot be loaded")
    assert "not in the local cache" in message and "data.path" in message
