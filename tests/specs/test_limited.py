"""Limits of an iteration that are asked for in the place of an engine file's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import InputError, load_engine
from planner.specs.catalog import ENGINES, names


@pytest.mark.parametrize("name", names(ENGINES))
def test_nothing_asked_is_the_file_and_its_own_limits_are_too(name: str) -> None:
    engine = load_engine(name)
    assert engine.limited() is engine
    scheduler = engine.scheduler
    named = engine.limited(scheduler.max_sequences, scheduler.chunk_tokens)
    # what its option names may be of all groups of data-parallel attention together
    assert named == engine._replace(scheduler=scheduler._replace(group_sequences=scheduler.group_option))


@given(sequences=st.integers(1, 8192), tokens=st.integers(1, 10**6))
def test_an_iteration_has_a_token_for_each_request_that_decodes(sequences: int, tokens: int) -> None:
    engine = load_engine("vllm")
    if sequences > tokens:
        with pytest.raises(InputError, match=f"--max-num-seqs {sequences}: vllm .* at most {tokens} tokens"):
            engine.limited(sequences, tokens)
    else:
        changed = engine.limited(sequences, tokens).scheduler
        assert (changed.max_sequences, changed.chunk_tokens) == (sequences, tokens)
    assert engine.limited(None, tokens).scheduler.max_sequences == min(1024, tokens)


def test_what_is_reserved_for_activations_follows() -> None:
    engine = load_engine("vllm")
    half = engine.limited(512, 4096).memory
    assert half.logits_rows == pytest.approx(engine.memory.logits_rows / 2)
    assert half.activation_tokens == 4096
    assert load_engine("vllm-0.8").limited(None, 1).memory.activation_tokens == 1


@pytest.mark.parametrize("name", ["lecture", "jetstream", "gpt-fast"])
def test_an_engine_that_never_cuts_a_prompt_has_no_budget(name: str) -> None:
    with pytest.raises(InputError, match=f"engine {name} never cuts a prompt"):
        load_engine(name).limited(tokens=2048)
    assert load_engine(name).limited(7).scheduler.max_sequences == 7


def test_requests_may_outnumber_the_tokens_of_a_prompts_own_passes() -> None:
    """Where prompts run alone, the budget is theirs: decodes are not in it."""
    changed = load_engine("sglang").limited(2048, 512).scheduler
    assert (changed.max_sequences, changed.chunk_tokens) == (2048, 512)
