"""Texts that are held to a grammar, and grammars that are refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvtier import InvalidRequest
from runner import SamplingParams, needle
from runner.errors import GrammarFailed, MissingPackage
from runner.sampling.draw import SamplingState
from runner.sampling.grammars import matching, structured
from runner.sampling.grammars.matching import Matcher
from runner.sampling.grammars.structured import GrammarCompiler
from runner.sampling.grammars.structured_outputs import StructuredOutputs
from served.drawing import Drawing, choose

PADDING = 9
"""Logits beyond the tokenizer's vocabulary."""

WORDS = ["true", "null", ', "', '": ', '{"', '"}', "12", "ab", " b", "é", "日本"]
EOS = 256 + len(WORDS)


def byte_level() -> Any:
    """All bytes, some words, and special tokens whose text would fit many a grammar."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(piece for piece, _ in pre.pre_tokenize_str(word)) for word in WORDS]
    whole = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words])}, []))
    whole.pre_tokenizer, whole.decoder = pre, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole)
    tokenizer.add_special_tokens({"eos_token": "<eos>", "bos_token": "0"})
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    assert tokenizer.eos_token_id == EOS
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + PADDING, [EOS, 10**6])
    yield compiler
    compiler.close()


def texts(
    tokenizer: Any, matchers: Sequence[Matcher], width: int, eos: int, steps: int = 300, **params: Any
) -> list[tuple[str, bool]]:
    """What random logits come to, all in one batch beside a row without a grammar, and whether EOS has come."""
    likely = [token for text, token in tokenizer.get_vocab().items() if text in ('"', "]", "}", "1", '"}')] + [eos]
    biases = dict.fromkeys(likely, 4.0)
    some = StructuredOutputs(json_object=True)
    options = {"max_tokens": steps, "logit_bias": biases, "structured_outputs": some, **params}
    states = [
        SamplingState.of(SamplingParams(seed=i, **options), (), [eos], matcher) for i, matcher in enumerate(matchers)
    ]
    free = SamplingState.of(SamplingParams(seed=99), (), [eos])
    generator, drawing = torch.Generator().manual_seed(0), Drawing()
    answers: dict[SamplingState, list[int]] = {state: [] for state in states}
    live = list(states)
    for _ in range(steps):
        logits = 2 * torch.randn(len(live) + 1, width, generator=generator)
        chosen = drawing.choose(logits, [*live, free])
        assert chosen.sound.all()
        for state, token in zip(live, chosen.ids.tolist(), strict=False):
            drawing.take(state, token)
            assert state.error is None
            answers[state].append(token)
        live = [state for state in live if answers[state][-1] != eos]
        if not live:
            break
    return [(tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == eos) for ids in answers.values()]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["é", 'q"', None, 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/flag"}]},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
}


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    inner = value.pop("inner", None)
    return (
        sorted(value) == ["kind", "name", "sizes"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ("é", 'q"', None, 3)
        and len(value["sizes"]) <= 3
        and all(isinstance(x, int) and -5 <= x <= 120 for x in value["sizes"])
        and (inner is None or (list(inner) == ["on"] and isinstance(inner["on"], bool)))
    )


CHOICES = ['a"b', "a\\b", "a\nb", "日本語", "\U0001f600", "a", "ab"]
REGEX = r"[a-f]{2,4}(-\d+)?\.(é|日本)"
EBNF = 'root ::= item (", " item)*\nitem ::= [0-9]+ | "[" root "]"'


@pytest.mark.parametrize(
    ("outputs", "good"),
    [
        (StructuredOutputs(json=SCHEMA), follows_schema),
        (StructuredOutputs(json=json.dumps(SCHEMA)), follows_schema),
        (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
        (StructuredOutputs(regex=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
        (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
        (StructuredOutputs(grammar=EBNF), lambda text: isinstance(json.loads(f"[{text}]".replace("[0", "[1")), list)),
    ],
    ids=["schema", "schema as text", "json_object", "regex", "choice", "grammar"],
)
def test_random_logits_write_what_was_asked_for(
    tokenizer: Any, compiler: GrammarCompiler, outputs: StructuredOutputs, good: Any
) -> None:
    grammar = compiler.compile(outputs)
    found = texts(tokenizer, [grammar.matcher() for _ in range(12)], len(tokenizer) + PADDING, EOS)
    whole = [text for text, is_complete in found if is_complete]
    assert len(whole) >= 8 and len(set(whole)) > 2
    for text in whole:
        assert good(text), text


def test_the_bundled_model_writes_its_words_with_spaces_between_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(needle.weights_path())
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    for outputs in (StructuredOutputs(regex=r"(\d ){1,3}-> K[12]"), StructuredOutputs(choice=["page 7", "K1 K2", "?"])):
        matchers = [compiler.compile(outputs).matcher() for _ in range(10)]
        for text, is_complete in texts(tokenizer, matchers, len(tokenizer), tokenizer.eos_token_id, steps=12):
            assert is_complete
            assert text in outputs.choice if outputs.choice else re.fullmatch(outputs.regex or "", text)
    with pytest.raises(InvalidRequest, match="no token of this model begins such a text"):
        compiler.compile(StructuredOutputs(json_object=True))


def test_a_text_grows_to_min_tokens_as_far_as_its_grammar_lets_it(tokenizer: Any, compiler: GrammarCompiler) -> None:
    grown = compiler.compile(StructuredOutputs(regex="[ab]{1,30}"))
    fixed = compiler.compile(StructuredOutputs(regex="xyz"))
    found = texts(tokenizer, [grown.matcher(), fixed.matcher()], len(tokenizer) + PADDING, EOS, min_tokens=8)
    assert found[1] == ("xyz", True)
    assert len(tokenizer.encode(found[0][0])) >= 8 and found[0][1]


def test_a_grammar_that_fails_ends_its_own_row(
    tokenizer: Any, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, width = compiler.compile(StructuredOutputs(regex="[ab]+")), len(tokenizer) + PADDING
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="[ab]+"))
    states = [SamplingState.of(params, (), [EOS], grammar.matcher()) for _ in range(5)]
    good, rejected, ended, broken, slow = states
    a, z = (tokenizer.get_vocab()[letter] for letter in "az")
    rejected.take(z)
    for token in (a, EOS, a):
        ended.take(token)

    def fails(*_: Any) -> None:
        raise RuntimeError("[12:00:00] /project/x.cc:7: Check failed: (ok) is false: it broke")

    assert broken.matcher is not None and slow.matcher is not None
    slow.matcher.meter.charge(matching.SLOW_S * 2)
    monkeypatch.setattr(broken.matcher.inner, "fill_next_token_bitmask", fails)
    monkeypatch.setattr("xgrammar.BatchGrammarMatcher.batch_fill_next_token_bitmask", fails)
    chosen = choose(torch.zeros(5, width), states)
    assert chosen.sound.tolist() == [True, False, False, False, False]
    assert chosen.ids[0] in (a, tokenizer.get_vocab()["b"], tokenizer.get_vocab()["ab"])
    reasons = ["does not allow token", "is complete", "failed: it broke$", "took 1.0 s for one token of its answers"]
    for row, reason in enumerate(reasons, start=1):
        error = chosen.why(row, "float32")
        assert isinstance(error, GrammarFailed) and re.search(reason, str(error)), error
    good.take(a)
    assert good.error is None


class Slow:
    """A text's place in a grammar that takes as long as it is told, by a clock that it moves itself."""

    now_s = 0.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token: int) -> bool:
        return True

    def fill_next_token_bitmask(self, allowed: torch.Tensor, row: int) -> None:
        Slow.now_s += self.seconds
        allowed[row] = -1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time but what ``Slow`` says, and 10 ms of each step that are not a grammar's."""
    Slow.now_s = 0.0
    monkeypatch.setattr(matching.time, "thread_time", lambda: Slow.now_s)
    monkeypatch.setattr(matching.time, "perf_counter", lambda: Slow.now_s)


def batch(*requests: tuple[int, float]) -> list[Matcher]:
    """Of requests with so many answers, each of which takes so long a token."""
    found = []
    for answers, seconds in requests:
        meter = matching.Meter()
        found += [Matcher(Batches, Slow(seconds), 64, meter) for _ in range(answers)]
    return found


class Batches:
    class BatchGrammarMatcher:
        def batch_fill_next_token_bitmask(self, inner: Sequence[Slow], allowed: torch.Tensor, rows: list[int]) -> None:
            for one, row in zip(inner, rows, strict=True):
                one.fill_next_token_bitmask(allowed, row)


def steps(masks: matching.Masks, rows: int, count: int) -> None:
    for _ in range(count):
        masks.forbidden(np.zeros(rows, np.uint64))
        Slow.now_s += 0.01


@pytest.mark.usefixtures("clock")
def test_grammars_take_a_share_of_the_step_and_the_costliest_request_ends() -> None:
    """64 answers of 1 ms each are within what one step may take, and would make a step of 10 ms one of 74."""
    matchers = batch((64, 0.001), (1, 0.002))
    masks = matching.Masks(matchers, 0, [0] * 65, [()] * 65, 64)
    steps(masks, 65, 2 * matching.STEPS)
    assert all(isinstance(matcher.error, GrammarFailed) for matcher in matchers[:64])
    assert "keeps other requests waiting" in str(matchers[0].error) and matchers[64].error is None
    before = Slow.now_s
    steps(masks, 65, 10)
    assert Slow.now_s - before == pytest.approx(10 * 0.012)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("others", "ends"), [(0, False), (1, True)])
def test_a_request_that_has_the_steps_for_itself_may_take_its_time(others: int, ends: bool) -> None:
    matchers = batch((64, 0.002))
    masks = matching.Masks(matchers, others, [0] * 64, [()] * 64, 64)
    steps(masks, 64, 2 * matching.STEPS)
    assert (matchers[0].error is not None) is ends


@pytest.mark.usefixtures("clock")
def test_one_step_of_one_request_has_a_bound_of_its_own() -> None:
    matchers = batch((64, 0.02), (1, 0.0))
    masks = matching.Masks(matchers, 0, [0] * 65, [()] * 65, 64)
    steps(masks, 65, 1)
    assert "for one token" in str(matchers[63].error) and matchers[64].error is None
    assert Slow.now_s < 0.1 + 2 * matching.CROWDED_S, "what is left of a request that has ended is not filled"


BAD = [
    ({"json": "{"}, "is no JSON"),
    ({"json": {1: object()}}, "is no JSON"),
    ({"json": [1]}, "must be a JSON schema"),
    ({"json": "[1]"}, "cannot be used"),
    ({"json": {"type": "nonsense"}}, 'Unsupported type "nonsense"$'),
    ({"json": {"$ref": "#/x"}}, "Cannot find field '?x"),
    ({"json": "false"}, "cannot accept any value"),
    ({"json": '{"a":' * 50_000 + "1" + "}" * 50_000}, "nested too deeply"),
    ({"regex": "(a"}, "Regex parsing error at position 3"),
    ({"regex": "(?=a)b"}, "Lookahead is not supported"),
    ({"regex": ""}, "regex must be text"),
    ({"regex": "a\0"}, "null character"),
    ({"regex": "\ud800"}, "no Unicode text"),
    ({"regex": "a" * 200_000}, "200,000 characters; at most 131,072"),
    ({"choice": "abc"}, "list of strings"),
    ({"choice": []}, "list of strings"),
    ({"choice": ["a", ""]}, "non-empty strings"),
    ({"grammar": "root ::= foo"}, 'Rule "foo" is not defined'),
    ({"grammar": 'a ::= "b"'}, 'name "root" is not found'),
    ({"json_object": 1}, "json_object must be True"),
    ({}, "exactly one of json, .* got none"),
    ({"json": {}, "regex": "a"}, "got json and regex"),
]


@pytest.mark.parametrize(("outputs", "said"), BAD, ids=lambda value: str(value)[:30])
def test_what_cannot_be_kept_to_is_refused_with_the_reason(
    compiler: GrammarCompiler, outputs: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        compiler.compile(StructuredOutputs(**outputs))
    assert "/project/" not in str(refused.value) and len(str(refused.value)) < 700


SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, "[1]"),
    ({"type": "integer", "not": {"const": 3}}, "3"),
    ({"type": "number", "multipleOf": 0.5}, "0.3"),
    ({"type": "integer", "multipleOf": 5}, "3"),
    ({"type": "object", "properties": {"a": {}}, "if": {}, "then": {"required": ["a"]}}, "{}"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ({"type": "object", "properties": {"a": {}}, "required": ["z"]}, "{}"),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "anyOf": [{}]}, "{}"),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, "7"),
    ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5}, "3"),
    ({"type": "string", "pattern": "^a*$", "minLength": 3}, '"aa"'),
    ({"type": "string", "format": "email", "maxLength": 3}, '"a@b.co"'),
    ({"type": "string", "maxLength": 3}, '"\t"'),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, '{"\t": 1}'),
    ({"type": "string", "pattern": 'a"b'}, '"a"b"'),
    ({"type": "string", "pattern": r"a\\b"}, r'"a\b"'),
    ({"type": "string", "pattern": r"a\tb"}, '"a\tb"'),
    ({"minLength": 3}, '"ab"'),
    ({"minimum": 3}, "2"),
    ({"type": "array", "items": {"type": "array", "items": {"minimum": 3}}}, "[[1]]"),
    ({"type": "object", "properties": {"not": {"type": "integer"}}, "required": ["not"]}, "{}"),
    ({"type": ["integer", "string"], "minimum": 3}, "2"),
    ({"type": "object", "propertyNames": {"pattern": "^x$"}}, '{"y": 1}'),
    ({"type": "object", "properties": {"k": {}}, "propertyNames": {"maxLength": 0}}, '{"k": 1}'),
    ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False}, '{"y": 1}'),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}, "[]"),
]


@pytest.mark.parametrize(("schema", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:40])
def test_a_schema_is_kept_to_or_refused(
    tokenizer: Any, compiler: GrammarCompiler, schema: dict[str, Any], bad: str
) -> None:
    try:
        matcher = compiler.compile(StructuredOutputs(json=schema)).matcher()
    except InvalidRequest as refused:
        assert "cannot be held to this JSON schema" in str(refused) or "cannot be used" in str(refused)
        return
    for token in [*(tokenizer.get_vocab()[letter] for letter in bad.replace(" ", "Ġ").replace("\t", "ĉ")), EOS]:
        matcher.take(token)
    assert matcher.error is not None, f"{bad} was written"


def test_common_schemas_are_taken(compiler: GrammarCompiler) -> None:
    item = {"type": "string", "description": "not", "title": "x", "default": "a"}
    for schema in (
        {"title": "T", "type": "object", "properties": {"not": item, "if": {"$ref": "#/$defs/a", "title": "x"}}}
        | {"required": ["not"], "$defs": {"a": {"enum": ["contains", 1], "type": "string"}}},
        {"anyOf": [item, {"type": "null"}], "description": "as pydantic writes Optional", "default": None},
        {"allOf": [{"type": "integer", "minimum": 1}], "description": "one"},
        {"type": "string", "pattern": r'^[^"\\]+\d$'},
        {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
        {},
    ):
        compiler.compile(StructuredOutputs(json=schema))


def test_many_threads_compile_at_once_and_equal_grammars_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [EOS])
    outputs = [StructuredOutputs(regex=f"[a-z]{{1,{i % 3 + 1}}}") for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, outputs))
    assert len(set(grammars)) == 3 and grammars[:3] == grammars[21:]
    assert compiler.compile(outputs[0]) is grammars[0]
    monkeypatch.setattr(structured, "CACHE_BYTES", 2 * grammars[0].nbytes)
    compiler.compile(StructuredOutputs(regex="[a-y]"))
    assert compiler.compile(outputs[0]) is grammars[0] and compiler.compile(outputs[2]) is not grammars[2]


def test_what_a_model_or_an_installation_lacks_is_said(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    some = StructuredOutputs(json_object=True)
    for lacks, compiler in (
        ("needs a tokenizer", GrammarCompiler(None, 10, [1])),
        ("needs an end-of-sequence token", GrammarCompiler(tokenizer, len(tokenizer), [10**6])),
        ("not supported with this model's tokenizer", GrammarCompiler([], 10, [1])),
    ):
        with pytest.raises(InvalidRequest, match=lacks):
            compiler.compile(some)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingPackage, match=r"pip install 'kvtier\[structured\]'"):
        GrammarCompiler(tokenizer, len(tokenizer), [EOS]).compile(some)
    with pytest.raises(InvalidRequest, match="needs a grammar"):
        SamplingState.of(SamplingParams(structured_outputs=some))
