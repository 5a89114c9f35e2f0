import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from saccade.chat.render import load_renderer
from saccade.errors import DataError, MediaError, ModelError
from saccade.ledger import Ledger, Origin, Picture
from saccade.types import Message

MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|endoftext|>",
    "<image>",
]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>"]
SCHEMA = {"type": "function", "function": {"name": "crop_video", "description": 'Look "again" <b> é.'}}

PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)  # so no marks
TRICKY = st.lists(st.one_of(st.sampled_from([*MARKS, *TAGS, "\n", " "]), PLAIN), max_size=5).map("".join)
SIDES = st.integers(1, 4).map(lambda tokens: 16 * tokens)
PICTURES = st.builds(
    Picture, path=st.just("a.mp4"), digest=st.just("d"), time=st.floats(0, 99), width=SIDES, height=SIDES
)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def messages(roles, text=TRICKY):
    parts = st.lists(st.one_of(text, PICTURES), max_size=4).map(tuple)
    return st.builds(Message, role=st.sampled_from(roles), parts=parts)


def user(*parts):
    return Message(role="user", parts=parts)


def picture(width=32, height=16):
    return Picture(path="a.png", digest="d", time=None, width=width, height=height)


def extend(ledger, segment):
    return Ledger(segments=(*ledger.segments, segment))


# ---- whole conversations ------------------------------------------------------------------------------------------


@pytest.mark.slow
@relaxed
@given(data=st.data())
def test_random_tool_traffic_only_ever_extends(renderer, data):
    """Prompts extend their ledger; masks are the sampled tokens; compact and expanded agree; nothing is lost."""
    opening = data.draw(st.lists(messages(["user"]), min_size=1, max_size=2))
    ledger = extend(Ledger(), renderer.render(Ledger(), opening, tools=data.draw(st.sampled_from([(), (SCHEMA,)]))))
    shown = [part for message in opening for part in message.parts if isinstance(part, Picture)]
    sampled, forced = [], []
    ordinary = [token for token in range(540) if token not in (*renderer.forbidden_ids, *renderer.stop_ids)]
    for turn in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            forced += renderer.encode("<think>\n")
            ledger = ledger.force(renderer.encode("<think>\n"))
        reply = data.draw(st.lists(st.sampled_from(ordinary), max_size=6))
        reply += data.draw(st.sampled_from([[], [renderer.stop_ids[0]], [renderer.stop_ids[1]]]))
        ledger = ledger.act(reply, logprobs=[-1.0 - turn] * len(reply), version=turn)
        sampled += reply
        results = data.draw(st.lists(messages(["tool"]), min_size=1, max_size=3))
        shown += [part for message in results for part in message.parts if isinstance(part, Picture)]
        after = extend(ledger, renderer.render(ledger, results))
        assert after.compact()[: len(ledger.compact())] == ledger.compact()
        assert after.expanded()[: len(ledger)] == ledger.expanded()
        assert after.segments[-1].origin is Origin.TOOL
        ledger = after

    expanded, mask = ledger.expanded(), ledger.mask()
    assert [token for token, on in zip(expanded, mask, strict=True) if on] == sampled == list(ledger.sampled_tokens())
    assert [t for s in ledger.segments if s.origin is Origin.FORCED for t in s.tokens] == forced
    pad = renderer.forbidden_ids[0]
    assert list(ledger.pictures()) == shown
    assert ledger.compact().count(pad) == len(shown)
    assert expanded.count(pad) == sum(renderer.visual_tokens(each) for each in shown)
    for slot in ledger.slots():
        assert set(expanded[slot.at : slot.at + slot.tokens]) == {pad}
    assert renderer.positions(ledger).shape == (3, len(ledger))


def test_the_next_observation_closes_only_what_is_open(renderer):
    start = extend(Ledger(), renderer.render(Ledger(), [user("Q")]))
    end, (word, *_) = renderer.stop_ids[0], renderer.encode("red")
    result = Message(role="tool", parts=("nothing",))
    ended = renderer.render(start.act((word, end), logprobs=(-1.0, -1.0), version=0), [result])
    cut = renderer.render(start.act((word,), logprobs=(-1.0,), version=0), [result])
    prefix = renderer.render(start.force(renderer.encode("<think>\n")), [result])
    assert renderer.decode(ended.tokens) == (
        "\n<|im_start|>user\n<tool_response>\nnothing\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert cut.tokens == prefix.tokens == (end, *ended.tokens)


def test_results_share_one_turn_in_order_and_an_order_to_answer_follows(renderer):
    ledger = extend(Ledger(), renderer.render(Ledger(), [user("Q")])).act(
        (renderer.stop_ids[0],), logprobs=(-1,), version=0
    )
    results = [Message(role="tool", parts=(f"r{i}",)) for i in range(2)]
    segment = renderer.render(ledger, [*results, user("Answer now.")])
    assert segment.origin is Origin.TOOL
    assert renderer.decode(segment.tokens) == (
        "\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnswer now.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.render(ledger, [user("And?")]).origin is Origin.PROMPT


# ---- nothing can be faked -----------------------------------------------------------------------------------------


@pytest.mark.slow
@relaxed
@given(text=TRICKY, role=st.sampled_from(["system", "user", "tool"]))
def test_spelled_marks_stay_text(renderer, folder, text, role):
    added = set(AutoTokenizer.from_pretrained(folder).get_added_vocab().values())
    segment = renderer.render(Ledger(), [Message(role=role, parts=(text,))])
    bare = renderer.render(Ledger(), [Message(role=role, parts=())])
    specials = [token for token in segment.tokens if token in added]
    assert specials == [token for token in bare.tokens if token in added]
    assert not segment.slots
    assert text in renderer.decode(segment.tokens)


@relaxed
@given(text=TRICKY)
def test_encoding_allows_structure_but_no_marks(renderer, text):
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert not {*renderer.stop_ids, *renderer.forbidden_ids}.intersection(ids)


def test_a_forced_prefix_has_the_models_own_ids(renderer, folder):
    natural = AutoTokenizer.from_pretrained(folder)("<think>\n<tool_call>")["input_ids"]
    assert list(renderer.encode("<think>\n<tool_call>")) == natural


def test_lone_surrogates_become_question_marks(renderer):
    assert renderer.decode(renderer.encode("a\ud800b")) == "a?b"


# ---- the published template ---------------------------------------------------------------------------------------


def as_hf(message):
    parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in message.parts]
    return {"role": message.role, "content": parts}


@pytest.mark.slow
@relaxed
@given(
    system=st.lists(messages(["system"], PLAIN), max_size=1),
    body=st.lists(messages(["user", "assistant", "tool"], PLAIN), min_size=1, max_size=5),
    tools=st.sampled_from([[], [SCHEMA], [SCHEMA, SCHEMA]]),
)
def test_it_equals_the_published_template(renderer, folder, system, body, tools):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [as_hf(message) for message in (*system, *body)]
    expected = tokenizer.apply_chat_template(
        conversation, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(renderer.render(Ledger(), [*system, *body], tools=tools).tokens) == expected


def test_a_conversation_in_turns_equals_the_template_in_one(renderer, folder):
    said = "<think>Look.</think>\n<tool_call>\n{}\n</tool_call>"
    end = renderer.stop_ids[0]
    first, result = user("What?", picture()), Message(role="tool", parts=("red", picture()))
    ledger = extend(Ledger(), renderer.render(Ledger(), [first], tools=[SCHEMA]))
    reply = (*renderer.encode(said), end)
    ledger = ledger.act(reply, logprobs=[-1.0] * len(reply), version=0)
    ledger = extend(ledger, renderer.render(ledger, [result], tools=[SCHEMA]))
    conversation = [as_hf(first), {"role": "assistant", "content": said}, as_hf(result)]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, tools=[SCHEMA], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(ledger.compact()) == expected


# ---- replies, roles, folders --------------------------------------------------------------------------------------


def test_replies_are_parsed_without_their_stop_id(renderer):
    forced = renderer.encode("<think>\n")
    said = (*renderer.encode("Look.</think>\n<answer>red</answer>"), renderer.stop_ids[0])
    reply = renderer.parse(said, forced=forced)
    assert (reply.answer, reply.forced) == ("red", "<think>\n")
    assert reply.text == "<think>\nLook.</think>\n<answer>red</answer>"
    assert renderer.parse(()).blocks == ()


@relaxed
@given(tokens=st.lists(st.integers(0, 700), max_size=30))
def test_any_ids_can_be_parsed(renderer, tokens):
    renderer.parse(tokens, forced=tokens[:3])


def test_an_unknown_role_and_an_unfit_picture_are_named(renderer):
    with pytest.raises(DataError, match="no role is called 'wizard'"):
        renderer.render(Ledger(), [Message(role="wizard", parts=())])
    with pytest.raises(MediaError, match=r"a\.png is 33x16: fit its sides to multiples of 16"):
        renderer.render(Ledger(), [user(picture(width=33))])


def copy(folder, target, **changes):
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        with open(f"{folder}/{name}", encoding="utf-8") as file:
            value = json.load(file)
        change = changes.get(name.split(".")[0])
        if change is None:
            (target / name).write_text(json.dumps(value), encoding="utf-8")
        elif change != "drop":
            (target / name).write_text(json.dumps(change(value)), encoding="utf-8")
    return str(target)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"config": "drop"}, "is not a model: it has no config.json"),
        ({"config": lambda value: {}}, "it has no model_type"),
        (
            {"config": lambda value: {**value, "model_type": "llama"}},
            "no model family 'llama'; found: qwen2_5_vl, qwen3_vl",
        ),
        ({"tokenizer": "drop"}, "has no tokenizer.json"),
        ({"tokenizer": lambda value: {}}, "tokenizer.json can't be read"),
        ({"tokenizer": lambda value: {**value, "added_tokens": []}}, r"has no special token '<\|im_end\|>'"),
        ({"preprocessor_config": "drop"}, "has no preprocessor_config.json"),
        ({"preprocessor_config": lambda value: {"patch_size": 8}}, "lacks 'merge_size'"),
    ],
)
def test_folders_that_cannot_be_used(folder, tmp_path, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        load_renderer(copy(folder, tmp_path, **changes))


def test_a_tokenizer_that_spells_a_mark_as_text_is_refused(folder, tmp_path):
    def spell(value):
        mark = next(entry["id"] for entry in value["added_tokens"] if entry["content"] == "<|im_end|>")
        value["model"]["vocab"]["<"] = mark
        return value

    with pytest.raises(ModelError, match="as plain text with a special token's id"):
        load_renderer(copy(folder, tmp_path, tokenizer=spell))


def test_settings_nested_in_a_processor_config_are_found(folder, tmp_path):
    copy(folder, tmp_path, preprocessor_config="drop")
    with open(f"{folder}/preprocessor_config.json", encoding="utf-8") as file:
        nested = {"image_processor": json.load(file)}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    assert load_renderer(str(tmp_path)).factor == load_renderer(folder).factor
