"""Records to rows: what is accepted, and that every refusal names the place and the remedy."""

import json

import pytest

from qdeepseek.data.rows import Fields, rows_from_records
from qdeepseek.data.sources import DataError, find_files, read_files

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def rows(records, **fields):
    return rows_from_records([(f"f:{n}", r) for n, r in enumerate(records, 1)], Fields(**fields), "data.path=f")


def test_text_rows_skip_blanks_and_keep_places():
    found = rows([{"text": "one"}, {"text": " \n"}, {"text": "three", "extra": 1}])
    assert [(r.where, r.text, r.messages) for r in found] == [("f:1", "one", None), ("f:3", "three", None)]


def test_messages_drop_null_keys_and_keep_others():
    found = rows([{"messages": [{**USER, "tool_calls": None}, {**ANSWER, "reasoning_content": "r"}], "text": "t"}])
    assert found[0].text is None
    assert found[0].messages == (USER, {**ANSWER, "reasoning_content": "r"})


def test_tool_calls_may_stand_without_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    found = rows([{"messages": [USER, call, {"role": "tool", "content": "1"}, ANSWER]}])
    assert found[0].messages[1] == {"role": "assistant", "tool_calls": [{"type": "function"}]}


def test_configured_names():
    assert rows([{"body": "x"}], text="body")[0].text == "x"
    assert rows([{"chat": [USER, ANSWER], "text": 3}], messages="chat")[0].messages == (USER, ANSWER)
    assert rows([{"messages": [USER, ANSWER], "text": "t"}], messages=None)[0].text == "t"
    pair = rows([{"q": "q", "a": "a", "id": 7}], prompt="q", response="a", group="id")[0]
    assert pair.messages == (USER, ANSWER) and pair.group == "7"


def test_half_configured_pair_and_nothing_configured():
    with pytest.raises(DataError, match=r"prompt_field=q and data\.response_field=None: give both"):
        Fields(prompt="q")
    with pytest.raises(DataError, match="set text_field, messages_field"):
        Fields(text=None, messages=None)


@pytest.mark.parametrize(
    "records, fields, message",
    [
        ([], {}, "data.path=f: no rows; the data set is empty"),
        ([{"text": ""}, {"text": "  "}], {}, "data.path=f: no rows"),
        ([{"body": "x"}], {}, "f:1: no field 'messages' or 'text', found 'body'; set data.text_field"),
        ([{}], {}, "f:1: no field 'messages' or 'text', found no fields"),
        ([{"text": "x"}, {"messages": [USER, ANSWER]}], {}, "f:2: no field 'text' (data.text_field), found 'messages'"),
        ([{"messages": [USER, ANSWER]}, {"text": "x"}], {}, "f:2: no field 'messages' (data.messages_field)"),
        ([{"text": "x"}, {"text": None}], {}, "f:2: no field 'text'"),
        ([{"text": "x"}, {"text": 3}], {}, "f:2: field 'text' must be a string, found int '3'"),
        ([{"text": "\ud800"}], {}, "f:1: field 'text' is not valid Unicode"),
        ([{"q": "x"}], {"prompt": "q", "response": "a"}, "f:1: no field 'a' (data.response_field), found 'q'"),
        ([{"q": "x", "a": ["y"]}], {"prompt": "q", "response": "a"}, "f:1: field 'a' must be a string, found list"),
        ([{"q": "x", "a": " "}], {"prompt": "q", "response": "a"}, "is an empty answer; remove the row"),
        ([{"text": "x"}], {"group": "id"}, "f:1: no field 'id' (data.group_field)"),
        ([{"messages": "hi"}], {}, "f:1: field 'messages' must be a list of {role, content}, found str"),
        ([{"messages": []}], {}, "f:1: field 'messages' must be a list of {role, content}, found an empty list"),
        ([{"messages": ["hi"]}], {}, "message 1 of 'messages' must be an object with role and content, found str"),
        ([{"messages": [{"from": "human", "value": "q"}]}], {}, "message 1 of 'messages' has no 'role', found 'from'"),
        ([{"messages": [USER, {"role": "bot", "content": "a"}]}], {}, "message 2 of 'messages' has unknown role 'bot'"),
        ([{"messages": [USER, {"role": ["a"], "content": "a"}]}], {}, "message 2 of 'messages' has unknown role ['a']"),
        ([{"messages": [USER, {"role": "assistant"}]}], {}, "message 2 of 'messages' has no 'content', found 'role'"),
        ([{"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]}], {}, "must be a string, found list"),
        ([{"messages": [USER, {**ANSWER, "content": ""}]}], {}, "message 2 of 'messages' is an empty answer"),
        ([{"messages": [USER]}], {}, "f:1: no message with role 'assistant'"),
        ([{"messages": [ANSWER]}], {}, "f:1: the first message has role 'assistant'"),
    ],
)  # fmt: skip
def test_refused_rows_name_place_rule_and_remedy(records, fields, message):
    with pytest.raises(DataError) as error:
        rows(records, **fields)
    assert message in str(error.value)


def test_the_line_number_of_a_file_reaches_the_message(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [{"messages": [USER, ANSWER]}] * 3 + [{"messages": [USER, {"role": "robot", "content": "a"}]}]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(DataError, match=rf"^{file}:4: message 2 of 'messages' has unknown role 'robot'"):
        rows_from_records(read_files(find_files(str(file))), Fields(), "x")
