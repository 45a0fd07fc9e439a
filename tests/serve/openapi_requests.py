"""Requests made from a served OpenAPI document, legal and not: no crash, no 5xx, and answers as documented."""

from __future__ import annotations

from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def check_answers(url: str, *, num_operations: int, num_examples: int) -> None:
    """Of the 5xx only one is an answer: the deadline that the request itself names has passed."""
    modes, checks = schemathesis.GenerationMode, schemathesis.checks
    documented = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) == num_operations
    statuses = set[int]()
    with requests.Session() as session:
        for operation in operations:
            cases = st.one_of(
                [operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)]
            )

            @given(case=cases)
            @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), deadline=None)
            def check(case: Any) -> None:
                answer = case.call(session=session)
                statuses.add(answer.status_code)
                late = answer.status_code == 503 and answer.json()["error"]["code"] == "deadline"
                assert answer.status_code < 500 or (late and "deadline_ms" in case.body), (case.body, answer.text)
                if case.method != "TRACE":
                    case.validate_response(answer, checks=documented)

            check()
        assert {200, 400} <= statuses
        assert session.get(f"{url}/healthz").json() == {"alive": True}
