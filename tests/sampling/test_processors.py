from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.processors import LogitsProcessor

from .harness import inputs_for, run, state_for
from .reference import Options


def add_to_first(logits, params):
    return logits.at[:, 0].add(params["amount"] * params["times"])


SHIFT = LogitsProcessor("shift", add_to_first, {"amount": 100.0, "times": 1})
NEGATE = LogitsProcessor("negate", lambda logits, params: -logits)


def test_only_rows_that_ask_are_changed() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    rows = [Options()] * 8
    inputs = inputs_for(rows, 50, processors=(SHIFT, NEGATE))
    inputs.processor_params["shift"]["enabled"][[1, 3]] = True
    inputs.processor_params["shift"]["amount"][3] = -5.0
    inputs.processor_params["negate"]["enabled"][[2, 3]] = True
    _, out = run(logits, inputs, state_for(rows, 50), processors=(SHIFT, NEGATE))
    expected = logits.argmax(-1)
    expected[1] = 0
    expected[2] = logits[2].argmin()
    expected[3] = 0  # shifted down by 5 and then negated: the processors run in their order
    np.testing.assert_array_equal(out.tokens, expected)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = np.zeros((8, 50), np.float32)
    rows = [Options()] * 8
    inputs = inputs_for(rows, 50, processors=(SHIFT, NEGATE))
    inputs.processor_params["shift"]["enabled"][:] = True
    _, out = run(logits, inputs, state_for(rows, 50), processors=(SHIFT, NEGATE))
    np.testing.assert_allclose(out.logprob, -np.log(50), rtol=1e-6)


def test_parameters_resolve_to_defaults_and_unknown_names_are_refused() -> None:
    assert SHIFT.resolve({"times": 3}) == {"amount": 100.0, "times": 3.0}
    with pytest.raises(ValueError, match=r"'shift' has no parameter 'amuont'; it takes \['amount', 'times'\]"):
        SHIFT.resolve({"amuont": 3})


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="name is empty"):
        LogitsProcessor("", add_to_first)
    with pytest.raises(ValueError, match="reserved"):
        LogitsProcessor("a", add_to_first, {"enabled": 1.0})
    with pytest.raises(ValueError, match=r"names \['shift'\], but the step was built with \['negate'\]"):
        rows = [Options()] * 8
        run(
            np.zeros((8, 50), np.float32),
            inputs_for(rows, 50, processors=(SHIFT,)),
            state_for(rows, 50),
            processors=(NEGATE,),
        )
    narrow = LogitsProcessor("narrow", lambda logits, params: jnp.sum(logits, axis=-1))
    with pytest.raises(ValueError, match=r"'narrow' returned shape \(8,\) for logits \(8, 50\)"):
        rows = [Options()] * 8
        inputs = inputs_for(rows, 50, processors=(narrow,))
        run(np.zeros((8, 50), np.float32), inputs, state_for(rows, 50), processors=(narrow,))
