"""Random requests made of the server's own OpenAPI document: none may be answered with a 5xx."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")


# Schemathesis draws what to put into a path with the module `random`, which hypothesis warns of.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_no_request_is_answered_with_a_5xx(served):
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    statuses = set()
    for operation in operations:

        @SETTINGS
        @hypothesis.given(case=operation.as_strategy())
        def ask(case):
            if isinstance(case.body, dict):  # what is taken should not take long
                for name in COUNTS:
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], 4)
            response = case.call(timeout=60)
            statuses.add(response.status_code)
            case.validate_response(response, checks=[not_a_server_error])

        ask()
    assert {200, 400} <= statuses
