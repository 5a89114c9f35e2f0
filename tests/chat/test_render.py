import json
from dataclasses import replace

import pytest
from error_cases import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from saccade import plugins, testing
from saccade.chat.renderer import load_renderer
from saccade.errors import DataError, MediaError, ModelError
from saccade.ledger import ImageRef, Ledger, Origin
from saccade.types import Message

SPECIAL_TOKENS = [
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

PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)  # so no special tokens
TRICKY = st.lists(st.one_of(st.sampled_from([*SPECIAL_TOKENS, *TAGS, "\n", " "]), PLAIN), max_size=5).map("".join)
SIDES = st.integers(1, 4).map(lambda tokens: 16 * tokens)
IMAGES = st.builds(
    ImageRef, path=st.just("a.mp4"), digest=st.just("d"), time=st.floats(0, 99), width=SIDES, height=SIDES
)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def messages(roles, text=TRICKY):
    parts = st.lists(st.one_of(text, IMAGES), max_size=4).map(tuple)
    return st.builds(Message, role=st.sampled_from(roles), parts=parts)


def user(*parts):
    return Message(role="user", parts=parts)


def image(width=32, height=16):
    return ImageRef(path="a.png", digest="d", time=None, width=width, height=height)


def extend(ledger, segment):
    return Ledger(segments=(*ledger.segments, segment))


# ---- whole conversations ------------------------------------------------------------------------------------------


@pytest.mark.slow
@relaxed
@given(data=st.data())
def test_random_conversations_only_append(renderer, data):
    """Prompts extend their ledger; masks cover the sampled tokens; both kinds of ids agree; nothing is lost."""
    opening = data.draw(st.lists(messages(["user"]), min_size=1, max_size=2))
    ledger = extend(Ledger(), renderer.render(Ledger(), opening, tools=data.draw(st.sampled_from([(), (SCHEMA,)]))))
    images = [part for message in opening for part in message.parts if isinstance(part, ImageRef)]
    sampled, prefilled = [], []
    ordinary = [token for token in range(540) if token not in (*renderer.forbidden_ids, *renderer.stop_ids)]
    for turn in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            prefilled += renderer.encode("<think>\n")
            ledger = ledger.prefill(renderer.encode("<think>\n"))
        reply = data.draw(st.lists(st.sampled_from(ordinary), max_size=6))
        reply += data.draw(st.sampled_from([[], [renderer.stop_ids[0]], [renderer.stop_ids[1]]]))
        ledger = ledger.append_completion(reply, logprobs=[-1.0 - turn] * len(reply), version=turn)
        sampled += reply
        results = data.draw(st.lists(messages(["tool"]), min_size=1, max_size=3))
        images += [part for message in results for part in message.parts if isinstance(part, ImageRef)]
        after = extend(ledger, renderer.render(ledger, results))
        assert after.unexpanded_ids()[: len(ledger.unexpanded_ids())] == ledger.unexpanded_ids()
        assert after.input_ids()[: len(ledger)] == ledger.input_ids()
        assert after.segments[-1].origin is Origin.OBSERVATION
        ledger = after

    input_ids, mask = ledger.input_ids(), ledger.loss_mask()
    assert (
        [token for token, is_sampled in zip(input_ids, mask, strict=True) if is_sampled]
        == sampled
        == list(ledger.sampled_tokens())
    )
    assert [t for s in ledger.segments if s.origin is Origin.PREFILL for t in s.tokens] == prefilled
    pad = renderer.forbidden_ids[0]
    assert list(ledger.images()) == images
    assert ledger.unexpanded_ids().count(pad) == len(images)
    assert input_ids.count(pad) == sum(renderer.count_visual_tokens(image) for image in images)
    for slot in ledger.slots():
        assert set(input_ids[slot.index : slot.index + slot.num_tokens]) == {pad}
    assert renderer.compute_position_ids(ledger).shape == (3, len(ledger))


def test_rendering_closes_only_an_open_turn(renderer):
    start = extend(Ledger(), renderer.render(Ledger(), [user("Q")]))
    end, (word, *_) = renderer.stop_ids[0], renderer.encode("red")
    result = Message(role="tool", parts=("nothing",))
    after_stop = renderer.render(start.append_completion((word, end), logprobs=(-1.0, -1.0), version=0), [result])
    after_cut = renderer.render(start.append_completion((word,), logprobs=(-1.0,), version=0), [result])
    after_prefill = renderer.render(start.prefill(renderer.encode("<think>\n")), [result])
    assert renderer.decode(after_stop.tokens) == (
        "\n<|im_start|>user\n<tool_response>\nnothing\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert after_cut.tokens == after_prefill.tokens == (end, *after_stop.tokens)


def test_tool_results_share_one_turn_before_a_user_message(renderer):
    ledger = extend(Ledger(), renderer.render(Ledger(), [user("Q")])).append_completion(
        (renderer.stop_ids[0],), logprobs=(-1,), version=0
    )
    results = [Message(role="tool", parts=(f"r{i}",)) for i in range(2)]
    segment = renderer.render(ledger, [*results, user("Answer now.")])
    assert segment.origin is Origin.OBSERVATION
    assert renderer.decode(segment.tokens) == (
        "\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnswer now.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.render(ledger, [user("And?")]).origin is Origin.OBSERVATION


# ---- special tokens ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@relaxed
@given(text=TRICKY, role=st.sampled_from(["system", "user", "tool"]))
def test_spelled_special_tokens_stay_text(renderer, folder, text, role):
    added = set(AutoTokenizer.from_pretrained(folder).get_added_vocab().values())
    segment = renderer.render(Ledger(), [Message(role=role, parts=(text,))])
    bare = renderer.render(Ledger(), [Message(role=role, parts=())])
    specials = [token for token in segment.tokens if token in added]
    assert specials == [token for token in bare.tokens if token in added]
    assert not segment.slots
    assert text in renderer.decode(segment.tokens)


@pytest.mark.slow
@relaxed
@given(text=TRICKY)
def test_encode_gives_structural_tags_but_no_other_special_tokens(renderer, text):
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert not {*renderer.stop_ids, *renderer.forbidden_ids}.intersection(ids)


def test_a_prefill_has_the_ids_of_the_tokenizer(renderer, folder):
    expected = AutoTokenizer.from_pretrained(folder)("<think>\n<tool_call>")["input_ids"]
    assert list(renderer.encode("<think>\n<tool_call>")) == expected


def test_lone_surrogates_become_question_marks(renderer):
    assert renderer.decode(renderer.encode("a\ud800b")) == "a?b"


# ---- the published template ---------------------------------------------------------------------------------------


def convert_to_hf(message):
    parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in message.parts]
    return {"role": message.role, "content": parts}


@pytest.mark.slow
@relaxed
@given(
    system=st.lists(messages(["system"], PLAIN), max_size=1),
    body=st.lists(messages(["user", "assistant", "tool"], PLAIN), min_size=1, max_size=5),
    tools=st.sampled_from([[], [SCHEMA], [SCHEMA, SCHEMA]]),
)
def test_rendering_equals_the_published_template(renderer, folder, system, body, tools):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [convert_to_hf(message) for message in (*system, *body)]
    expected = tokenizer.apply_chat_template(
        conversation, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(renderer.render(Ledger(), [*system, *body], tools=tools).tokens) == expected


def test_rendering_turn_by_turn_equals_the_template(renderer, folder):
    reply_text = "<think>Look.</think>\n<tool_call>\n{}\n</tool_call>"
    end = renderer.stop_ids[0]
    first, result = user("What?", image()), Message(role="tool", parts=("red", image()))
    ledger = extend(Ledger(), renderer.render(Ledger(), [first], tools=[SCHEMA]))
    reply = (*renderer.encode(reply_text), end)
    ledger = ledger.append_completion(reply, logprobs=[-1.0] * len(reply), version=0)
    ledger = extend(ledger, renderer.render(ledger, [result], tools=[SCHEMA]))
    conversation = [convert_to_hf(first), {"role": "assistant", "content": reply_text}, convert_to_hf(result)]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, tools=[SCHEMA], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(ledger.unexpanded_ids()) == expected


# ---- replies, roles, folders --------------------------------------------------------------------------------------


def test_replies_are_parsed_without_their_stop_id(renderer):
    prefill = renderer.encode("<think>\n")
    sampled = (*renderer.encode("Look.</think>\n<answer>red</answer>"), renderer.stop_ids[0])
    reply = renderer.parse(sampled, prefill=prefill)
    assert (reply.answer, reply.prefill) == ("red", "<think>\n")
    assert reply.text == "<think>\nLook.</think>\n<answer>red</answer>"
    assert renderer.parse(()).blocks == ()


@relaxed
@given(tokens=st.lists(st.integers(0, 700), max_size=30))
def test_any_ids_can_be_parsed(renderer, tokens):
    renderer.parse(tokens, prefill=tokens[:3])


def test_a_family_may_replace_a_detail_of_another(renderer, folder):
    packaged = plugins.load("chat.families", renderer.family)
    my_renderer = load_renderer(folder, replace(packaged, name="my_vl", default_system_prompt="You look twice."))
    testing.check_family(my_renderer)
    assert my_renderer.family == "my_vl"
    assert "You look twice." in my_renderer.decode(my_renderer.render(Ledger(), [user("hi")]).tokens)


def test_unknown_role_and_wrong_image_size_raise(renderer):
    with raises(DataError, key="role", value="wizard"):
        renderer.render(Ledger(), [Message(role="wizard", parts=())])
    with raises(MediaError, key="a.png", value=(33, 16)):
        renderer.render(Ledger(), [user(image(width=33))])


def copy_changed(folder, target, **changes):
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
    ("changes", "key", "value"),
    [
        ({"config": "drop"}, "{folder}/config.json", None),
        ({"config": lambda value: {}}, "model_type", None),
        ({"config": lambda value: {**value, "model_type": "llama"}}, "model_type", "llama"),
        ({"tokenizer": "drop"}, "{folder}/tokenizer.json", None),
        ({"tokenizer": lambda value: {}}, "{folder}/tokenizer.json", None),
        ({"tokenizer": lambda value: {**value, "added_tokens": []}}, "{folder}/tokenizer.json", "<|im_end|>"),
        ({"preprocessor_config": "drop"}, "{folder}/preprocessor_config.json", None),
        ({"preprocessor_config": lambda value: {"patch_size": 8}}, "merge_size", None),
        (
            {"preprocessor_config": lambda value: {**value, "patch_size": "x"}},
            "{folder}/preprocessor_config.json",
            None,
        ),
    ],
)
def test_wrong_checkpoint_folder_raises(folder, tmp_path, changes, key, value):
    with raises(ModelError, key=key.format(folder=tmp_path), value=value):
        load_renderer(copy_changed(folder, tmp_path, **changes))


def test_a_tokenizer_that_spells_a_special_token_as_text_is_rejected(folder, tmp_path):
    def spell_as_text(value):
        special_id = next(entry["id"] for entry in value["added_tokens"] if entry["content"] == "<|im_end|>")
        value["model"]["vocab"]["<"] = special_id
        return value

    with raises(ModelError, key=str(tmp_path / "tokenizer.json")) as caught:
        load_renderer(copy_changed(folder, tmp_path, tokenizer=spell_as_text))
    assert caught.value.value is not None


def test_settings_nested_in_a_processor_config_are_read(folder, tmp_path):
    copy_changed(folder, tmp_path, preprocessor_config="drop")
    with open(f"{folder}/preprocessor_config.json", encoding="utf-8") as file:
        nested = {"image_processor": json.load(file)}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    assert load_renderer(str(tmp_path)).factor == load_renderer(folder).factor


@pytest.mark.parametrize("token", [-1, 2**32, 10**30])
def test_ids_without_a_token_have_no_text(renderer, token):
    tokens = renderer.encode("red")
    assert renderer.parse((token, *tokens)).text == renderer.decode(tokens) == "red"
    assert max(tokens) < renderer.vocab_size
